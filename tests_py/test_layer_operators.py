"""The operators `layer` and `layer_step` of the modules: what they compute, and who sees them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import support
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lltm

B, H, INPUT = 4, 5, 3

ops = torch.ops.lltm

Make = Callable[[], nn.Module]

CELLS: dict[str, Make] = {
    "cell": lambda: lltm.LLTMCell(INPUT, H),
    "cell without bias": lambda: lltm.LLTMCell(INPUT, H, bias=False),
    "cell of float64": lambda: lltm.LLTMCell(INPUT, H, dtype=torch.float64),
    "LSTM cell": lambda: lltm.LSTMCell(INPUT, H),
    "GRU cell": lambda: lltm.GRUCell(INPUT, H),
    "GRU cell without bias": lambda: lltm.GRUCell(INPUT, H, bias=False),
}
LAYERS: dict[str, Make] = {
    "layer": lambda: lltm.LLTM(INPUT, H),
    "layer without bias": lambda: lltm.LLTM(INPUT, H, bias=False),
    "layer, batch first": lambda: lltm.LLTM(INPUT, H, batch_first=True),
    "layers": lambda: lltm.LLTM(INPUT, H, num_layers=3),
    "two directions": lambda: lltm.LLTM(INPUT, H, num_layers=2, bidirectional=True),
    "dropout": lambda: lltm.LLTM(INPUT, H, num_layers=2, dropout=0.5),
    "dropout in evaluation": lambda: lltm.LLTM(INPUT, H, num_layers=2, dropout=0.5).eval(),
    "checkpoints": lambda: lltm.LLTM(INPUT, H, checkpoint_steps=2),
    "LSTM": lambda: lltm.LSTM(INPUT, H, num_layers=2, dropout=0.5),
    "LSTM without bias": lambda: lltm.LSTM(INPUT, H, bias=False, batch_first=True),
    "GRU": lambda: lltm.GRU(INPUT, H, num_layers=2, bidirectional=True),
    "GRU, checkpoints": lambda: lltm.GRU(INPUT, H, checkpoint_steps=2),
}
PREPACKED: dict[str, Make] = {
    "prepacked": lambda: lltm.LLTM(INPUT, H).prepack(),
    "prepacked, batch first": lambda: lltm.LLTM(INPUT, H, batch_first=True).prepack(),
    "prepacked layers": lambda: lltm.LLTM(INPUT, H, num_layers=2, bidirectional=True).prepack(),
    "prepacked in int8": lambda: lltm.LLTM(INPUT, H).prepack(torch.qint8),
    "prepacked LSTM": lambda: lltm.LSTM(INPUT, H, num_layers=2).prepack(),
    "prepacked GRU": lambda: lltm.GRU(INPUT, H, bidirectional=True).prepack(),
}

MODULES = {**CELLS, **LAYERS, **PREPACKED}


@contextlib.contextmanager
def by_operators(module: Any) -> Iterator[nn.Module]:
    """The module as lltm.reference composes it, of the operators of one direction and one step."""
    cell = module._CELL

    def of_parameters(weights: Tensor, *rest: Any) -> dict[str, Any]:
        names = ("bias_ih",) if cell == "lltm" else ("weight_hh", "bias_ih", "bias_hh")
        return {"weight_ih": weights, **dict(zip(names, rest, strict=False))}

    def step(equations: Any, x: Tensor, read: Tensor, states: Any, parameters: Any) -> Any:
        assert read is states[0]
        after = ops.step(cell, x, *states_of(states), **of_parameters(*parameters))
        return after[: len(states)]

    def sequence(
        equations: Any,
        x: Tensor,
        states: Any,
        parameters: Any,
        sizes: Any,
        reverse: bool,
        reset: Any,
        mask: Any,
    ) -> Any:
        options = {"batch_sizes": sizes, "reverse": reverse, "reset": reset}
        options["recurrent_mask"] = mask
        options["checkpoint_steps"] = getattr(module, "checkpoint_steps", 0)
        arguments = of_parameters(*parameters) | options
        output, *last = ops.sequence(cell, x, *states_of(states), **arguments)
        return output, last[: len(states)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lltm.reference, "_steps", sequence)
        patched.setattr(lltm.reference, "_after", step)
        other = copy.copy(module)
        other.__class__ = getattr(lltm.reference, type(module).__name__)
        yield other


def states_of(states: Any) -> tuple[Any, Any]:
    h, c = (*states, None)[:2]
    return h, c


def has_c(cell: str) -> bool:
    _, _, states, *_ = ops._cell(cell)
    return len(states) > 0


def arguments(name: str, batched: bool, steps: int = 6) -> tuple[Tensor, Any]:
    """An input, and states whose strides run the other way."""
    module: Any = MODULES[name]()
    batch = [B] if batched else []
    if name in CELLS:
        dtype = next(module.parameters()).dtype
        x, shape = torch.randn(*batch, INPUT, dtype=dtype), [*batch, H]
    else:
        dtype = torch.float32
        leading = [*batch, steps] if module.batch_first else [steps, *batch]
        x = torch.randn(*leading, INPUT)
        shape = [module.num_layers * (2 if module.bidirectional else 1), *batch, H]
    h, c = (torch.randn(*reversed(shape), dtype=dtype) for _ in range(2))
    order = list(reversed(range(len(shape))))
    h, c = h.permute(order), c.permute(order)
    return x, (h, c) if has_c(module._CELL) else h


def results_and_gradients(module: nn.Module, x: Tensor, hx: Any) -> list[Tensor]:
    torch.manual_seed(1)  # of dropout
    results = support.flat(module(x, hx))
    if not torch.is_grad_enabled() or not results[0].requires_grad:
        return results
    leaves = [x, *([] if hx is None else support.flat(hx)), *module.parameters()]
    total = torch.stack([y.sin().sum() for y in results]).sum()
    return [*results, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("name", [*CELLS, *LAYERS])
def test_is_composed_of_the_operators_to_the_bit(
    name: str, batched: bool, state: bool, grad: bool
) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    x, hx = arguments(name, batched)
    for tensor in (x, *support.flat(hx)):
        tensor.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        ours = results_and_gradients(module, x, hx if state else None)
        with by_operators(module) as composed:
            expected = results_and_gradients(composed, x, hx if state else None)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("name", [*LAYERS, *PREPACKED])
def test_results_share_no_memory(name: str) -> None:
    module = MODULES[name]()
    for steps in (0, 1, 6):
        x, hx = arguments(name, batched=True, steps=steps)
        states = support.flat(hx)
        with torch.no_grad():
            results = support.flat(module(x, hx))
        for tensor in results:
            others = [other for other in results if other is not tensor]
            before = [other.clone() for other in (x, *states, *others)]
            tensor.fill_(7)
            torch.testing.assert_close([x, *states, *others], before, rtol=0, atol=0)


# ----- what takes part in a call is seen --------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


OPERATOR_OF = {
    "cell": "lltm.step",
    "layer": "lltm.sequence",
    "prepacked": "lltm.sequence_prepacked",
}


@pytest.mark.parametrize("name", OPERATOR_OF)
def test_modes_see_the_operators(name: str) -> None:
    module = MODULES[name]()
    x, hx = arguments(name, batched=True)
    expected = module(x, hx)
    for mode, seen in (
        (Functions(), "lltm.layer_step" if name == "cell" else "lltm.layer"),
        (Operators(), OPERATOR_OF[name]),
    ):
        with mode:
            torch.testing.assert_close(module(x, hx), expected, rtol=0, atol=0)
        assert any(op.startswith(seen) for op in mode.seen), mode.seen


@pytest.mark.parametrize("of", ["input", "h", "c"])
@pytest.mark.parametrize("name", OPERATOR_OF)
def test_a_subclass_of_tensor_sees_the_operator(name: str, of: str) -> None:
    module = MODULES[name]()
    x, (h, c) = arguments(name, batched=True)
    expected = support.flat(module(x, (h, c)))
    tensors = {"input": x, "h": h, "c": c}
    tensors[of] = tensors[of].as_subclass(Subclass)
    Subclass.seen.clear()
    results = support.flat(module(tensors["input"], (tensors["h"], tensors["c"])))
    assert any(op.startswith("lltm.layer") for op in Subclass.seen)
    assert all(isinstance(y, Subclass) for y in results)
    for y, other in zip(results, expected, strict=True):
        torch.testing.assert_close(y.as_subclass(Tensor), other, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATOR_OF)
def test_a_lazily_negated_tensor_is_read_right(name: str) -> None:
    module = MODULES[name]()
    x, (h, c) = arguments(name, batched=True)
    negated = [torch._neg_view(-y) for y in (x, h, c)]
    torch.testing.assert_close(
        module(negated[0], (negated[1], negated[2])), module(x, (h, c)), rtol=0, atol=0
    )


# ----- attributes are read as Python reads them --------------------------------


def twice_the_weights(name: str) -> list[Any]:
    """Modules whose weights are twice what is registered, each in another way."""
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
def test_the_weights_are_what_the_attribute_is(name: str) -> None:
    x, hx = arguments(name, batched=True)
    bias = WEIGHTS[name].replace("weights", "bias")
    for module in twice_the_weights(name):
        plain = CLASSES[name](INPUT, H)
        with torch.no_grad():
            getattr(plain, WEIGHTS[name]).copy_(getattr(module, WEIGHTS[name]))
            getattr(plain, bias).copy_(getattr(module, bias))
        torch.testing.assert_close(module(x, hx), plain(x, hx), rtol=0, atol=0)


# Before the first call of a module.
PATCHED = """
import lltm, torch
found = torch.nn.Module.__getattr__
def doubled(self, name):
    value = found(self, name)
    return 2 * value if name == "weight_hh_l0" else value
cell, twice = lltm.GRU(3, 4), lltm.GRU(3, 4)
twice.load_state_dict(cell.state_dict())
torch.nn.Module.__getattr__ = doubled
x = torch.randn(5, 2, 3)
changed = cell(x)[0]
torch.nn.Module.__getattr__ = found
twice.weight_hh_l0.data *= 2
assert torch.equal(changed, twice(x)[0])
"""


def test_the_attribute_is_what_a_patched_module_says() -> None:
    run = support.run_python("-c", PATCHED)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_registered_is_drawn_whatever_the_attribute_is(name: str) -> None:
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
    x, _ = arguments(name, batched=True)
    vars(module).update(change)
    with pytest.raises(ValueError, match=r"^lltm::LLTM: expected weights and biases of"):
        module(x)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", ["cell", "layer", "layers"])
def test_carries_forward_derivatives(name: str, grad: bool) -> None:
    module = MODULES[name]()
    x, (h, c) = arguments(name, batched=True)
    tangent = torch.randn_like(c)

    def derivative(module: nn.Module) -> list[Tensor]:
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            results = module(x, (h, forward_ad.make_dual(c, tangent)))
            return [forward_ad.unpack_dual(y).tangent for y in support.flat(results)]

    ours = derivative(module)
    with by_operators(module) as composed:
        torch.testing.assert_close(ours, derivative(composed))


def test_another_number_of_states_is_an_error() -> None:
    x, (h, c) = arguments("cell", batched=True)
    weights = lltm.LLTMCell(INPUT, H).weights
    for states in ([h], [h, c, c]):
        expected = rf"^lltm::LLTMCell: expected state to be 2 tensors \(h, c\), got {len(states)}"
        with pytest.raises(TypeError, match=expected):
            ops.layer_step("lltm", x, states, [weights], INPUT, H)
