"""What torch.utils.flop_counter counts for the operators: their matrix products.

N rows of [h, x] through weights (G H, H+I) of G gates are 2 N (H+I) G H operations forward;
backward, each of the gradients, of the weights and of [h, x], is a product of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ._cell import GATES

Shape = Sequence[int]

_ops = torch.ops.lltm


def _product(input: Shape, weights: Shape) -> int:
    return 2 * prod(input[:-1]) * prod(weights)


@register_flop_formula([_ops.cell, _ops.cell_forward, _ops.sequence, _ops.sequence_forward])
def _forward(input: Shape, h: Shape, c: Shape, weights: Shape, *args: Any, **kwargs: Any) -> int:
    return _product(input, weights)


@register_flop_formula(_ops.sequence_prepacked)
def _prepacked(input: Shape, h_0: Shape, *args: Any, **kwargs: Any) -> int:
    hidden = h_0[-1]
    return _product(input, (GATES * hidden, hidden + input[-1]))


@register_flop_formula(_ops.cell_backward)
def _cell_backward(
    input: Shape, h: Shape, c: Shape, weights: Shape, *args: Any, **kwargs: Any
) -> int:
    mask: Sequence[bool] = args[-1]  # output_mask
    of_input, of_h, _, of_weights, _ = mask
    return _product(input, weights) * ((of_input or of_h) + of_weights)


@register_flop_formula(_ops.sequence_backward)
def _sequence_backward(
    input: Shape,
    h_0: Shape,
    c_0: Shape,
    weights: Shape,
    bias: Shape | None,
    batch_sizes: Shape | None,
    reverse: bool,
    checkpoint_steps: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    mask: Sequence[bool] = args[-1]  # output_mask
    of_weights = mask[3]
    # Whatever is wanted, gradients go back through the states; from checkpoints, after forward
    # once more.
    return _product(input, weights) * (1 + of_weights + (checkpoint_steps > 0))
