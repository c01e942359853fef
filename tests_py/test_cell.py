"""Single steps: lltm.functional.step and lltm.LLTMCell."""

from __future__ import annotations

import pytest
import support
import torch
from support import CELL_SHAPES, DTYPES, cell_arguments
from torch import nn

import lltm


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", CELL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference(
    dtype: torch.dtype, shape: tuple[int, int, int], bias: bool
) -> None:
    support.check_accuracy(support.cell_outputs, lambda: cell_arguments(shape, dtype, bias))


def test_the_tutorial_s_use_of_the_module_works() -> None:
    rnn = lltm.LLTMCell(32, 128)
    X, h, C = torch.randn(16, 32), torch.randn(16, 128), torch.randn(16, 128)
    new_h, new_C = rnn(X, (h, C))
    (new_h.sum() + new_C.sum()).backward()
    assert new_h.shape == new_C.shape == (16, 128)
    assert rnn.weights.grad is not None
    assert rnn.bias is not None
    assert rnn.bias.grad is not None


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


def test_without_bias_there_is_none() -> None:
    cell = lltm.LLTMCell(3, 5, bias=False)
    assert cell.bias is None
    assert list(cell.state_dict()) == ["weights"]
    assert cell(torch.randn(2, 3))[0].shape == (2, 5)
