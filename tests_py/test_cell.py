"""lltm.LLTMCell. test_properties.py and tests_cpp/test_cells.cpp test its values."""

from __future__ import annotations

import torch
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
