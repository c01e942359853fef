"""Module operators `layer` and `layer_step`: interception and attributes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import support
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lltm
from lltm.integrations.schema import batch_dim, named

B, H, INPUT = 4, 5, 3

ops = torch.ops.lltm

Make = Callable[[], nn.Module]

MODULES: dict[str, Make] = {
    "cell": lambda: lltm.LLTMCell(INPUT, H),
    "layer": lambda: lltm.LLTM(INPUT, H),
    "layers": lambda: lltm.LLTM(INPUT, H, num_layers=3),
    "prepacked": lambda: lltm.LLTM(INPUT, H).prepack(),
}


def arguments(name: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The states' strides are reversed."""
    x, layers = torch.randn(6, B, INPUT), 3 if name == "layers" else 1
    h, c = torch.randn(2, H, B, layers).permute(0, 3, 2, 1)
    return (x[0], (h[0], c[0])) if name == "cell" else (x, (h, c))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", MODULES)
def test_modes_see_the_operators(name: str) -> None:
    module = MODULES[name]()
    x, hx = arguments(name)
    expected = module(x, hx)
    with Functions() as functions, support.Operators() as operators:
        torch.testing.assert_close(module(x, hx), expected)
    seen = "lltm.layer_step" if name == "cell" else "lltm.layer"
    assert any(op.startswith(seen) for op in functions.seen), functions.seen
    assert any(op.startswith("sequence") for op in operators.ours())


@pytest.mark.parametrize(
    ("package", "namespaces"), [(lltm.reference, {"aten"}), (lltm, {"aten", "lltm"})]
)
def test_the_reference_calls_only_operators_of_pytorch(package: Any, namespaces: set[str]) -> None:
    layer = package.LLTM(INPUT, H, num_layers=2, bidirectional=True)
    cell = package.LLTMCell(INPUT, H)
    with support.Operators() as operators:
        layer(torch.randn(6, B, INPUT))[0].sum().backward()
        cell(torch.randn(B, INPUT))[0].sum().backward()
    assert {name.partition(".")[0] for name, _ in operators.called} == namespaces


@pytest.mark.parametrize("of", ["input", "h", "c"])
@pytest.mark.parametrize("name", MODULES)
def test_a_subclass_of_tensor_sees_the_operator(name: str, of: str) -> None:
    module = MODULES[name]()
    x, (h, c) = arguments(name)
    expected = support.flat(module(x, (h, c)))
    tensors = {"input": x, "h": h, "c": c}
    tensors[of] = tensors[of].as_subclass(Subclass)
    Subclass.seen.clear()
    results = support.flat(module(tensors["input"], (tensors["h"], tensors["c"])))
    assert any(op.startswith("lltm.layer") for op in Subclass.seen)
    assert all(isinstance(y, Subclass) for y in results)
    for y, other in zip(results, expected, strict=True):
        torch.testing.assert_close(y.as_subclass(Tensor), other)


@pytest.mark.parametrize("name", MODULES)
def test_a_lazily_negated_tensor_is_read_correctly(name: str) -> None:
    module = MODULES[name]()
    x, (h, c) = arguments(name)
    negated = [torch._neg_view(-y) for y in (x, h, c)]
    torch.testing.assert_close(module(negated[0], (negated[1], negated[2])), module(x, (h, c)))


def twice_the_weights(name: str) -> list[Any]:
    base, weights = CLASSES[name], WEIGHTS[name]

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Doubling(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return 2 * super().__getitem__(key) if key == weights else super().__getitem__(key)

    def by_getattr(self: Any, attribute: str) -> Any:
        value: Any = nn.Module.__getattr__(self, attribute)
        return 2 * value if attribute == weights else value

    subclassed = type("ByGetattr", (base,), {"__getattr__": by_getattr})(INPUT, H)
    in_dict, parametrized, in_parameters = (base(INPUT, H) for _ in range(3))
    in_parameters.__dict__["_parameters"] = Doubling(in_parameters._parameters)
    in_dict.__dict__[weights] = 2 * getattr(in_dict, weights).detach()
    parametrize.register_parametrization(parametrized, weights, Twice())
    with_property = type("ByProperty", (base,), {})
    by_property = with_property(INPUT, H)
    parameter = by_property._parameters.pop(weights)
    setattr(with_property, weights, property(lambda self: 2 * parameter))
    return [subclassed, in_dict, by_property, parametrized, in_parameters]


CLASSES: dict[str, Any] = {"cell": lltm.LLTMCell, "layer": lltm.LLTM}
WEIGHTS = {"cell": "weights", "layer": "weights_l0"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_layer_uses_the_attribute_if_a_parameter_is_shadowed(name: str) -> None:
    x, hx = arguments(name)
    bias = WEIGHTS[name].replace("weights", "bias")
    for module in twice_the_weights(name):
        plain = CLASSES[name](INPUT, H)
        with torch.no_grad():
            getattr(plain, WEIGHTS[name]).copy_(getattr(module, WEIGHTS[name]))
            getattr(plain, bias).copy_(getattr(module, bias))
        torch.testing.assert_close(module(x, hx), plain(x, hx))


@pytest.mark.parametrize("name", CLASSES)
def test_registered_parameters_are_initialized_even_if_shadowed(name: str) -> None:
    for module in twice_the_weights(name):
        for parameter in module.parameters():
            nn.init.constant_(parameter, math.nan)
        module.reset_parameters()
        for parameter in module.parameters():
            assert parameter.abs().max() <= 1 / math.sqrt(H)


@pytest.mark.parametrize("change", [{"num_layers": 4}, {"num_layers": 0}, {"bidirectional": True}])
@pytest.mark.parametrize("name", ["layer", "layers", "prepacked"])
def test_more_or_fewer_layers_than_there_are_parameters_are_an_error(
    name: str, change: dict[str, Any]
) -> None:
    module = MODULES[name]()
    x, _ = arguments(name)
    vars(module).update(change)
    text = (
        "num_layers to be positive, got 0" if change == {"num_layers": 0} else "weights and biases"
    )
    with pytest.raises(ValueError, match=rf"^lltm::LLTM: expected {text}"):
        module(x)


class Sequences(TorchDispatchMode):
    """Collects the tensor arguments of lltm's sequence operators, by operator and name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[str, str], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "lltm":
            arguments = named(func, args, kwargs or {}).items()
            tensors = {name: x for name, x in arguments if isinstance(x, Tensor)}
            self.found |= {(func._opname, name): x for name, x in tensors.items()}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [0, 2])
def test_the_shape_of_an_argument_shows_its_batch_dimension(steps: int) -> None:
    """Shardings and decompositions need it, also for arguments that no other file names."""
    layer = lltm.LSTM(INPUT, H, checkpoint_steps=steps, recurrent_dropout=0.5)
    with Sequences() as mode:
        output, _ = layer(torch.randn(6, B, INPUT), reset=torch.zeros(6, B, dtype=torch.bool))
        output.sum().backward()
    assert {op for op, _ in mode.found} == {"sequence_forward", "sequence_backward"}
    without = set()
    for (op, name), tensor in mode.found.items():
        dim = batch_dim(name, tensor.dim(), tensor.dtype)
        if dim is None:
            without.add(name)
            continue
        rows = 6 * B if name == "saved" and steps == 0 else B
        assert tensor.shape[dim] == rows, (op, name, tensor.shape, dim)
    assert without == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


@pytest.mark.parametrize("make", [lltm.LSTM, lltm.GRU, lltm.RNN, lltm.LLTM, lltm.cells.mgu.Layer])
def test_options_of_layers_are_in_the_signature(make: Any) -> None:
    options = ["checkpoint_steps", "recurrent_dropout"]
    parameters = inspect.signature(make).parameters
    assert [name for name in parameters if name in options] == options
    assert parameters["recurrent_dropout"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["recurrent_dropout"].default == 0.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropouts'"):
        make(INPUT, H, dropouts=0.5)
