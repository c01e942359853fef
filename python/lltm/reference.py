"""The LLTM in plain PyTorch operations: its definition, for reading.

`cell` and `sequence` have the arguments of lltm.functional's, `LLTMCell` and `LLTM` those of
lltm's, and their state_dict. The tests compare with them and the benchmarks measure against them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _cell, _check, modules
from ._C import ArgumentError

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

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = modules.step_of(self, input, hx, _step)
        return result

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script("LLTMCell")


class LLTM(modules.LLTM):
    """lltm.LLTM by :func:`sequence`."""

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        return modules.layer_of(self, input, hx, _layer)

    def prepack(self, weights: torch.dtype | None = None) -> NoReturn:
        raise NotImplementedError("lltm::reference.LLTM: plain operations have no prepacked form")

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script("LLTM")


def _step(
    module: LLTMCell, input: Tensor, h: Tensor | None, c: Tensor | None
) -> tuple[Tensor, Tensor]:
    """LLTMCell.forward of tensors."""
    _check.of_parameters("LLTMCell", input, module.weights)
    if input.dim() not in (1, 2) or input.shape[-1] != module.input_size:
        size = module.input_size
        raise ArgumentError(
            f"lltm::LLTMCell: expected input of shape (B, {size}) or ({size},),"
            f" got {tuple(input.shape)}"
        )
    shape = (*input.shape[:-1], module.hidden_size)
    if h is None or c is None:
        h = c = input.new_zeros(shape)
    _check.shape("LLTMCell", "h", h, shape)
    _check.shape("LLTMCell", "c", c, shape)
    if input.dim() == 2:
        return cell(input, (h, c), module.weights, module.bias)
    row = (h.unsqueeze(0), c.unsqueeze(0))
    h, c = cell(input.unsqueeze(0), row, module.weights, module.bias)
    return h.squeeze(0), c.squeeze(0)


def _layer(
    module: LLTM,
    input: Tensor,
    h_0: Tensor | None,
    c_0: Tensor | None,
    batch_sizes: Tensor | None = None,
    sorted_indices: Tensor | None = None,
    unsorted_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LLTM.forward of tensors, or of the parts of a PackedSequence."""
    _check.of_parameters("LLTM", input, getattr(module, module._names[0]))
    batched = batch_sizes is not None or input.dim() != 2
    if batched or input.shape[1] != module.input_size:
        module.check_input(input, batch_sizes)
    x = input if batched else input.unsqueeze(1)
    if module.batch_first and batch_sizes is None and batched:
        x = x.transpose(0, 1)
    if batch_sizes is None:
        batch = x.shape[1]
    elif sorted_indices is not None:
        batch = len(sorted_indices)
    elif len(batch_sizes) > 0:
        batch = int(batch_sizes[0])
    else:
        batch = 0 if h_0 is None else h_0.shape[1]
    shape = module._state_shape(batch)
    if h_0 is None or c_0 is None:
        h_0 = c_0 = x.new_zeros(shape)
    else:
        expected = shape if batched else (shape[0], shape[2])
        _check.shape("LLTM", "h_0", h_0, expected)
        _check.shape("LLTM", "c_0", c_0, expected)
        h_0, c_0 = (h_0, c_0) if batched else (h_0.unsqueeze(1), c_0.unsqueeze(1))
        h_0, c_0 = module.permute_hidden((h_0, c_0), sorted_indices)
    directions = 2 if module.bidirectional else 1
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(module.num_layers):
        if layer > 0 and module.dropout > 0:
            x = F.dropout(x, module.dropout, module.training)
        outputs: list[Tensor] = []
        for direction in range(directions):
            k = len(last)
            weights, bias = (getattr(module, name) for name in module._names[2 * k : 2 * k + 2])
            output, state = sequence(
                x,
                (h_0[k], c_0[k]),
                weights,
                bias,
                batch_sizes=batch_sizes,
                reverse=direction == 1,
            )
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, dim=-1)
    h_n, c_n = (torch.stack(states) for states in zip(*last, strict=True))
    if not batched:
        return x.squeeze(1), h_n.squeeze(1), c_n.squeeze(1)
    if module.batch_first and batch_sizes is None:
        x = x.transpose(0, 1)
    h_n, c_n = module.permute_hidden((h_n, c_n), unsorted_indices)
    return x, h_n, c_n


def _refuse_script(name: str) -> NoReturn:
    # What torch.jit.script would compile calls the operators, and is no reference then.
    raise NotImplementedError(
        f"lltm::reference.{name}: torch.jit.script takes lltm.{name}, which loads its state_dict"
    )
