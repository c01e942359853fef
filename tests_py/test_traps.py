"""Bugs of published versions of this cell.

test_cuda.py has GPU bugs: grid dimensions, streams, launch checks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import support
import torch
from support import DTYPES, Arguments
from torch import Tensor

import lltm

# Around 0, and beyond exp overflow in all dtypes.
LARGE = (0.0, 1e-30, 1.0, 15.0, 17.0, 88.0, 89.0, 104.0, 710.0, 746.0, 1e4)


def cell_of_pre_activations(z: Tensor) -> Arguments:
    """The cell has H = 1; its three gates have pre-activation z (B)."""
    zeros = torch.zeros(len(z), 1, dtype=z.dtype)
    return Arguments(
        input=z.unsqueeze(1),
        h=zeros,
        c=zeros + 0.5,
        weights=torch.tensor([[0.0, 1.0]] * 3, dtype=z.dtype),
        bias=None,
    )


def results(outputs: support.Outputs, implementation: object, a: Arguments) -> list[Tensor]:
    leaves = a.leaves()
    ys = outputs(implementation, leaves)
    gradients = torch.autograd.grad(ys, leaves.tensors(), [torch.ones_like(y) for y in ys])
    return [y.detach() for y in ys] + list(gradients)


def is_finite_and_accurate(outputs: support.Outputs, a: Arguments) -> None:
    for y in results(outputs, lltm.functional, a):
        assert torch.isfinite(y).all()
    support.check_accuracy(outputs, lambda: a)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_pre_activations_give_no_nan(dtype: torch.dtype) -> None:
    # In float32, mask * exp(z) is 0 * inf = NaN above z = 88.
    z = torch.tensor([*LARGE, *(-z for z in LARGE)], dtype=dtype)
    a = cell_of_pre_activations(z)
    is_finite_and_accurate(support.cell_outputs, a)
    a = replace(a, input=torch.stack([a.input, -a.input, a.input]))
    is_finite_and_accurate(support.sequence_outputs, a)


def test_small_differences_survive_in_float64() -> None:
    # float-only fminf or fmaxf would round these values.
    a = cell_of_pre_activations(
        torch.tensor([1e-12, -1e-12, 1.0, 1.0 + 1e-12], dtype=torch.float64)
    )
    a = replace(a, c=torch.zeros_like(a.c))
    h, c = support.cell_outputs(lltm.functional, a)
    assert math.isclose(float(c[0]), 5e-13, rel_tol=1e-9)
    assert math.isclose(float(c[1]), -5e-13, rel_tol=1e-9)
    assert float(c[3] - c[2]) > 0
    assert float(h[3] - h[2]) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_derivative_of_elu_at_0_is_1(dtype: torch.dtype) -> None:
    a = cell_of_pre_activations(torch.zeros(1, dtype=dtype))
    # For c' = c + sigmoid(z) elu(z), the derivative at 0 is sigmoid(0) * 1 + sigmoid'(0) * 0.
    leaves = a.leaves()
    _, c = support.cell_outputs(lltm.functional, leaves)
    assert float(torch.autograd.grad(c.sum(), leaves.input)[0]) == 0.5
