"""lltm._C.forward and lltm._C.backward, as in the tutorial."""

from __future__ import annotations

import pydoc
import re

import pytest
import support
import torch
from torch import Tensor

from lltm import _C, reference

FORWARD = ("input", "weights", "bias", "old_h", "old_cell")
BACKWARD = (
    *("grad_h", "grad_cell", "new_cell", "input_gate", "output_gate", "candidate_cell"),
    *("X", "gate_weights", "weights"),
)


def run(a: support.Arguments) -> list[Tensor]:
    return _C.forward(a.input, a.weights, a.bias, a.h, a.c)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_forward_returns_the_step_and_its_intermediate_values(
    dtype: torch.dtype, bias: bool
) -> None:
    a = support.cell_arguments((4, 3, 5), dtype, bias)
    new_h, new_cell, i, o, g, X, gates = run(a)
    assert X.shape == (4, 8)
    assert gates.shape == (4, 15)
    assert {y.shape for y in (new_h, new_cell, i, o, g)} == {(4, 5)}
    torch.testing.assert_close(X, torch.cat([a.h, a.input], dim=1), rtol=0, atol=0)
    torch.testing.assert_close(gates, torch.nn.functional.linear(X, a.weights, a.bias))
    z_i, z_o, z_g = gates.chunk(3, dim=1)
    torch.testing.assert_close(
        (i, o, g), (torch.sigmoid(z_i), torch.sigmoid(z_o), torch.nn.functional.elu(z_g))
    )
    # The kernel does not round intermediate values.
    z_i, z_o, z_g = gates.double().chunk(3, dim=1)
    c_next = a.c.double() + torch.sigmoid(z_i) * torch.nn.functional.elu(z_g)
    h_next = torch.sigmoid(z_o) * torch.tanh(c_next)
    torch.testing.assert_close((new_h, new_cell), (h_next.to(dtype), c_next.to(dtype)))
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close((new_h, new_cell), support.cell_outputs(reference, a))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_backward_agrees_with_autograd(bias: bool) -> None:
    a = support.cell_arguments((4, 3, 5), torch.float64, bias)
    grad_h, grad_cell = torch.randn_like(a.h), torch.randn_like(a.c)
    _, new_cell, i, o, g, X, gates = run(a)
    d_h, d_input, d_weights, d_bias, d_c = _C.backward(
        grad_h, grad_cell, new_cell, i, o, g, X, gates, a.weights
    )

    leaves = a.leaves()
    expected = torch.autograd.grad(
        support.cell_outputs(reference, leaves), leaves.tensors(), [grad_h, grad_cell]
    )
    gradients = (d_input, d_h, d_c, d_weights, d_bias)[: len(expected)]
    torch.testing.assert_close(gradients, expected)
    assert d_bias.shape == (15,)


@pytest.mark.parametrize(("function", "names"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_help_shows_the_signature_and_the_shapes(function: str, names: tuple[str, ...]) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(_C, function)))
    positions = [text.index(f"{name}: ") for name in names]
    assert positions == sorted(positions)
    # Formats of pybind11, Python, Python 3.14.
    assert re.search(r"-> (list\[torch\.Tensor\]|'list\[Tensor\]'|list\[Tensor\])", text)
    for shape in ("(B, H)", "(3H, H+I)", "(B, 3H)"):
        assert shape in text


def test_is_differentiable_like_any_aten_operations() -> None:
    a = support.cell_arguments((2, 2, 3), torch.float64).leaves()

    def states(x: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor) -> list[Tensor]:
        return _C.forward(x, weights, bias, h, c)[:2]

    assert torch.autograd.gradcheck(states, a.tensors())
