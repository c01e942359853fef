"""lltm.functional: cell names, custom and serialized cells, forms of states, resets, masks.

test_properties.py compares values with lltm.reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

import lltm
from lltm import functional

T, B, I, H = 5, 3, 4, 6  # noqa: E741


@lltm.cell(gates=("i", "g"), parameters={"p": 0.25}, states={"m": 0.5})
def two_states(z: Any, c: Tensor, m: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    m_next = 0.5 * m + torch.tanh(c * p)
    c_next = torch.sigmoid(z.i) * c + torch.tanh(z.g) * m_next
    return torch.tanh(c_next), c_next, m_next


same = torch.testing.assert_close


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Weights and biases; bias_ih includes a custom cell's parameters."""
    weight_ih, weight_hh, bias_ih, bias_hh, *own = module.parameters()
    return [weight_ih, weight_hh, torch.cat([bias_ih, *own]), bias_hh]


MODULES: dict[Any, Any] = {
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "rnn_tanh": (nn.RNN, nn.RNNCell),
    two_states: (two_states.Layer, two_states.Cell),
    two_states.text: (two_states.Layer, two_states.Cell),
}


@pytest.mark.parametrize("cell", MODULES, ids=lambda cell: str(cell)[:20])
def test_a_function_computes_its_module(cell: Any) -> None:
    layer, step = (kind(I, H, dtype=torch.float64) for kind in MODULES[cell])
    count = {"lstm": 2, "gru": 1, "rnn_tanh": 1}.get(cell, 3)
    drawn = tuple(torch.randn(B, H, dtype=torch.float64) for _ in range(count))
    states: Any = drawn if count > 1 else drawn[0]
    x = torch.randn(T, B, I, dtype=torch.float64)

    same(functional.step(cell, x[0], states, *parameters_of(step)), step(x[0], states))

    of_layer: Any = tuple(s[None] for s in drawn) if count > 1 else states[None]
    expected, last = layer(x, of_layer)
    output, after = functional.sequence(cell, x, states, *parameters_of(layer))
    same(output, expected)
    same(after, tuple(s[0] for s in last) if count > 1 else last[0])

    weight_ih, weight_hh, *biases = (p.detach() for p in parameters_of(layer))
    packed = functional.prepack(cell, weight_ih, weight_hh)
    same(functional.sequence(cell, x, states, packed, None, *biases)[0], expected)


@pytest.mark.parametrize("implementation", [functional, lltm.reference], ids=["ours", "reference"])
def test_the_lltm_also_accepts_two_matrices_and_biases(implementation: Any) -> None:
    x, h, c = torch.randn(B, I), torch.randn(B, H), torch.randn(B, H)
    weights, bias_ih, bias_hh = torch.randn(3 * H, H + I), torch.randn(3 * H), torch.randn(3 * H)
    two = implementation.step("lltm", x, (h, c), weights[:, H:], weights[:, :H], bias_ih, bias_hh)
    same(two, implementation.step("lltm", x, (h, c), weights, None, bias_ih + bias_hh))
    same(two, implementation.step("lltm", x, (h, c), weights, None, bias_ih, bias_hh))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_resets_and_masks_as_the_reference_does(reverse: bool) -> None:
    a = support.sequence_arguments((6, 4, 3, 5), torch.float64, reverse=reverse)
    a = support.with_masks(a)
    ours = support.sequence_outputs(lltm.functional, a)
    torch.testing.assert_close(ours, support.sequence_outputs(lltm.reference, a))


@pytest.mark.xdist_group("compilers")
@pytest.mark.parametrize("cell", [two_states, "gru"], ids=["custom", "gru"])
def test_a_function_compiles_without_a_graph_break(cell: Any) -> None:
    module = two_states.Cell(I, H) if cell is two_states else nn.GRUCell(I, H)
    states: Any = (torch.randn(B, H),) * 3 if cell is two_states else torch.randn(B, H)

    def run(x: Tensor) -> Any:
        return functional.step(cell, x, states, *parameters_of(module))

    x = torch.randn(B, I)
    same(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


def test_wrong_cells_and_states_are_named() -> None:
    x, h = torch.randn(B, I), torch.randn(B, H)
    wide: Any = (torch.randn(6 * H, I), torch.randn(6 * H, H))
    two, value_error = two_states, lltm.ArgumentError
    no_bias = "bias_ih to be a tensor of the biases and the cell's parameters p, got None"
    of_dtype = "m of dtype float32, the dtype of the input, got float64"
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        (3, h, TypeError, "cell to be a str or an lltm.Cell, got int"),
        ("peephole", h, value_error, "cell to be one of lltm, lstm, gru, rnn_tanh, rnn_relu"),
        ("gru", (h, h), TypeError, "states to be a tensor, got tuple"),
        (two, (h, h), TypeError, "states to be a tuple (h, c, m), got 2 values"),
        (two, (h, h, h), TypeError, no_bias),
        (two, (h, h, h.double()), TypeError, of_dtype),
        (two, (h, h, h[:2]), value_error, "m of shape (3, 6), got (2, 6)"),
        (two, (h, h, h.to("meta")), RuntimeError, "m on device cpu, the device of the input, got"),
    ]
    for cell, states, error, text in calls:
        with pytest.raises(error) as caught:
            functional.step(cell, x, states, *wide)
        assert str(caught.value).startswith(f"lltm::step: expected {text}")
