"""The operators written in ATen operations, for compilers that have no kernel of ours.

Applied to an exported program they leave Core ATen operators only. What they can't express they
leave alone: a packed sequence, whose batch_sizes are data, a sequence of dynamic length, because
Core ATen has no loop, and prepacked weights, which only our kernels can read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OperatorBase

# A gradient that is not wanted is None.
Gradients = tuple[Tensor | None, ...]


def decompositions() -> dict[OperatorBase, Callable[..., Any]]:
    """Returns PyTorch's default decomposition table with the operators of lltm added.

    Example::

        program = torch.export.export(layer, (input,))
        program = program.run_decompositions(lltm.decompositions())
    """
    ops = torch.ops.lltm
    table: dict[OperatorBase, Callable[..., Any]] = dict(
        torch.export.default_decompositions().items()
    )
    table[ops.cell.default] = _cell
    table[ops.cell_forward.default] = _cell_forward
    table[ops.cell_backward.default] = _cell_backward
    table[ops.sequence.default] = _sequence
    table[ops.sequence_forward.default] = _sequence_forward
    table[ops.sequence_backward.default] = _sequence_backward
    return table


def _cell(
    input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _cell_forward(input, h, c, weights, bias)[:2]


def _cell_forward(
    input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _step(F.linear(torch.cat([h, input], dim=1), weights, bias), c)


def _cell_backward(
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h: Tensor,
    weights: Tensor,
    activations: Tensor,
    output_mask: Sequence[bool],
) -> Gradients:
    dz, dc = _step_backward(_or_zeros(grad_h, h), _or_zeros(grad_c, h), activations)
    dX = dz @ weights
    hidden = h.shape[1]
    return _wanted(
        output_mask,
        lambda: dX[:, hidden:],
        lambda: dX[:, :hidden],
        lambda: dc,
        lambda: dz.t() @ torch.cat([h, input], dim=1),
        lambda: dz.sum(0),
    )


def _sequence(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
) -> Any:
    result = _sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse)
    return NotImplemented if result is NotImplemented else result[:3]


def _sequence_forward(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
) -> Any:
    if not _is_unrollable(input, batch_sizes):
        return NotImplemented
    steps, batch, _ = input.shape
    hidden = h_0.shape[1]
    weights_h, weights_x = weights[:, :hidden], weights[:, hidden:]
    from_input = F.linear(input, weights_x, bias)
    # Without steps the results are the initial states; an operator returns copies.
    h, c = h_0.clone(), c_0.clone()
    output: list[Tensor] = [input.new_empty(0, hidden)] * steps
    activations: list[Tensor] = [input.new_empty(0, 4 * hidden)] * steps
    for t in _order(steps, reverse):
        h, c, activations[t] = _step(from_input[t] + h @ weights_h.t(), c)
        output[t] = h
    if steps == 0:
        return input.new_empty(0, batch, hidden), h, c, input.new_empty(0, 4 * hidden)
    return torch.stack(output), h, c, torch.cat(activations)


def _sequence_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    h_0: Tensor,
    weights: Tensor,
    output: Tensor,
    activations: Tensor,
    batch_sizes: Tensor | None,
    reverse: bool,
    output_mask: Sequence[bool],
) -> Any:
    if not _is_unrollable(input, batch_sizes):
        return NotImplemented
    steps, batch, _ = input.shape
    hidden = h_0.shape[1]
    weights_h, weights_x = weights[:, :hidden], weights[:, hidden:]
    activations = activations.view(steps, batch, 4 * hidden)
    dh, dc = _or_zeros(grad_h_n, h_0), _or_zeros(grad_c_n, h_0)
    dz_of: list[Tensor] = [input.new_empty(0, 3 * hidden)] * steps
    for t in _order(steps, not reverse):
        if grad_output is not None:
            dh = dh + grad_output[t]
        dz_of[t], dc = _step_backward(dh, dc, activations[t])
        dh = dz_of[t] @ weights_h
    dz = torch.cat(dz_of) if steps else input.new_empty(0, 3 * hidden)
    # The state that each step began with.
    before = [output[1:], h_0.unsqueeze(0)] if reverse else [h_0.unsqueeze(0), output[:-1]]
    h = torch.cat(before)[:steps].reshape(steps * batch, hidden)
    x = input.reshape(steps * batch, input.shape[2])
    return _wanted(
        output_mask,
        lambda: (dz @ weights_x).view(input.shape),
        lambda: dh,
        lambda: dc,
        lambda: dz.t() @ torch.cat([h, x], dim=1),
        lambda: dz.sum(0),
    )


def _step(z: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the pre-activations (B, 3H) and c (B, H) to h', c' and the activations (B, 4H)."""
    z_i, z_o, z_g = z.chunk(3, dim=1)
    i, o, g = torch.sigmoid(z_i), torch.sigmoid(z_o), F.elu(z_g)
    c = c + i * g
    tanh_c = torch.tanh(c)
    return o * tanh_c, c, torch.cat([i, o, g, tanh_c], dim=1)


def _step_backward(dh: Tensor, dc: Tensor, activations: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the pre-activations (B, 3H) and of c (B, H)."""
    i, o, g, tanh_c = activations.chunk(4, dim=1)
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    dz_i = dc * g * (i * (1 - i))
    dz_o = dh * tanh_c * (o * (1 - o))
    dz_g = dc * i * torch.where(g > 0, torch.ones_like(g), g + 1)
    return torch.cat([dz_i, dz_o, dz_g], dim=1), dc


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _wanted(output_mask: Sequence[bool], *gradients: Callable[[], Tensor]) -> Gradients:
    return tuple(
        gradient() if wanted else None
        for wanted, gradient in zip(output_mask, gradients, strict=True)
    )


def _is_unrollable(input: Tensor, batch_sizes: Tensor | None) -> bool:
    return batch_sizes is None and isinstance(input.shape[0], int)


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)
