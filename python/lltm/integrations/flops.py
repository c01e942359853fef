"""FLOP formulas of the operators for torch.utils.flop_counter. They count GEMMs only.

Prepacked weights count as stored: with zeros between heads if H/heads is not a multiple of 32.

With weights (G H, I) and (G H, H), forward needs 2 N (H+I) G H operations for N = T B rows. In
backward, the weight gradients need as many, and so do the gradients of input and h.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from .schema import Op, is_step, with_arguments

_ops = torch.ops.lltm


def _product(a: Any, *weights: Any) -> int:
    """Returns the operations of the input's rows with matrices of these shapes."""
    return 2 * prod(a.input.shape[:-1]) * sum(map(prod, weights))


def _forward(a: Any) -> int:
    of_x = a.weight_ih.shape
    if len(of_x) > 1:
        return _product(a, of_x, *([] if a.weight_hh is None else [a.weight_hh.shape]))
    if not is_fake(a.input):  # prepacked: the matrices, and scales of int8
        matrices = _ops._unpack(a.cell, a.weight_ih)
        return _product(a, *(tensor.shape for tensor in matrices[:2]))
    # Prepacked, without data: an upper bound
    blocks_x, blocks_h, *_ = _ops._cell(a.cell)
    hidden = a.h_0.shape[-1]
    rows_x, rows_h = (sum(b >= 0 for b in blocks) * hidden for blocks in (blocks_x, blocks_h))
    return _product(a, (rows_x, a.input.shape[-1]), (rows_h, hidden))


def _step_backward(a: Any) -> int:
    of_input, of_h, _, of_weight_ih, of_weight_hh, *_ = a.output_mask
    of_x = _product(a, a.weight_ih.shape)
    if a.weight_hh is None:
        return of_x * ((of_input or of_h) + of_weight_ih)
    of_recurrent = _product(a, a.weight_hh.shape) * (of_h + of_weight_hh)
    return of_x * (of_input + of_weight_ih) + of_recurrent


def _backward(a: Any) -> int:
    if is_step(a):
        return _step_backward(a)
    # Backward through the states is always needed. With checkpoints, forward is recomputed.
    products = 1 + (a.output_mask[3] or a.output_mask[4]) + (a.checkpoint_steps > 0)
    return _forward(a) * products


def _count(op: Op, formula: Callable[[Any], int]) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return with_arguments(op, formula, *args, **kwargs)

    return count


for _op, _formula in {
    _ops.sequence: _forward,
    _ops.sequence_forward: _forward,
    _ops.sequence_backward: _backward,
}.items():
    register_flop_formula(_op, get_raw=True)(_count(_op.default, _formula))
