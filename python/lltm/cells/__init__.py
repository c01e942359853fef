"""Recurrent cells from the literature, made on first access: ``lltm.cells.cifg.Layer(32, 128)``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from typing import Any

from ..custom.cell import Cell
from ._convert import (
    from_keras,
    from_ncps,
    from_norse,
    from_snntorch,
    from_torchrecurrent,
    from_xlstm,
)

_NAMES = sorted(file.name for file in pkgutil.iter_modules(__path__) if file.name[0] != "_")

__all__ = [*_NAMES, "from_keras", "from_ncps", "from_norse", "from_snntorch"]
__all__ += ["from_torchrecurrent", "from_xlstm"]


class _Cells(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a submodule after its import. Sets its cell instead."""
        super().__setattr__(name, getattr(value, name) if name in _NAMES else value)


sys.modules[__name__].__class__ = _Cells


def __getattr__(name: str) -> Cell:
    if name not in _NAMES:
        frozen = "; PyInstaller packs all cells with --collect-all lltm"
        hint = frozen if getattr(sys, "frozen", False) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    cell: Cell = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return cell


def __dir__() -> list[str]:
    return __all__
