"""Calls in which only plain tensors take part run in C++ alone: when, and with which results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lltm
from lltm import modules

B, H, INPUT = 4, 5, 3

Make = Callable[[], nn.Module]

CELLS: dict[str, Make] = {
    "cell": lambda: lltm.LLTMCell(INPUT, H),
    "cell without bias": lambda: lltm.LLTMCell(INPUT, H, bias=False),
    "cell of float64": lambda: lltm.LLTMCell(INPUT, H, dtype=torch.float64),
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
    "prepacked": lambda: lltm.LLTM(INPUT, H).prepack(),
    "prepacked, batch first": lambda: lltm.LLTM(INPUT, H, batch_first=True).prepack(),
    "prepacked layers": lambda: lltm.LLTM(INPUT, H, num_layers=2, bidirectional=True).prepack(),
    "prepacked in int8": lambda: lltm.LLTM(INPUT, H).prepack(torch.qint8),
}


def in_one_call(module: nn.Module, input: Any, hx: Any = None) -> Any:
    """What lltm._C makes of a call; None where it leaves it to Python."""
    if isinstance(module, lltm.LLTMCell):
        return lltm._C.step(vars(module), input, hx)
    prepacked = isinstance(module, lltm.PrepackedLLTM)
    return getattr(lltm._C, "prepacked_layer" if prepacked else "layer")(vars(module), input, hx)


@contextlib.contextmanager
def instead_of_one_call(function: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        binding = SimpleNamespace(step=function, layer=function, prepacked_layer=function)
        patch.setattr(modules, "_C", binding)
        yield


def by_python() -> contextlib.AbstractContextManager[None]:
    """Python code computes every call."""
    return instead_of_one_call(lambda *_: None)


def arguments(name: str, batched: bool, steps: int = 6) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An input, and a state whose strides run the other way."""
    module: Any = {**CELLS, **LAYERS}[name]()
    batch = [B] if batched else []
    if name in CELLS:
        dtype = module.weights.dtype
        x, shape = torch.randn(*batch, INPUT, dtype=dtype), [*batch, H]
    else:
        dtype = torch.float32
        leading = [*batch, steps] if module.batch_first else [steps, *batch]
        x = torch.randn(*leading, INPUT)
        shape = [module.num_layers * (2 if module.bidirectional else 1), *batch, H]
    h, c = (torch.randn(*reversed(shape), dtype=dtype) for _ in range(2))
    order = list(reversed(range(len(shape))))
    return x, (h.permute(order), c.permute(order))


def results_and_gradients(module: nn.Module, x: Tensor, hx: Any) -> list[Tensor]:
    torch.manual_seed(1)  # of dropout
    results = support.flat(module(x, hx))
    if not torch.is_grad_enabled() or not results[0].requires_grad:
        return results
    leaves = [x, *(hx or ()), *module.parameters()]
    total = torch.stack([y.sin().sum() for y in results]).sum()
    return [*results, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("name", [*CELLS, *LAYERS])
def test_is_what_python_computes(name: str, batched: bool, state: bool, grad: bool) -> None:
    torch.manual_seed(0)
    module = {**CELLS, **LAYERS}[name]()
    x, hx = arguments(name, batched)
    prepacked = isinstance(module, lltm.PrepackedLLTM)
    for tensor in (x, *hx):
        tensor.requires_grad_(grad and not prepacked)
    with torch.set_grad_enabled(grad):
        assert (in_one_call(module, x, hx) is not None) == support.COMPILED_BINDING
        ours = results_and_gradients(module, x, hx if state else None)
        with by_python():
            expected = results_and_gradients(module, x, hx if state else None)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()
        assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("name", LAYERS)
def test_results_share_no_memory(name: str) -> None:
    module = LAYERS[name]()
    for steps in (0, 1, 6):
        x, hx = arguments(name, batched=True, steps=steps)
        with torch.no_grad():
            results = support.flat(module(x, hx))
        for tensor in results:
            others = [other for other in results if other is not tensor]
            before = [other.clone() for other in (x, *hx, *others)]
            tensor.fill_(7)
            torch.testing.assert_close([x, *hx, *others], before, rtol=0, atol=0)


# ----- what is not plain -------------------------------------------------------


class Subclass(Tensor):
    pass


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_vmap(ask: Callable[[], Any]) -> Any:
    asked = []

    def run(x: Tensor) -> Tensor:
        asked.append(ask())
        return x

    torch.vmap(run)(torch.zeros(2))
    return asked[0]


def in_grad(ask: Callable[[], Any]) -> Any:
    asked = []

    def run(x: Tensor) -> Tensor:
        asked.append(ask())
        return x.sum()

    torch.func.grad(run)(torch.zeros(2))
    return asked[0]


def in_trace(ask: Callable[[], Any]) -> Any:
    asked = []

    def run(x: Tensor) -> Tensor:
        asked.append(ask())
        return x + 1

    torch.jit.trace(run, torch.zeros(2), check_trace=False)
    return asked[0]


def inside(context: Callable[[], Any]) -> Callable[[Callable[[], Any]], Any]:
    def run(ask: Callable[[], Any]) -> Any:
        with context():
            return ask()

    return run


THREADS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "autocast": inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "a mode of functions": inside(Seen),
    "a default device": inside(lambda: torch.device("cpu")),
    "a mode of operators": inside(Dispatched),
    "fake tensors": inside(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "vmap": in_vmap,
    "a derivative of torch.func": in_grad,
    "jit.trace": in_trace,
}


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("name", ["cell", "layer", "prepacked"])
def test_whoever_looks_at_operators_gets_the_python_code(name: str, thread: str) -> None:
    module = {**CELLS, **LAYERS}[name]()
    x, hx = arguments(name, batched=True)
    assert THREADS[thread](lambda: in_one_call(module, x, hx)) is None


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "a subclass": lambda x: x.as_subclass(Subclass),
    "a functional tensor": torch._to_functional_tensor,
    "a negative view": torch._neg_view,
    "a sparse tensor": lambda x: x.to_sparse(),
    "a tensor without memory": lambda x: x.to("meta"),
    "an array": lambda x: x.numpy(),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", ["cell", "layer", "prepacked"])
def test_other_than_plain_tensors_get_the_python_code(name: str, kind: str) -> None:
    module = {**CELLS, **LAYERS}[name]()
    x, (h, c) = arguments(name, batched=True)
    other = TENSORS[kind]
    assert in_one_call(module, other(x), (h, c)) is None
    assert in_one_call(module, x, (other(h), c)) is None
    assert in_one_call(module, x, (h, other(c))) is None


@pytest.mark.parametrize("name", ["cell", "layer", "prepacked"])
def test_wrong_arguments_get_the_python_code(name: str) -> None:
    module = {**CELLS, **LAYERS}[name]()
    x, (h, c) = arguments(name, batched=True)
    for input, hx in (
        (x[..., 1:], (h, c)),
        (x.double(), (h.double(), c.double())),
        (x[None, None], (h, c)),
        (x, (h[..., 1:], c)),
        (x, (h, c[..., 1:, :])),
        (x, (h, c, c)),
        (x, [h, c]),
        (x, h),
        (pack_sequence([torch.randn(2, INPUT)]), None),
    ):
        assert in_one_call(module, input, hx) is None


@pytest.mark.parametrize("name", ["cell", "layer"])
def test_what_a_module_does_not_hold_itself_gets_the_python_code(name: str) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    module = {**CELLS, **LAYERS}[name]()
    x, hx = arguments(name, batched=True)
    before = support.flat(module(x, hx))
    weights = "weights" if name == "cell" else "weights_l0"
    with torch.no_grad():
        module.get_parameter(weights).mul_(2)
    parametrize.register_parametrization(module, weights, Half())
    assert in_one_call(module, x, hx) is None
    torch.testing.assert_close(support.flat(module(x, hx)), before)


@pytest.mark.parametrize("name", ["cell", "layer", "layers", "prepacked"])
def test_sizes_that_were_changed_since_get_the_python_code(name: str) -> None:
    module = {**CELLS, **LAYERS}[name]()
    x, hx = arguments(name, batched=True)
    vars(module)["hidden_size"] = H + 1
    assert in_one_call(module, x, hx) is None
    vars(module)["hidden_size"] = "5"
    assert in_one_call(module, x, hx) is None
    del vars(module)["hidden_size"]
    assert in_one_call(module, x, hx) is None


@pytest.mark.parametrize("change", [{"num_layers": 4}, {"num_layers": 0}, {"bidirectional": True}])
@pytest.mark.parametrize("name", ["layer", "layers", "prepacked"])
def test_more_or_fewer_layers_than_there_are_get_the_python_code(
    name: str, change: dict[str, Any]
) -> None:
    module = LAYERS[name]()
    x, _ = arguments(name, batched=True)
    vars(module).update(change)
    assert in_one_call(module, x) is None


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("name", ["cell", "layer", "layers"])
def test_carries_forward_derivatives(name: str, grad: bool) -> None:
    module = {**CELLS, **LAYERS}[name]()
    x, (h, c) = arguments(name, batched=True)
    tangent = torch.randn_like(c)

    def derivative() -> list[Tensor]:
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            results = module(x, (h, forward_ad.make_dual(c, tangent)))
            return [forward_ad.unpack_dual(y).tangent for y in support.flat(results)]

    ours = derivative()
    with by_python():
        torch.testing.assert_close(ours, derivative())


def test_other_implementations_are_not_replaced() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("not lltm's own")

    class Cell(lltm.LLTMCell):
        _cell = staticmethod(lltm.reference.cell)

    class Layer(lltm.LLTM):
        _sequence = staticmethod(lltm.reference.sequence)

    class Direction(lltm.LLTM):
        def _run_direction(self, *arguments: Any, **options: Any) -> Any:
            return super()._run_direction(*arguments, **options)

    class Prepacked(lltm.PrepackedLLTM):
        def _run_direction(self, *arguments: Any, **options: Any) -> Any:
            return super()._run_direction(*arguments, **options)

    x = torch.randn(6, B, INPUT)
    with instead_of_one_call(fail):
        for cell in (Cell, lltm.reference.LLTMCell):
            cell(INPUT, H)(x[0])
        for layer in (Layer, Direction, lltm.reference.LLTM):
            layer(INPUT, H)(x)
        Prepacked(lltm.LLTM(INPUT, H))(x)
        for module, input in (
            (lltm.LLTMCell(INPUT, H), x[0]),
            (lltm.LLTM(INPUT, H), x),
            (lltm.LLTM(INPUT, H).prepack(), x),
        ):
            with pytest.raises(AssertionError, match="not lltm's own"):
                module(input)
