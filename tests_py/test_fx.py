"""torch.fx: a layer is a leaf, as torch.nn's layers are. And quantization, which passes over it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lltm


class Model(nn.Module):
    """A layer and a cell that are given states, and twice an input that is no proxy."""

    def __init__(self, implementation: Any = lltm, prepacked: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.rnn = implementation.LLTM(3, 5, num_layers=2)
        if prepacked:
            self.rnn = self.rnn.prepack()
        self.cell = implementation.LLTMCell(5, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, hx: Any) -> Tensor:
        output, (h, c) = self.rnn(self.inner(x), hx=hx)
        h, c = self.cell(output[-1], (h[0], c[0]))
        h, c = self.cell(torch.ones(4, 5), [h, c])
        h, c = self.cell(torch.ones(4, 5), (h, c))
        result: Tensor = self.head(h)
        return result


MODELS: dict[str, Callable[[], Model]] = {
    "lltm": Model,
    "reference": lambda: Model(lltm.reference),
    "prepacked": lambda: Model(prepacked=True),
}


def draw() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return torch.randn(6, 4, 3), (torch.randn(2, 4, 5), torch.randn(2, 4, 5))


def called(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_and_a_cell_are_leaves(name: str) -> None:
    model, arguments = MODELS[name](), draw()
    graph = fx.symbolic_trace(model)
    assert called(graph) == ["inner", "rnn", "cell", "cell", "cell", "head"]
    functions = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert functions == {operator.getitem}
    torch.testing.assert_close(graph(*arguments), model(*arguments))


def test_a_graph_with_a_layer_is_traced_and_transformed_again() -> None:
    model, arguments = Model(), draw()
    graph = fx.symbolic_trace(model)
    for again in (fx.symbolic_trace(graph), fx.Transformer(graph).transform()):
        assert called(again) == called(graph)
        torch.testing.assert_close(again(*arguments), model(*arguments))


def test_a_model_without_a_state_is_traced() -> None:
    model = nn.Sequential(nn.Linear(3, 3), lltm.LLTM(3, 5))
    graph = fx.symbolic_trace(model)
    assert called(graph) == ["0", "1"]
    x = torch.randn(6, 4, 3)
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("name", ["LLTM", "LLTMCell"])
def test_a_module_by_itself_is_refused(name: str) -> None:
    text = f"^lltm::{name}: torch.fx traces a model that holds this module, not the module alone$"
    with pytest.raises(RuntimeError, match=text):
        fx.symbolic_trace(getattr(lltm, name)(3, 5))


@pytest.mark.parametrize("make", [lltm.LLTM, lltm.LLTMCell])
def test_a_call_with_constants_alone_is_no_constant(make: Callable[..., nn.Module]) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.inner(torch.ones(4, 3))[0].sum()
            return result

    model = Constant()
    graph = fx.symbolic_trace(model)
    x = torch.randn(4, 3)
    for _ in range(2):  # it does not keep the weights of now
        torch.testing.assert_close(graph(x), model(x))
        model.inner.reset_parameters()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")  # all of it is deprecated, part by part
@pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="an engine of x86"
)
def test_quantization_by_fx_keeps_the_layer_in_float_and_quantizes_the_rest() -> None:
    # PyTorch has announced that it will drop it.
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    model, arguments = Model().eval(), draw()
    mapping = quantization.get_default_qconfig_mapping("x86")
    prepared = quantize_fx.prepare_fx(model, mapping, arguments)
    prepared(*arguments)
    quantized = quantize_fx.convert_fx(prepared)
    assert type(quantized.rnn) is lltm.LLTM
    assert type(quantized.head).__module__.startswith("torch.ao.nn.quantized")
    torch.testing.assert_close(quantized(*arguments), model(*arguments), atol=0.1, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="an engine of x86"
)
def test_dynamic_quantization_passes_over_the_layer() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    model, arguments = Model().eval(), draw()
    quantized = quantization.quantize_dynamic(model)
    assert (type(quantized.rnn), type(quantized.cell)) == (lltm.LLTM, lltm.LLTMCell)
    assert type(quantized.head) is not nn.Linear
    torch.testing.assert_close(quantized(*arguments), model(*arguments), atol=0.1, rtol=0)
