"""lltm.LLTMCell. test_properties.py and tests_cpp/test_cells.cpp test its values."""

from __future__ import annotations

import pytest
import torch
from support import DTYPES
from torch import nn

import lltm


def test_parameters_have_the_documented_names_shapes_and_range() -> None:
    cell = lltm.LLTMCell(3, 100, dtype=torch.float64)
    assert {name: tuple(p.shape) for name, p in cell.named_parameters()} == {
        "weights": (300, 103),
        "bias": (300,),
    }
    values = nn.utils.parameters_to_vector(cell.parameters()).detach()
    assert values.dtype == torch.float64
    assert float(values.abs().max()) <= 0.1
    # 30,000 uniform values suffice for these bounds.
    assert float(values.max()) > 0.099
    assert float(values.min()) < -0.099
    assert abs(float(values.mean())) < 0.002
    assert list(lltm.LLTMCell(3, 5, bias=False).state_dict()) == ["weights"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_derivative_of_elu_at_0_is_1(dtype: torch.dtype) -> None:
    cell = lltm.LLTMCell(1, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        cell.weights.copy_(torch.tensor([[0.0, 1.0]]))  # each gate is the input
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    _, c = cell(x)
    # c' = sigmoid(z) elu(z): sigmoid(0) * 1 + sigmoid'(0) * 0.
    assert float(torch.autograd.grad(c.sum(), x)[0]) == 0.5
