"""torch.fx traces a layer as a call of its operator; a tracer may make it a leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flat, run_python
from torch import Tensor, fx, nn

import lltm
from lltm.cells import slstm

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

REBOUND = """
import sys, types
import torch, torch._dynamo, torch._inductor, torch.ao.quantization, torch.distributed.tensor
import torch.fx, torch.onnx, torch.utils.flop_counter

def known():
    found = {}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            found.update(((name, key), value) for key, value in vars(module).items())
            for cls in filter(lambda value: isinstance(value, type), [*vars(module).values()]):
                key = cls.__module__, cls.__qualname__
                found.update(((*key, member), value) for member, value in vars(cls).items())
    return found

before = known()
import lltm
lltm.LSTM(2, 3)(torch.ones(4, 1, 2))
after = known()
functions = types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property
print([key for key, x in before.items() if isinstance(x, functions) and after.get(key) is not x])
"""


def test_the_import_replaces_no_function_or_class_of_torch() -> None:
    assert run_python("-c", REBOUND).stdout == "[]\n"


class Model(nn.Module):
    """The last two calls have an input that is not a proxy."""

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


def targets(graph: fx.GraphModule, op: str) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == op]


def operators(graph: fx.GraphModule) -> list[str]:
    called = targets(graph, "call_function")
    return [target.removesuffix(".default") for target in called if target.startswith("lltm.")]


def test_a_graph_with_a_layer_is_traced_and_transformed_again() -> None:
    model, arguments = Model(), draw()
    graph = fx.symbolic_trace(model)
    for again in (graph, fx.symbolic_trace(graph), fx.Transformer(graph).transform()):
        assert operators(again) == ["lltm.layer", *["lltm.layer_step"] * 3]
        assert targets(again, "call_module") == ["inner", "head"]
        names = {f"{name}_l{k}" for name in ("rnn.weights", "rnn.bias") for k in (0, 1)}
        constants = {f"_tensor_constant{k}" for k in (0, 1)}  # torch.ones
        assert {*targets(again, "get_attr")} - constants == names | {"cell.weights", "cell.bias"}
        torch.testing.assert_close(again(*arguments), model(*arguments))
        assert again.state_dict().keys() - constants == model.state_dict().keys()


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
    "prepacked": lambda: lltm.LSTM(3, 5).prepack(),
    "prepacked custom layer": lambda: slstm.Layer(3, 5).prepack(),
}


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


def around(module: nn.Module) -> nn.Module:
    base: Any = type(module)

    class Around(base):  # type: ignore[misc]
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            result = super().forward(2 * input, hx)
            return torch.utils._pytree.tree_map(lambda y: 3 * y, result)

    module.__class__ = Around
    return module


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_a_call_of_its_operator(kind: str, subclass: bool) -> None:
    module = KINDS[kind]()
    model = Holder(around(module) if subclass else module)
    x = input_of(module)
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    graph = fx.symbolic_trace(model)
    assert targets(graph, "call_module") == ["inner"]
    assert operators(graph) == [f"lltm.{'layer' if x.dim() == 3 else 'layer_step'}"] * 2
    assert seen == ["hook"] * 2  # during tracing, like the hooks of every traced module
    torch.testing.assert_close(graph(x), model(x))
    for got, expected in zip(*(gradients(m, x) for m in (graph, model)), strict=True):
        torch.testing.assert_close(got, expected)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    named = sorted(model.named_parameters())
    if "module" not in {name.split(".")[0] for name, _ in named}:  # prepacked: no derivatives
        return ()
    total = torch.stack([y.square().sum() for y in flat(model(x))]).sum()
    return torch.autograd.grad(total, [parameter for _, parameter in named])


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_is_the_root_accepts_states_or_none(kind: str) -> None:
    module = KINDS[kind]()
    x = input_of(module)
    graph = fx.symbolic_trace(module)
    torch.testing.assert_close(graph(x), module(x))
    after = module(x)[1] if hasattr(module, "num_layers") else module(x)
    torch.testing.assert_close(graph(x, after), module(x, after))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(3, 5), lltm.LSTM(3, 5)

    def forward(self, x: Tensor) -> Any:
        return self.decoder(x, self.encoder(x)[1])


def test_states_may_be_a_node_s_result() -> None:
    model, x = Decoder(), torch.randn(6, 4, 3)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x))


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_ours = type(m).__module__.startswith("lltm.")
        return is_ours or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("make", [lltm.GRU, lltm.reference.GRU])
def test_a_leaf_of_a_tracer_is_a_node_and_accepts_a_packed_sequence(make: Any) -> None:
    model = nn.Sequential(nn.Identity(), make(3, 5))
    packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3), torch.randn(1, 3)])
    graph = fx.GraphModule(model, Leaves().trace(model))
    assert targets(graph, "call_module") == ["0", "1"]
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


X86_QUANTIZATION = pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="an engine of x86"
)


@pytest.mark.filterwarnings("ignore")  # PyTorch deprecates all of it
@X86_QUANTIZATION
@pytest.mark.parametrize("leaf", [False, True])
def test_quantization_by_fx_keeps_the_layer_in_float_and_quantizes_the_rest(leaf: bool) -> None:
    # PyTorch plans to remove the module.
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    custom = pytest.importorskip("torch.ao.quantization.fx.custom_config").PrepareCustomConfig()
    classes = [lltm.LLTM, lltm.LLTMCell] if leaf else []
    custom.set_non_traceable_module_classes(classes)
    model, arguments = Model().eval(), draw()
    mapping = quantization.get_default_qconfig_mapping("x86")
    prepared = quantize_fx.prepare_fx(model, mapping, arguments, custom)
    prepared(*arguments)
    quantized = quantize_fx.convert_fx(prepared)
    assert operators(quantized) == ([] if leaf else ["lltm.layer", *["lltm.layer_step"] * 3])
    assert type(quantized.rnn) is (lltm.LLTM if leaf else nn.Module)
    assert type(quantized.head).__module__.startswith("torch.ao.nn.quantized")
    torch.testing.assert_close(quantized(*arguments), model(*arguments), atol=0.1, rtol=0)
