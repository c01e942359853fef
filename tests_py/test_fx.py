"""torch.fx treats layers as leaves, like torch.nn's; quantization skips them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flat
from torch import Tensor, fx, nn

import lltm
from lltm.cells import slstm

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


class Model(nn.Module):
    """The two calls have an input that is not a proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.rnn = lltm.LLTM(3, 5, num_layers=2)
        self.cell = lltm.LLTMCell(5, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, hx: Any) -> Tensor:
        output, (h, c) = self.rnn(self.inner(x), hx=hx)
        h, c = self.cell(output[-1], (h[0], c[0]))
        h, c = self.cell(torch.ones(4, 5), [h, c])
        h, c = self.cell(torch.ones(4, 5), (h, c))
        result: Tensor = self.head(h)
        return result


def draw() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return torch.randn(6, 4, 3), (torch.randn(2, 4, 5), torch.randn(2, 4, 5))


def called(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_module"]


def test_a_graph_with_a_layer_is_traced_and_transformed_again() -> None:
    model, arguments = Model(), draw()
    graph = fx.symbolic_trace(model)
    for again in (graph, fx.symbolic_trace(graph), fx.Transformer(graph).transform()):
        assert called(again) == ["inner", "rnn", "cell", "cell", "cell", "head"]
        torch.testing.assert_close(again(*arguments), model(*arguments))


def replaced(module: nn.Module) -> nn.Module:
    lltm.replace_(module)
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: lltm.LSTM(3, 5, num_layers=2, bidirectional=True),
    "GRU": lambda: lltm.GRU(3, 5),
    "LLTM": lambda: lltm.LLTM(3, 5),
    "LSTMCell": lambda: lltm.LSTMCell(3, 5),
    "GRUCell": lambda: lltm.GRUCell(3, 5),
    "LLTMCell": lambda: lltm.LLTMCell(3, 5),
    "custom layer": lambda: slstm.Layer(3, 5),
    "custom cell": lambda: slstm.Cell(3, 5),
    "replaced LSTM": lambda: replaced(nn.LSTM(3, 5)),
    "replaced GRUCell": lambda: replaced(nn.GRUCell(3, 5)),
    "projection": lambda: lltm.LSTM(3, 5, proj_size=2),
    "reference": lambda: lltm.reference.GRU(3, 5),
    "prepacked": lambda: lltm.LSTM(3, 5).prepack(),
    "prepacked custom layer": lambda: slstm.Layer(3, 5).prepack(),
}
# Python loops and checks prevent tracing through the others.
TRACED_THROUGH = [n for n in KINDS if not n.startswith(("projection", "reference", "prepacked"))]


class Holder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.module = module

    def forward(self, x: Tensor) -> Any:
        result = self.module(self.inner(x))
        is_layer = hasattr(self.module, "num_layers")
        return result, self.module(x, result[1] if is_layer else result)


def input_of(module: nn.Module) -> Tensor:
    return torch.randn(*([6] if hasattr(module, "num_layers") else []), 4, 3)


def targets(graph: fx.GraphModule, op: str) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == op]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_one_node_whose_hooks_run_when_the_graph_does(kind: str) -> None:
    model = Holder(KINDS[kind]())
    x = input_of(model.module)
    seen: list[str] = []

    def before(module: nn.Module, args: Any) -> Any:
        seen.append("before")
        return 2 * args[0], *args[1:]

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        seen.append("after")
        return torch.utils._pytree.tree_map(lambda y: 3 * y, result)

    model.module.register_forward_pre_hook(before)
    model.module.register_forward_hook(after)
    graph = fx.symbolic_trace(model)
    assert called(graph) == ["inner", "module", "module"]
    assert seen == []
    found = graph(x)
    assert seen == ["before", "after"] * 2
    torch.testing.assert_close(found, model(x))


def around(module: nn.Module) -> nn.Module:
    base: Any = type(module)

    class Around(base):  # type: ignore[misc]
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            result = super().forward(2 * input, hx)
            return torch.utils._pytree.tree_map(lambda y: 3 * y, result)

    module.__class__ = Around
    return module


@pytest.mark.parametrize("kind", TRACED_THROUGH)
def test_code_of_a_subclass_around_forward_is_traced(kind: str) -> None:
    model = Holder(around(KINDS[kind]()))
    x = input_of(model.module)
    seen: list[str] = []
    model.module.register_forward_hook(lambda *_: seen.append("hook"))
    graph = fx.symbolic_trace(model)
    assert called(graph) == ["inner"]
    operators = [name for name in targets(graph, "call_function") if "lltm" in name]
    assert operators == [f"lltm.{'layer' if x.dim() == 3 else 'layer_step'}"] * 2
    assert seen == ["hook"] * 2  # called also when torch.fx traces through
    torch.testing.assert_close(graph(x), model(x))
    for got, expected in zip(*(gradients(m, x, model) for m in (graph, model)), strict=True):
        torch.testing.assert_close(got, expected)


def gradients(module: Any, x: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    total = torch.stack([y.square().sum() for y in flat(module(x))]).sum()
    return torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("kind", TRACED_THROUGH)
def test_a_call_that_a_subclass_or_an_instance_replaces_is_made_once(kind: str) -> None:
    module = KINDS[kind]()
    base: Any = type(module)

    class Called(base):  # type: ignore[misc]
        def __call__(self, input: Tensor, *args: Any) -> Any:
            return super().__call__(2 * input, *args)

    module.__class__ = Called
    model = Holder(module)
    x = input_of(module)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x))
    module.__class__ = base
    whole: Any = module.forward
    module.forward = lambda input, *args: whole(2 * input, *args)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("kind", TRACED_THROUGH)
def test_a_module_that_is_the_root_is_traced_through(kind: str) -> None:
    module = KINDS[kind]()
    x = input_of(module)
    graph = fx.symbolic_trace(module, concrete_args={"hx": None})
    torch.testing.assert_close(graph(x), module(x))


@pytest.mark.parametrize("name", ["LLTM", "LSTMCell"])
def test_a_root_that_cannot_tell_whether_hx_is_given_is_an_error(name: str) -> None:
    text = (
        rf"^lltm::{name}: torch\.fx can't tell whether hx is None: trace a model that holds this"
        r" module, or with concrete_args=\{'hx': None\}$"
    )
    with pytest.raises(RuntimeError, match=text):
        fx.symbolic_trace(getattr(lltm, name)(3, 5))


def test_a_gru_as_the_root_accepts_a_state_or_none() -> None:
    gru = lltm.GRU(3, 5)
    graph = fx.symbolic_trace(gru)
    x, h_0 = torch.randn(6, 4, 3), torch.randn(1, 4, 5)
    torch.testing.assert_close(graph(x), gru(x))
    torch.testing.assert_close(graph(x, h_0), gru(x, h_0))


def test_a_graph_accepts_a_packed_sequence() -> None:
    model = nn.Sequential(lltm.GRU(3, 5))
    packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3), torch.randn(1, 3)])
    graph = fx.symbolic_trace(model)
    torch.testing.assert_close(graph(packed)[1], model(packed)[1])


@pytest.mark.parametrize("make", [lltm.LLTM, lltm.LLTMCell])
def test_a_call_with_only_constants_is_not_folded(make: Callable[..., nn.Module]) -> None:
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
    for _ in range(2):  # the current weights are read each time
        torch.testing.assert_close(graph(x), model(x))
        model.inner.reset_parameters()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")  # PyTorch deprecates all of it
@pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="an engine of x86"
)
def test_quantization_by_fx_keeps_the_layer_in_float_and_quantizes_the_rest() -> None:
    # PyTorch plans to remove the module.
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
def test_dynamic_quantization_skips_the_layer() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    model, arguments = Model().eval(), draw()
    quantized = quantization.quantize_dynamic(model)
    assert (type(quantized.rnn), type(quantized.cell)) == (lltm.LLTM, lltm.LLTMCell)
    assert type(quantized.head) is not nn.Linear
    torch.testing.assert_close(quantized(*arguments), model(*arguments), atol=0.1, rtol=0)
