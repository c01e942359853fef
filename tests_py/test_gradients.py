"""Derivatives: numerical checks of every order and mode, and which gradients are computed.

That gradients are accurate in each dtype is tested beside the values (test_cell.py,
test_sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import support
import torch
from support import Arguments, cell_arguments, packed_arguments, sequence_arguments
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import lltm

CASES: dict[str, tuple[support.Outputs, Callable[[], Arguments]]] = {
    "cell": (support.cell_outputs, lambda: cell_arguments((3, 2, 4), torch.float64)),
    "cell without bias": (
        support.cell_outputs,
        lambda: cell_arguments((3, 2, 4), torch.float64, bias=False),
    ),
    "sequence": (
        support.sequence_outputs,
        lambda: sequence_arguments((3, 2, 2, 3), torch.float64),
    ),
    "sequence in reverse": (
        support.sequence_outputs,
        lambda: sequence_arguments((3, 2, 2, 3), torch.float64, reverse=True),
    ),
    "checkpointed sequence": (
        partial(support.checkpointed_outputs, 2),
        lambda: sequence_arguments((3, 2, 2, 3), torch.float64),
    ),
    "checkpointed packed sequence in reverse": (
        partial(support.checkpointed_outputs, 2),
        lambda: packed_arguments((3, 2, 1), 2, 3, torch.float64, reverse=True),
    ),
    "packed sequence": (
        support.sequence_outputs,
        lambda: packed_arguments((3, 2, 1), 2, 3, torch.float64),
    ),
    "packed sequence in reverse": (
        support.sequence_outputs,
        lambda: packed_arguments((3, 2, 1), 2, 3, torch.float64, reverse=True),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of the differentiable tensors, and the tensors."""
    outputs, draw = CASES[request.param]
    return _function(outputs, draw())


Function = Callable[..., tuple[Tensor, ...]]


def _function(outputs: support.Outputs, a: Arguments) -> tuple[Function, list[Tensor]]:
    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        return outputs(lltm.functional, a.map(lambda _: next(given)))

    return function, a.leaves().tensors()


def test_gradients_are_those_of_finite_differences(case: tuple[Function, list[Tensor]]) -> None:
    function, tensors = case
    assert gradcheck(function, tensors)


def test_second_derivatives_are_those_of_finite_differences(
    case: tuple[Function, list[Tensor]],
) -> None:
    function, tensors = case
    assert gradgradcheck(function, tensors)


def test_forward_mode_derivatives_are_those_of_finite_differences(
    case: tuple[Function, list[Tensor]],
) -> None:
    function, tensors = case
    assert gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False)


def test_batched_gradients_are_those_of_a_loop(case: tuple[Function, list[Tensor]]) -> None:
    function, tensors = case
    assert gradcheck(function, tensors, check_batched_grad=True)


@pytest.mark.parametrize("used", range(3), ids=["output", "h_n", "c_n"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_gradient_of_one_output_alone_is_right(used: int, reverse: bool) -> None:
    a = sequence_arguments((5, 3, 2, 4), torch.float64, reverse=reverse)
    gradients = []
    for implementation in (lltm.functional, lltm.reference):
        leaves = a.leaves()
        y = support.sequence_outputs(implementation, leaves)[used]
        gradients.append(torch.autograd.grad(y.square().sum(), leaves.tensors()))
    torch.testing.assert_close(*gradients)


def test_gradients_add_up_over_two_backward_passes() -> None:
    a = cell_arguments((3, 2, 4), torch.float64).leaves()
    h, _ = support.cell_outputs(lltm.functional, a)
    h.sum().backward(retain_graph=True)
    assert a.weights.grad is not None
    first = a.weights.grad.clone()
    h.sum().backward()
    torch.testing.assert_close(a.weights.grad, 2 * first)


def test_an_argument_changed_in_place_before_backward_is_refused() -> None:
    a = cell_arguments((3, 2, 4)).leaves()
    x = a.input * 1
    h, _ = lltm.functional.cell(x, (a.h, a.c), a.weights, a.bias)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


# ----- torch.func ------------------------------------------------------------


@pytest.mark.parametrize("name", ["cell", "sequence", "packed sequence", "checkpointed sequence"])
def test_torch_func_grad_agrees_with_backward(name: str) -> None:
    outputs, draw = CASES[name]
    function, tensors = _function(outputs, draw())

    def loss(*tensors: Tensor) -> Tensor:
        return sum((y.square().sum() for y in function(*tensors)), torch.zeros(()))

    transformed = torch.func.grad(loss, argnums=tuple(range(5)))(*tensors)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    torch.testing.assert_close(transformed, expected)


@pytest.mark.parametrize("name", ["cell", "sequence", "packed sequence", "checkpointed sequence"])
def test_torch_func_jvp_agrees_with_vjp(name: str) -> None:
    outputs, draw = CASES[name]
    function, tensors = _function(outputs, draw())
    tensors = [tensor.detach() for tensor in tensors]
    tangents = [torch.randn_like(tensor) for tensor in tensors]
    results, directional, *_ = torch.func.jvp(function, tuple(tensors), tuple(tangents))
    cotangents = tuple(torch.randn_like(y) for y in results)
    _, vjp, *_ = torch.func.vjp(function, *tensors)
    forward = sum((d * y).sum() for d, y in zip(directional, cotangents, strict=True))
    backward = sum((d * t).sum() for d, t in zip(vjp(cotangents), tangents, strict=True))
    torch.testing.assert_close(forward, backward)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["cell", "sequence"])
def test_vmap_agrees_with_a_loop(name: str, requires_grad: bool) -> None:
    outputs, draw = CASES[name]
    function, tensors = _function(outputs, draw())
    input, *others = [tensor.detach().requires_grad_(requires_grad) for tensor in tensors]
    inputs = torch.stack([input, 2 * input, -input])
    mapped = torch.vmap(function, in_dims=(0, None, None, None, None))(inputs, *others)
    looped = [torch.stack(ys) for ys in zip(*(function(x, *others) for x in inputs), strict=True)]
    torch.testing.assert_close(mapped, tuple(looped))


def test_per_sample_gradients_agree_with_a_loop() -> None:
    cell = lltm.LLTMCell(3, 5, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in cell.named_parameters()}
    rows = torch.randn(4, 3, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        states: tuple[Tensor, Tensor] = torch.func.functional_call(cell, parameters, (row,))
        return states[0].sum() + states[1].sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, rows)
    for k, row in enumerate(rows):
        one = torch.func.grad(loss)(parameters, row)
        for name in parameters:
            torch.testing.assert_close(mapped[name][k], one[name])
