"""One step: lltm.functional.cell and lltm.LLTMCell."""

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


def test_follows_the_equations() -> None:
    a = cell_arguments((4, 3, 5), torch.float64)
    assert a.bias is not None
    z = torch.cat([a.h, a.input], dim=1) @ a.weights.t() + a.bias
    z_i, z_o, z_g = z[:, :5], z[:, 5:10], z[:, 10:]
    c = a.c + torch.sigmoid(z_i) * torch.where(z_g > 0, z_g, torch.exp(z_g) - 1)
    h = torch.tanh(c) * torch.sigmoid(z_o)
    torch.testing.assert_close(support.cell_outputs(lltm.functional, a), (h, c))


def test_the_module_is_the_function_of_its_parameters() -> None:
    cell = lltm.LLTMCell(3, 5)
    a = cell_arguments((4, 3, 5))
    expected = lltm.functional.cell(a.input, (a.h, a.c), cell.weights, cell.bias)
    torch.testing.assert_close(cell(a.input, (a.h, a.c)), expected)


def test_the_tutorial_s_use_of_the_module_works() -> None:
    rnn = lltm.LLTMCell(32, 128)
    X, h, C = torch.randn(16, 32), torch.randn(16, 128), torch.randn(16, 128)
    new_h, new_C = rnn(X, (h, C))
    (new_h.sum() + new_C.sum()).backward()
    assert new_h.shape == new_C.shape == (16, 128)
    assert rnn.weights.grad is not None
    assert rnn.bias is not None
    assert rnn.bias.grad is not None


@pytest.mark.parametrize("with_state", [True, False])
def test_takes_one_row_without_a_batch_like_nn_lstmcell(with_state: bool) -> None:
    cell, lstm = lltm.LLTMCell(3, 5), nn.LSTMCell(3, 5)
    x = torch.randn(3)
    state = (torch.randn(5), torch.randn(5)) if with_state else None
    h, c = cell(x, state)
    assert [y.shape for y in (h, c)] == [y.shape for y in lstm(x, state)]
    batched = None if state is None else (state[0][None], state[1][None])
    torch.testing.assert_close((h[None], c[None]), cell(x[None], batched))


def test_parameters_have_the_documented_names_shapes_and_range() -> None:
    cell = lltm.LLTMCell(3, 100, dtype=torch.float64)
    assert {name: tuple(p.shape) for name, p in cell.named_parameters()} == {
        "weights": (300, 103),
        "bias": (300,),
    }
    values = nn.utils.parameters_to_vector(cell.parameters()).detach()
    assert values.dtype == torch.float64
    assert float(values.abs().max()) <= 0.1
    # 30 000 uniform values come this near to the bounds, and to a mean of 0.
    assert float(values.max()) > 0.099
    assert float(values.min()) < -0.099
    assert abs(float(values.mean())) < 0.002


def test_reset_parameters_draws_anew() -> None:
    cell = lltm.LLTMCell(3, 5)
    before = cell.weights.detach().clone()
    cell.reset_parameters()
    assert not torch.equal(before, cell.weights)


def test_without_bias_there_is_none() -> None:
    cell = lltm.LLTMCell(3, 5, bias=False)
    assert cell.bias is None
    assert list(cell.state_dict()) == ["weights"]
    assert cell(torch.randn(2, 3))[0].shape == (2, 5)


def test_repr_names_what_is_not_the_default() -> None:
    assert repr(lltm.LLTMCell(3, 5)) == "LLTMCell(3, 5)"
    assert repr(lltm.LLTMCell(3, 5, bias=False)) == "LLTMCell(3, 5, bias=False)"
