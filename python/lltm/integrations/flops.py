"""FLOP formulas of the operators for torch.utils.flop_counter. They count GEMMs only.

Prepacked weights count as stored: with zeros between heads if H/heads is not a multiple of 32.

With weights (G H, I) and (G H, H), forward needs 2 N (H+I) G H operations for N = T B rows. In
backward, the weight gradients need as many, and so do the gradients of input and h.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]

_ops = torch.ops.lltm


def _product(input: Shape, weight_ih: Shape, weight_hh: Shape | None) -> int:
    weights = prod(weight_ih) + (0 if weight_hh is None else prod(weight_hh))
    return 2 * prod(input[:-1]) * weights


_FORWARD = [_ops.step, _ops.step_forward, _ops.sequence, _ops.sequence_forward]


@register_flop_formula(_FORWARD, get_raw=True)
def _forward(
    cell: str,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    of_x: Shape = weight_ih.shape
    of_h: Shape | None = None if weight_hh is None else weight_hh.shape
    if len(of_x) == 1 and is_fake(input):  # prepacked, without data: an upper bound
        blocks_x, blocks_h, *_ = _ops._cell(cell)
        rows_x, rows_h = (
            sum(b >= 0 for b in blocks) * h.shape[-1] for blocks in (blocks_x, blocks_h)
        )
        of_x, of_h = (rows_x, input.shape[-1]), (rows_h, h.shape[-1])
    elif len(of_x) == 1:  # the matrices, and scales of int8
        of_x, of_h, *_ = [*(tensor.shape for tensor in _ops._unpack(cell, weight_ih)), None]
    return _product(input.shape, of_x, of_h)


@register_flop_formula(_ops.step_backward)
def _step_backward(
    cell: str,
    input: Shape,
    h: Shape,
    c: Shape | None,
    weight_ih: Shape,
    weight_hh: Shape | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    mask: Sequence[bool] = args[-1]  # output_mask
    of_input, of_h, _, of_weight_ih, of_weight_hh, *_ = mask
    if weight_hh is None:
        return _product(input, weight_ih, None) * ((of_input or of_h) + of_weight_ih)
    of_x = _product(input, weight_ih, None) * (of_input + of_weight_ih)
    return of_x + _product(input, weight_hh, None) * (of_h + of_weight_hh)


@register_flop_formula(_ops.sequence_backward)
def _sequence_backward(
    cell: str,
    input: Shape,
    h_0: Shape,
    c_0: Shape | None,
    weight_ih: Shape,
    weight_hh: Shape | None,
    bias_ih: Shape | None,
    bias_hh: Shape | None,
    batch_sizes: Shape | None,
    reverse: bool,
    reset: Shape | None,
    checkpoint_steps: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    mask: Sequence[bool] = args[-1]  # output_mask
    # Backward through the states is always needed. With checkpoints, forward is recomputed.
    products = 1 + (mask[3] or mask[4]) + (checkpoint_steps > 0)
    return _product(input, weight_ih, weight_hh) * products
