"""lltm.LLTM and LLTMCell as modules, and concurrent directions.

Other tests: test_properties.py for values, test_drop_in.py for nn.LSTM's interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import support
import torch
from support import threads
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_output_is_packed_as_nn_lstm_s(enforce_sorted: bool) -> None:
    x = torch.randn(6, 4, 3)
    lengths = torch.tensor([6, 3, 3, 1] if enforce_sorted else [3, 1, 6, 3])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    output, theirs = (module(packed)[0] for module in (lltm.LLTM(3, 5), nn.LSTM(3, 5)))
    assert type(output) is PackedSequence
    for mine, expected in zip(output[1:], theirs[1:], strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine, expected)


OF_LAYERS = {
    **dict.fromkeys(("weights_l0", "weights_l0_reverse"), (300, 103)),
    **dict.fromkeys(("weights_l1", "weights_l1_reverse"), (300, 300)),
    **dict.fromkeys(("bias_l0", "bias_l0_reverse", "bias_l1", "bias_l1_reverse"), (300,)),
}


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lltm.LLTMCell, {"weights": (300, 103), "bias": (300,)}),
        (partial(lltm.LLTM, num_layers=2, bidirectional=True), OF_LAYERS),
    ],
)
def test_parameters_have_the_documented_names_shapes_and_range(
    make: Any, shapes: dict[str, tuple[int, ...]]
) -> None:
    module = make(3, 100, dtype=torch.float64)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == shapes
    values = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert values.dtype == torch.float64
    assert float(values.abs().max()) <= 0.1
    # 30,000 uniform values suffice for these bounds.
    assert float(values.max()) > 0.099
    assert float(values.min()) < -0.099
    assert abs(float(values.mean())) < 0.002
    names = [name for name in shapes if "weights" in name]
    assert list(make(3, 5, bias=False).state_dict()) == names


@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_the_derivative_of_elu_at_0_is_1(dtype: torch.dtype) -> None:
    cell = lltm.LLTMCell(1, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        cell.weights.copy_(torch.tensor([[0.0, 1.0]]))  # each gate is the input
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    _, c = cell(x)
    # c' = sigmoid(z) elu(z): sigmoid(0) * 1 + sigmoid'(0) * 0.
    assert float(torch.autograd.grad(c.sum(), x)[0]) == 0.5


def test_a_layer_also_loads_biases_with_a_single_row() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2, bidirectional=True)
    checkpoint = {
        name: value.unsqueeze(0) if "bias" in name else value
        for name, value in lltm.LLTM(3, 5, 2, bidirectional=True).state_dict().items()
    }
    assert not any(layer.load_state_dict(checkpoint))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, checkpoint[name].reshape(value.shape)), name


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_inside_another_module(assign: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = lltm.LLTMCell(3, 5, device="meta" if assign else None)

    model = Model()
    checkpoint = {"rnn.weights": torch.randn(15, 8), "rnn.bias": torch.randn(1, 15)}
    assert not any(model.load_state_dict(checkpoint, assign=assign))
    assert model.rnn.bias is not None
    assert torch.equal(model.rnn.bias, checkpoint["rnn.bias"][0])
    assert checkpoint["rnn.bias"].shape == (1, 15), "the caller's checkpoint was changed"


needs_two_cpus = pytest.mark.skipif(support.usable_cpus() < 2, reason="one usable CPU")
LAYERS = [getattr(lltm, name) for name in lltm.reference.__all__ if f"{name}Cell" in lltm.__all__]


@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
@pytest.mark.parametrize("make", LAYERS)
def test_flushing_subnormal_numbers_changes_no_others(make: Any, dtype: torch.dtype) -> None:
    """As in a program that GCC links with -ffast-math."""
    layer = make(9, 33, dtype=dtype)
    x = torch.randn(7, 16, 9, dtype=dtype).mul_(torch.logspace(-30, 0, 16).to(dtype)[:, None])
    x.requires_grad_()

    def results() -> list[Tensor]:
        output, _ = layer(x)
        return [output, *torch.autograd.grad(output.sum(), [x, *layer.parameters()])]

    with threads(1):
        expected = results()
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU does not flush subnormal numbers")
        try:
            atol = 4 * torch.finfo(dtype).tiny + torch.finfo(dtype).eps
            torch.testing.assert_close(
                results(), expected, rtol=8 * torch.finfo(dtype).eps, atol=atol
            )
        finally:
            torch.set_flush_denormal(False)


class TestDirectionsSideBySide:
    """With two threads, each direction may use a separate thread."""

    @pytest.fixture(autouse=True)
    def _two_threads(self) -> Iterator[None]:
        with threads(2):
            yield

    def test_hooks_of_saved_tensors_and_a_graph_kept_for_two_backwards(self) -> None:
        layer = lltm.GRU(3, 5, bidirectional=True)
        x = torch.randn(4, 2, 3)
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = layer(x)[0].square().sum()
        assert any(tensor is layer.weight_hh_l0_reverse for tensor in packed)
        first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(layer.parameters()))
        assert all(map(torch.equal, first, second))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, list(layer.parameters()))

    @needs_two_cpus
    def test_a_profiler_sees_both(self) -> None:
        layer = lltm.LSTM(64, 64, bidirectional=True)
        with torch.profiler.profile() as profile:
            with torch.no_grad():
                layer(torch.randn(5, 3, 64))
            layer(torch.randn(5, 3, 64))[0].sum().backward()
        for operator in ("sequence", "sequence_forward", "sequence_backward"):
            events = [e for e in profile.events() or [] if e.name == f"lltm::{operator}"]
            assert len({e.thread for e in events}) == len(events) == 2, operator


@pytest.mark.parametrize("open_gate", [True, False])
def test_gates_reach_their_limits(open_gate: bool) -> None:
    """With a gate that is nearly closed, an infinite state would stay infinite."""
    layer, h = lltm.GRU(3, 8), torch.rand(1, 1, 8)
    parameters = dict(layer.named_parameters())
    with torch.inference_mode(), support.threads(1):
        for parameter in parameters.values():
            parameter.zero_()
        parameters["bias_ih_l0"][8:16] = 1e4 if open_gate else -1e4
        parameters["bias_ih_l0"][16:] = 0 if open_gate else 1e4
        _, h_n = layer(torch.randn(20, 1, 3), h)
    assert torch.equal(h_n, h if open_gate else torch.ones_like(h))
