"""Mistakes that published versions of this cell made, one test each.

What only a GPU shows (grid dimensions, streams, launch checks) is tested where one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import support
import torch
from support import DTYPES, Arguments
from torch import Tensor

import lltm

# Pre-activations that overflow exp in float16, float32 and float64, and everything around 0.
LARGE = (0.0, 1e-30, 1.0, 15.0, 17.0, 88.0, 89.0, 104.0, 710.0, 746.0, 1e4)


def cell_of_pre_activations(z: Tensor) -> Arguments:
    """A cell of H = 1 whose three gates all get the pre-activation z, (B)."""
    zeros = torch.zeros(len(z), 1, dtype=z.dtype)
    return Arguments(
        input=z.unsqueeze(1),
        h=zeros,
        c=zeros + 0.5,
        weights=torch.tensor([[0.0, 1.0]] * 3, dtype=z.dtype),
        bias=None,
    )


def results(outputs: support.Outputs, implementation: object, a: Arguments) -> list[Tensor]:
    """Outputs, and gradients of their sum."""
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
    # mask * exp(z) is 0 * inf = NaN above z = 88 in float32.
    z = torch.tensor([*LARGE, *(-z for z in LARGE)], dtype=dtype)
    is_finite_and_accurate(support.cell_outputs, cell_of_pre_activations(z))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_pre_activations_in_a_sequence_give_no_nan(dtype: torch.dtype) -> None:
    z = torch.tensor([*LARGE, *(-z for z in LARGE)], dtype=dtype)
    a = cell_of_pre_activations(z)
    a = replace(a, input=torch.stack([a.input, -a.input, a.input]))
    is_finite_and_accurate(support.sequence_outputs, a)


def test_small_differences_survive_in_float64() -> None:
    # float-only fminf or fmaxf would round them away, and gradcheck would fail.
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
    # c' = c + sigmoid(z) elu(z): at 0 the derivative is sigmoid(0) * 1 + sigmoid'(0) * 0.
    leaves = a.leaves()
    _, c = support.cell_outputs(lltm.functional, leaves)
    assert float(torch.autograd.grad(c.sum(), leaves.input)[0]) == 0.5


@pytest.mark.parametrize(
    "outputs", [support.cell_outputs, support.sequence_outputs], ids=["cell", "sequence"]
)
def test_the_gradient_of_the_bias_has_the_shape_of_the_bias(outputs: support.Outputs) -> None:
    a = (
        support.cell_arguments((1, 3, 5))
        if outputs is support.cell_outputs
        else support.sequence_arguments((1, 1, 3, 5))
    )
    assert results(outputs, lltm.functional, a)[-1].shape == (15,)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_empty_batch_gives_empty_results(requires_grad: bool) -> None:
    a = support.cell_arguments((0, 3, 5)).map(lambda t: t.requires_grad_(requires_grad))
    h, c = support.cell_outputs(lltm.functional, a)
    assert h.shape == c.shape == (0, 5)
    a = support.sequence_arguments((4, 0, 3, 5)).map(lambda t: t.requires_grad_(requires_grad))
    output, h_n, c_n = support.sequence_outputs(lltm.functional, a)
    assert output.shape == (4, 0, 5)
    assert h_n.shape == c_n.shape == (0, 5)


def test_an_empty_batch_gives_zero_gradients() -> None:
    for outputs, a in (
        (support.cell_outputs, support.cell_arguments((0, 3, 5))),
        (support.sequence_outputs, support.sequence_arguments((4, 0, 3, 5))),
    ):
        *_, d_input, d_h, d_c, d_weights, d_bias = results(outputs, lltm.functional, a)
        assert d_input.shape == a.input.shape
        assert d_h.shape == d_c.shape == (0, 5)
        torch.testing.assert_close(d_weights, torch.zeros(15, 8))
        torch.testing.assert_close(d_bias, torch.zeros(15))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_sequence_gives_the_initial_states(dtype: torch.dtype, reverse: bool) -> None:
    a = support.sequence_arguments((0, 4, 3, 5), dtype, reverse=reverse)
    output, h_n, c_n, *gradients = results(support.sequence_outputs, lltm.functional, a)
    assert output.shape == (0, 4, 5)
    assert torch.equal(h_n, a.h)
    assert torch.equal(c_n, a.c)
    assert h_n.data_ptr() != a.h.data_ptr()
    d_input, d_h, d_c, d_weights, d_bias = gradients
    assert d_input.shape == (0, 4, 3)
    for y, expected in ((d_h, 1), (d_c, 1), (d_weights, 0), (d_bias, 0)):
        assert torch.equal(y, torch.full_like(y, expected))


def test_expanded_gradients_are_read_with_their_strides() -> None:
    # sum().backward() passes a gradient of stride 0.
    a = support.cell_arguments((4, 3, 5), torch.float64)
    gradients = []
    for implementation in (lltm.functional, lltm.reference):
        leaves = a.leaves()
        h, c = support.cell_outputs(implementation, leaves)
        strides: list[tuple[int, ...]] = []
        h.register_hook(lambda grad, strides=strides: strides.append(grad.stride()))
        (h.sum() + c.sum()).backward()
        assert strides == [(0, 0)]
        gradients.append([t.grad for t in leaves.tensors()])
    torch.testing.assert_close(*gradients)


def test_expanded_gradients_of_a_sequence_are_read_with_their_strides() -> None:
    a = support.sequence_arguments((6, 4, 3, 5), torch.float64)
    gradients = []
    for implementation in (lltm.functional, lltm.reference):
        leaves = a.leaves()
        output, h_n, c_n = support.sequence_outputs(implementation, leaves)
        (output.sum() + h_n.sum() + c_n.sum()).backward()
        gradients.append([t.grad for t in leaves.tensors()])
    torch.testing.assert_close(*gradients)


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def with_gaps(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, math.nan)], dim=-1)[..., 0]


def padded_rows(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), math.nan, dtype=t.dtype)
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


@pytest.mark.parametrize("layout", [transposed, with_gaps, padded_rows, expanded])
@pytest.mark.parametrize("argument", support.NAMES)
@pytest.mark.parametrize("name", ["cell", "sequence", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_change_the_values(
    dtype: torch.dtype, name: str, argument: str, layout: Callable[[Tensor], Tensor]
) -> None:
    outputs = support.cell_outputs if name == "cell" else support.sequence_outputs
    if name == "cell":
        a = support.cell_arguments((4, 3, 5), dtype)
    elif name == "sequence":
        a = support.sequence_arguments((6, 4, 3, 5), dtype)
    else:
        a = support.packed_arguments((4, 2, 1), 3, 5, dtype)
    strided = layout(getattr(a, argument))
    plain = a.with_argument(argument, strided.contiguous())
    a = a.with_argument(argument, strided)
    assert strided.stride() != getattr(plain, argument).stride() or strided.dim() == 1
    expected = outputs(lltm.functional, plain)
    torch.testing.assert_close(outputs(lltm.functional, a), expected)

    def gradients(a: Arguments) -> tuple[Tensor, ...]:
        a = a.map(lambda t: t.detach().requires_grad_())
        ys = outputs(lltm.functional, a)
        total = sum((y.float().square().sum() for y in ys), torch.zeros(()))
        return torch.autograd.grad(total, a.tensors())

    torch.testing.assert_close(gradients(a), gradients(plain))


@pytest.mark.parametrize("layout", [transposed, with_gaps, padded_rows, expanded])
@pytest.mark.parametrize("name", ["cell", "sequence"])
def test_strided_gradients_are_read_with_their_strides(
    name: str, layout: Callable[[Tensor], Tensor]
) -> None:
    outputs = support.cell_outputs if name == "cell" else support.sequence_outputs
    a = (
        support.cell_arguments((4, 3, 5))
        if name == "cell"
        else support.sequence_arguments((6, 4, 3, 5))
    ).leaves()
    ys = outputs(lltm.functional, a)
    grads = [layout(torch.randn_like(y)) for y in ys]
    strided = torch.autograd.grad(ys, a.tensors(), grads, retain_graph=True)
    dense = torch.autograd.grad(ys, a.tensors(), [g.contiguous() for g in grads])
    torch.testing.assert_close(strided, dense)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", support.NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_spread_as_in_plain_pytorch(
    dtype: torch.dtype, argument: str, value: float
) -> None:
    # One element only: the rows it does not reach must stay finite.
    a = support.cell_arguments((4, 3, 5), dtype)
    getattr(a, argument).view(-1)[0] = value
    ours = support.cell_outputs(lltm.functional, a)
    plain = support.cell_outputs(lltm.reference, a)
    for y, expected in zip(ours, plain, strict=True):
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y == math.inf, expected == math.inf)
        assert torch.equal(y == -math.inf, expected == -math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_spread_through_a_sequence_as_in_plain_pytorch(
    dtype: torch.dtype, value: float
) -> None:
    a = support.sequence_arguments((6, 4, 3, 5), dtype)
    a.input[2, 1, 0] = value
    ours = support.sequence_outputs(lltm.functional, a)
    plain = support.sequence_outputs(lltm.reference, a)
    assert torch.isfinite(ours[0][:2]).all()
    assert torch.isfinite(ours[0][:, [0, 2, 3]]).all()
    for y, expected in zip(ours, plain, strict=True):
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y == math.inf, expected == math.inf)
        assert torch.equal(y == -math.inf, expected == -math.inf)


def test_double_backward_is_not_that_of_constants() -> None:
    # Saved activations are constants to autograd; a second derivative that took them so would
    # be wrong without an error.
    a = support.cell_arguments((2, 3, 4), torch.float64)
    second = []
    for implementation in (lltm.functional, lltm.reference):
        leaves = a.leaves()
        h, c = support.cell_outputs(implementation, leaves)
        first = torch.autograd.grad(h.square().sum() + c.sum(), leaves.tensors(), create_graph=True)
        penalty = sum((g.square().sum() for g in first), torch.zeros(()))
        second.append(torch.autograd.grad(penalty, leaves.tensors()))
    torch.testing.assert_close(*second)


def test_a_batch_larger_than_a_grid_dimension_works() -> None:
    # CUDA grids hold 65 535 in y and z; here the row count is only large.
    a = support.cell_arguments((70_000, 1, 2), torch.float64)
    ours = results(support.cell_outputs, lltm.functional, a)
    torch.testing.assert_close(ours, results(support.cell_outputs, lltm.reference, a))


def test_an_infinite_gradient_of_many_rows_is_that_of_plain_pytorch() -> None:
    # Products that take floats apart would make NaN of it: infinity less infinity. With nothing
    # negative anywhere, and nothing saturated, it stays infinite back to the first step.
    a = support.sequence_arguments((4, 40, 3, 35)).map(lambda tensor: tensor.abs() / 8)
    gradient = torch.zeros(4, 40, 35)
    gradient[2, 1, 0] = math.inf
    found = []
    for implementation in (lltm.functional, lltm.reference):
        h = a.h.clone().requires_grad_()
        output = support.sequence_outputs(implementation, replace(a, h=h))[0]
        found.append(torch.autograd.grad(output, h, gradient)[0])
    ours, theirs = found
    assert theirs[1].isinf().all()
    torch.testing.assert_close(ours, theirs)
