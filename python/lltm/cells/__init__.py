"""Recurrent cells from the literature, made on first access: ``lltm.cells.cifg.Layer(32, 128)``."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from ..custom.cell import Cell
from ._convert import (
    from_keras,
    from_ncps,
    from_norse,
    from_snntorch,
    from_torchrecurrent,
    from_xlstm,
)

# The cells. Each is defined in the module of the same name.
alif: Cell
alpha: Cell
augru: Cell
block_gru: Cell
cfc: Cell
cifg: Cell
cornn: Cell
dreamer_gru: Cell
exprnn: Cell
gru_d: Cell
hgrn: Cell
indrnn: Cell
indylstm: Cell
janet: Cell
keras_gru: Cell
layernorm_gru: Cell
layernorm_lstm: Cell
leaky: Cell
lem: Cell
lif: Cell
ligru: Cell
lru: Cell
mgu: Cell
mingru: Cell
minlstm: Cell
multiplicative_lstm: Cell
mut1: Cell
mut3: Cell
norse_lif: Cell
peephole_lstm: Cell
plif: Cell
rg_lru: Cell
rsynaptic: Cell
scrn: Cell
slstm: Cell
synaptic: Cell
t_lstm: Cell
ugrnn: Cell
zoneout_lstm: Cell

_NAMES = sorted(__annotations__)

__all__ = [*_NAMES, "from_keras", "from_ncps", "from_norse", "from_snntorch"]
__all__ += ["from_torchrecurrent", "from_xlstm"]


class _Cells(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a submodule after its import. Sets its cell instead."""
        super().__setattr__(name, getattr(value, name) if name in _NAMES else value)


sys.modules[__name__].__class__ = _Cells


if not TYPE_CHECKING:  # type checkers report other names

    def __getattr__(name: str) -> Cell:
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return __all__
