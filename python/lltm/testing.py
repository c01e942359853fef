"""Functions for testing custom cells (:func:`lltm.cell`)."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import _check, _recurrent, reference
from .custom.cell import Cell
from .custom.modules import CustomLayer
from .custom.program import expect, expect_type, gradients_of
from .custom.trace import plain_torch

__all__ = ["check_cell", "loop"]


def loop(
    cell: Cell,
    layer: CustomLayer,
    input: Tensor | PackedSequence,
    hx: Any = None,
    reset: Tensor | None = None,
) -> Any:
    """Computes a layer's (output, state) with a Python loop that calls the cell's function.

    It uses eager PyTorch operations, so every dtype and derivative works. Dropout is not applied.

    Args:
        cell: custom cell, with its function
        layer: layer of this cell
        input: batched or packed input of the layer
        hx: initial state, as for the layer. Default: None
        reset: as for the layer. Default: None
    """
    expect_type(cell, Cell, "loop", "cell to be an lltm.Cell")
    expect_type(layer, CustomLayer, "loop", f"layer to be a {cell.name}.Layer")
    expect(cell.text == layer._CELL, "loop", f"layer to be a {cell.name}.Layer", layer)
    run = partial(reference._layer, equations=_equations(cell), training=False)
    return _recurrent.layer_of(layer, input, hx, reset, run)


def _equations(cell: Cell) -> reference.Equations:
    """Returns the equations of a custom cell, which call its function."""
    header = cell.Layer._HEADER
    names = ("h", *cell.states, *cell.parameters)

    def function(z: Sequence[Tensor], *others: Tensor) -> list[Tensor]:
        known = dict(zip(names, others, strict=True))
        after = cell._called(dict(zip(header.gates, z, strict=True)), known)
        # A condition may have another dtype, and a parameter has no batch.
        return [new.to(others[0].dtype).expand_as(others[0]) for new in after]

    return reference.Equations(
        header.gates_x,
        header.gates_h,
        function,
        gates_input=header.gates_input,
        products=header.products,
        no_bias=header.no_bias,
        outputs=[("h", *cell.states).index(name) for name in header.outputs] or [0],
        initial=(0.0, *header.states.values()),
    )


# T, B, I, H. They cover the small-batch engine and the other engines, odd sizes and one step.
_SHAPES = ((6, 3, 4, 5), (5, 40, 24, 72), (12, 2, 16, 32), (1, 4, 8, 16))
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@plain_torch()
def check_cell(
    cell: Cell,
    *,
    shapes: Sequence[tuple[int, int, int, int]] = _SHAPES,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    scale: float = 1.0,
    verbose: bool = True,
) -> None:
    """Compares the layers of a cell with :func:`loop` in float64.

    It checks results and all gradients in every dtype, shape and form: plain, without an initial
    state, packed, two layers with two directions, checkpointed, prepacked, with heads. Plain,
    packed, checkpointed and prepacked layers also reset states between steps. The limit of
    error, relative to the largest element, is four times the loop's error in the same dtype, at
    least 32 eps of the dtype (float64: 1e-11). Second derivatives are compared in float64, if
    PyTorch has them and the function does not define its own gradient.

    In float64 the limit is higher if PyTorch itself is less exact: 32 eps of float32 if the
    function rounds to float32, as ``(x > 0).float() / 3`` does, or calls hardsigmoid or celu (ATen
    rounds constants of their derivatives to float32), and 32 exp(-20) if a softplus argument
    exceeds 20 (ATen then returns the argument).

    ``F.layer_norm(v, shape, None, bias)`` fails, because PyTorch's second derivatives are wrong
    without the weight (pytorch#79705). ``F.layer_norm(v, shape) + bias`` passes.

    At a discontinuity, rounding can select the other side. So an error counts only if it exceeds
    the limit for three random samples of weights and inputs.

    Args:
        cell: custom cell, with its function
        shapes: sizes (T, B, I, H) to test, where I counts only columns of weight_ih. Default: four
            shapes
        dtypes: dtypes to test. Default: float64, float32, bfloat16 and float16
        scale: factor for the random inputs and initial states. Default: 1
        verbose: if True, prints the largest errors. Default: True

    Raises:
        AssertionError: if an error exceeds its limit, or the function returns NaN or infinity. The
            message has the form, result and error
    """
    expect_type(cell, Cell, "check_cell", "cell to be an lltm.Cell")
    for shape in shapes:
        expect_type(shape, Sequence, "check_cell", "shapes (T, B, I, H)")
        right = [k == 2 or size > 0 for k, size in enumerate(shape)] == [True] * 4
        expect(right, "check_cell", "shapes (T, B, I, H) of positive sizes", shape)
    if verbose:
        print(f"{cell.name}: largest errors")
    for dtype in dtypes:
        worst = _worst(cell, shapes, dtype, scale)
        for form, (error, name) in worst.items() if verbose else ():
            print(f"{form:14} {_check.dtype(dtype):9} {error:8.1e}  {name}", flush=True)
    if not cell.Layer._HEADER.own_gradient:
        _check_second(cell, scale)


_FORMS = ("plain", "no state", "packed", "two directions", "checkpointed", "prepacked", "heads")
_AS_PLAIN = ("checkpointed", "prepacked")  # the loop computes the same as for "plain"
_Problem = tuple[CustomLayer, Any, Any, Tensor | None]  # a layer, input, state and resets
_Loops = dict[tuple[str, int], dict[str, Tensor]]  # results in float64, by form and seed


def _worst(
    cell: Cell, shapes: Sequence[tuple[int, int, int, int]], dtype: torch.dtype, scale: float
) -> dict[str, tuple[float, str]]:
    """Returns the largest error of each form, with its name. Fails if it exceeds its limit."""
    worst: dict[str, tuple[float, str]] = {}
    for shape in shapes:
        loops: _Loops = {}
        for form in _FORMS:
            error, name, limit = _largest(cell, form, shape, dtype, scale, loops)
            where = f"{cell.name}, {form}, {dtype}, T, B, I, H = {shape}"
            assert not math.isnan(error), (
                f"{where}: expected inputs for which the function is finite, got NaN or infinity as"
                f" {name}"
            )
            assert error <= limit, (
                f"{where}: error {error:.1e} of {name}, expected at most {limit:.1e}"
            )
            worst[form] = max(worst.get(form, (0.0, "")), (error, name))
    return worst


def _problem(
    cell: Cell, form: str, shape: Sequence[int], dtype: torch.dtype, scale: float, seed: int
) -> _Problem:
    steps, batch, inputs, hidden = shape
    header = cell.Layer._HEADER
    from_input = len(header.gates_input)
    inputs = inputs * bool(header.gates_x) + from_input * hidden
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return (scale * torch.randn(sizes, generator=generator, dtype=torch.float64)).to(dtype)

    options: dict[str, Any] = {
        "two directions": {"num_layers": 1 if from_input else 2, "bidirectional": True},
        "checkpointed": {"checkpoint_steps": 2},
        "heads": {"heads": 2 if hidden % 2 == 0 else 1},
    }.get(form, {})
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        layer = cell.Layer(inputs, hidden, dtype=dtype, **options)
    x: Any = draw(steps, batch, inputs)
    with torch.no_grad():  # a realistic state: the last state of another sequence
        _, state = loop(cell, layer, draw(3, batch, inputs))
    if form == "packed":
        lengths = torch.tensor([1 + (7 * k + 3) % steps for k in range(batch)])
        x = pack_padded_sequence(x, lengths, enforce_sorted=False)
    leading = (x.data if form == "packed" else x).shape[:-1]
    reset = torch.rand(leading, generator=generator) < 0.2
    with_resets = form in ("plain", "packed", *_AS_PLAIN)
    return layer, x, None if form == "no state" else state, reset if with_resets else None


def _largest(
    cell: Cell, form: str, shape: Sequence[int], dtype: torch.dtype, scale: float, loops: _Loops
) -> tuple[float, str, float]:
    """Returns the error largest relative to its limit, its name and limit; best of 3 samples."""
    found = []
    for seed in range(3):
        problem = _problem(cell, form, shape, dtype, scale, seed)
        key = "plain" if form in _AS_PLAIN else form, seed
        if key not in loops:
            loops[key] = _in_float64(cell, *problem)
        error, name, limit = _largest_of(cell, form, problem, loops[key])
        if error <= limit:
            return error, name, limit
        found.append((error, name, limit))
    return min(found, key=lambda entry: entry[0] / entry[2])


def _in_float64(
    cell: Cell, layer: CustomLayer, input: Any, hx: Any, reset: Tensor | None
) -> dict[str, Tensor]:
    wide = copy.deepcopy(layer).double()
    run = partial(loop, cell, wide, reset=reset)
    return _results(wide, run, _double(input), _double(hx), True)


def _largest_of(
    cell: Cell, form: str, problem: _Problem, exact: dict[str, Tensor]
) -> tuple[float, str, float]:
    layer, input, hx, reset = problem
    module: Callable[..., Any] = layer.prepack() if form == "prepacked" else layer
    derive = form != "prepacked"
    ours = _results(layer, partial(module, reset=reset), input, hx, derive)
    dtype = next(layer.parameters()).dtype
    floor = 1e-11 if dtype == torch.float64 else 32 * torch.finfo(dtype).eps

    @cache  # most results need no higher limit
    def limits() -> dict[str, float]:
        with _Rounding() if dtype == torch.float64 else contextlib.nullcontext() as rounding:
            by_loop = _results(layer, partial(loop, cell, layer, reset=reset), input, hx, derive)
        least = max(floor, rounding.limit) if rounding else floor
        return {name: max(4 * _error(y, exact[name]), least) for name, y in by_loop.items()}

    found = []
    for name in ours:
        if not exact[name].isfinite().all():
            return math.nan, name, 1.0
        error = _error(ours[name], exact[name])
        limit = floor if error <= floor else limits()[name]
        if limit < math.inf:  # else PyTorch overflows in this dtype
            found.append((error, name, limit))
    return max(found, key=lambda entry: entry[0] / entry[2], default=(0.0, "nothing", 1.0))


def _error(other: Tensor, expected: Tensor) -> float:
    """Returns the error relative to the largest element."""
    if not expected.numel():
        return 0.0
    difference = (other.double() - expected).abs().nan_to_num(math.inf)
    return difference.max().item() / (expected.abs().max().item() or 1.0)


class _Rounding(TorchDispatchMode):
    """Detects operations that PyTorch computes less exactly than float64, and sets the limit."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::hardsigmoid_backward", "aten::celu"):
            self.notice(torch.finfo(torch.float32).eps)
        if name == "aten::softplus" and (args[0] * (args[1] if args[1:] else 1) > 20).any():
            self.notice(math.exp(-20))
        narrow = {x.dtype for x in tree_leaves(args) if isinstance(x, Tensor) and _is_narrow(x)}
        if not narrow and name != "aten::_to_copy":
            return func(*args, **kwargs)
        dtype = min(narrow, key=lambda d: torch.finfo(d).bits, default=torch.float64)
        others = {k: v for k, v in kwargs.items() if k != "dtype"}
        exact = func(*tree_map(partial(_widened, dtype=dtype), args), **others)
        result = func(*args, **kwargs)
        for y, y_exact in zip(tree_leaves(result), tree_leaves(exact), strict=True):
            if isinstance(y, Tensor) and _is_narrow(y) and not y.double().equal(y_exact.double()):
                self.notice(torch.finfo(y.dtype).eps)
        return result

    def notice(self, eps: float) -> None:
        self.limit = max(self.limit, 32 * eps)


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def _widened(x: Any, dtype: torch.dtype) -> Any:
    """Converts tensors to float64, and rounds numbers as PyTorch does with tensors of the dtype."""
    if isinstance(x, float):
        return torch.tensor(x, dtype=dtype).item()
    return x.double() if isinstance(x, Tensor) and _is_narrow(x) else x


def _results(
    layer: CustomLayer, run: Callable[..., Any], input: Any, hx: Any, derive: bool
) -> dict[str, Tensor]:
    """Returns output, last states and gradients of a fixed linear combination of them, by name."""
    x = (input.data if isinstance(input, PackedSequence) else input).detach()
    states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
    passed = [t.detach().clone().requires_grad_(derive) for t in (x, *states)]
    leaf = input._replace(data=passed[0]) if isinstance(input, PackedSequence) else passed[0]
    state = None if hx is None else passed[1] if isinstance(hx, Tensor) else tuple(passed[1:])
    with torch.set_grad_enabled(derive):
        output, last = run(leaf, state)
    outputs = output if layer._OUTPUTS else (output,)
    named_outputs = zip(layer._OUTPUTS or ("h",), outputs, strict=True)
    finals = [last] if isinstance(last, Tensor) else list(last)
    results = {
        **{f"output {k}": y[0] if isinstance(y, PackedSequence) else y for k, y in named_outputs},
        **{f"state {k}": s for k, s in enumerate(finals)},
    }
    if not derive:
        return results
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for y in results.values():
        weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        total = total + (y.double() * weight).sum()
    named = [
        *zip(("input", *layer._STATES)[: len(passed)], passed, strict=True),
        *layer.named_parameters(),
    ]
    names, leaves = zip(*named, strict=True)
    for name, gradient in zip(names, gradients_of(total, leaves), strict=True):
        results[f"gradient of {name}"] = gradient
    return {name: y.detach() for name, y in results.items()}


def _double(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.double())
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    return None if value is None else value.double()


def _check_second(cell: Cell, scale: float) -> None:
    """Compares second derivatives of the layer and the function in float64."""
    layer, x, hx, _ = _problem(cell, "plain", (3, 2, 3, 4), torch.float64, scale, seed=0)

    def second(run: Callable[..., Any]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        results = [y for y in tree_leaves(run(leaves[0], hx)) if isinstance(y, Tensor)]
        total = sum(((y.cos() * y).sum() for y in results), torch.zeros(()).double())
        first = gradients_of(total, leaves, create_graph=True)
        squares = torch.stack([(g * g).sum() for g in first]).sum()
        return gradients_of(squares, leaves)

    with _Rounding() as rounding:
        try:
            expected = second(lambda *a: loop(cell, layer, *a))
        except RuntimeError as none:
            if "is not implemented" in str(none):  # hardsigmoid in ATen, for example
                return
            raise
    limit = max(1e-9, rounding.limit)
    for k, (ours, exact) in enumerate(zip(second(layer), expected, strict=True)):
        if not exact.numel():
            continue
        assert exact.isfinite().all(), (
            f"{cell.name}: expected inputs for which second derivatives are finite, got NaN or"
            f" infinity by argument {k}"
        )
        error = (ours - exact).abs().max().item() / (exact.abs().max().item() or 1.0)
        assert error <= limit, (
            f"{cell.name}: error {error:.1e} of the second derivative by argument {k}, expected at"
            f" most {limit:.1e}"
        )
