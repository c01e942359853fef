"""The LLTM in plain PyTorch operations: its definition, for reading.

`cell` and `sequence` have the arguments of lltm.functional's, `LLTMCell` and `LLTM` those of
lltm's, and their state_dict. The tests compare with them and the benchmarks measure against them.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _cell, modules

__all__ = ["LLTM", "LLTMCell", "cell", "sequence"]


def cell(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step; see :func:`lltm.functional.cell`."""
    h, c = state
    z = F.linear(torch.cat([h, input], dim=1), weights, bias)
    h, c, _ = _cell.forward(z.chunk(_cell.GATES, dim=1), c)
    return h, c


def sequence(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    checkpoint_steps: int = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A loop over steps; see :func:`lltm.functional.sequence`.

    checkpoint_steps changes what is saved and not what is computed: here nothing.
    """
    h, c = state
    steps = input.unbind(0) if batch_sizes is None else input.split(batch_sizes.tolist())
    # Without steps, one of no rows: so the results depend on every argument, as those of
    # torch.nn.functional.linear do without rows.
    steps = steps or (input.reshape(0, input.shape[-1]),)
    outputs: list[Tensor] = []
    for x in reversed(steps) if reverse else steps:
        # The first rows of the batch take this step. The others have ended or, in reverse, not
        # begun, and keep their state.
        rows = x.shape[0]
        h_next, c_next = cell(x, (h[:rows], c[:rows]), weights, bias)
        outputs.append(h_next)
        if rows < h.shape[0]:
            h_next = torch.cat([h_next, h[rows:]])
            c_next = torch.cat([c_next, c[rows:]])
        h, c = h_next, c_next
    if reverse:
        outputs.reverse()
    output = torch.cat(outputs).view(*input.shape[:-1], h.shape[1])
    return output, (h, c)


class LLTMCell(modules.LLTMCell):
    """lltm.LLTMCell by :func:`cell`."""

    _cell = staticmethod(cell)

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script("LLTMCell")


class LLTM(modules.LLTM):
    """lltm.LLTM by :func:`sequence`."""

    _sequence = staticmethod(sequence)

    def prepack(self, weights: torch.dtype | None = None) -> NoReturn:
        raise NotImplementedError("lltm::reference.LLTM: plain operations have no prepacked form")

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script("LLTM")


def _refuse_script(name: str) -> NoReturn:
    # What torch.jit.script would compile calls the operators, and is no reference then.
    raise NotImplementedError(
        f"lltm::reference.{name}: torch.jit.script takes lltm.{name}, which loads its state_dict"
    )
