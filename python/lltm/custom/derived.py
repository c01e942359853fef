"""Derived parameters of custom cells: functions of learned parameters, computed once a call.

The tracer records the ATen operations that compute them. A serialized cell is data: a loop
evaluates its lines, whose operations are in OPERATIONS and whose arguments fit ATen's schemas. No
result has more elements than the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._C import ArgumentError

# Pure operations. docs/custom-cells.md has the functions that dispatch them.
_ELEMENT_WISE = """
    _conj _neg_view _to_copy abs acos acosh add.Scalar add.Tensor addcdiv addcmul angle asin
    asinh atan atan2 atanh bitwise_and.Tensor bitwise_not bitwise_or.Tensor bitwise_xor.Tensor
    ceil celu clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clone
    complex conj_physical copysign.Tensor cos cosh detach div.Scalar div.Tensor div.Tensor_mode
    elu eq.Scalar eq.Tensor erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin
    fmod.Scalar fmod.Tensor frac full_like ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot isinf isnan le.Scalar le.Tensor
    leaky_relu lerp.Scalar lerp.Tensor log log10 log1p log2 log_sigmoid_forward logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor maximum minimum mish mul.Scalar mul.Tensor nan_to_num
    ne.Scalar ne.Tensor neg ones_like polar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal relu remainder.Scalar remainder.Scalar_Tensor remainder.Tensor round
    round.decimals rsqrt rsub.Scalar sgn sigmoid sign silu sin sinh softplus softshrink sqrt
    sub.Scalar sub.Tensor tan tanh threshold trunc where.self zeros_like
"""
_OF_SEVERAL = """
    _log_softmax _softmax all all.dim amax amin any any.dim cummax cummin cumprod cumsum dot
    linalg_vector_norm logcumsumexp logsumexp max max.dim mean mean.dim min min.dim
    native_layer_norm prod prod.dim_int sort sort.stable std.correction sum sum.dim_IntList
    var.correction vdot
"""
_SHAPES = """
    _unsafe_view alias cat diagonal expand flip new_full new_ones new_zeros permute repeat roll
    select.int slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims stack
    t transpose.int tril triu unbind.int unsqueeze view view_as_complex view_as_real
"""
OPERATIONS = frozenset(
    f"aten.{name}" if "." in name else f"aten.{name}.default"
    for name in f"{_ELEMENT_WISE} {_OF_SEVERAL} {_SHAPES}".split()
)
_DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "float16", "bfloat16", "float32", "complex64", "complex128")
}
_STRINGS = ("none", "tanh", "floor", "trunc")  # of gelu and div
# Arguments that follow the parameters.
_FOLLOWING = {"layout", "device", "pin_memory", "memory_format", "non_blocking"}
# Hidden sizes for which functions are traced and checked. Almost every function of sizes differs.
SIZES = 1, 130
MOST_LINES, MOST_RESULTS = 512, 64
OF_PARAMETERS = "in a function of only parameters"
_SIZED = {"_unsafe_view", "expand", "new_full", "new_ones", "new_zeros", "repeat", "view"}


@functools.cache
def _operation(name: str) -> Any:
    """Returns an operation of OPERATIONS."""
    _, op, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, op), overload)


def _fits(x: Any, kind: str) -> bool:
    """Returns True if x is a serialized argument of a kind of ATen's schema."""
    of = kind[kind.find("[") + 1 : -1]
    if kind.startswith("Optional["):
        return x is None or _fits(x, of)
    if kind.startswith("List["):
        of = "in a list" if of == "Tensor" else of
        return isinstance(x, list) and all(_fits(item, of) for item in x)
    size = x == {"size": 1} and type(x["size"]) is int
    match kind, x:
        case "Tensor" | "in a list", str():
            return True
        case "Tensor" | "in a list", {"tensor": number, **others}:
            return not others and _fits(number, "float")
        case (("Tensor" | "number"), {"complex": [real, imag], **others}):
            return not others and _fits(real, "float") and _fits(imag, "float")
        case "Tensor" | "number", _:
            return size or isinstance(x, bool) or _fits(x, "float")
        case "float", int() | float():
            return _fits(x, "int") or (isinstance(x, float) and not math.isnan(x))
        case "int", _:
            return size or (type(x) is int and -(2**63) <= x < 2**63)
        case "bool", _:
            return isinstance(x, bool)
        case "str", {"str": text, **others}:
            return not others and text in _STRINGS
        case "ScalarType", {"dtype": None | str() as name, **others}:
            return not others and (name is None or name in _DTYPES)
    return False


def fits(op: str, arguments: Any) -> bool:
    """Returns True if op is an operation that may be recorded, with arguments of its schema."""
    match arguments:
        case [list(args), dict(named)] if op in OPERATIONS:
            expected = _operation(op)._schema.arguments
        case _:
            return False
    kinds = {
        a.name: str(a.real_type).replace("SymInt", "int")
        for a in expected
        if a.name not in _FOLLOWING
    }
    positional = [a.name for a in expected if not a.kwarg_only]
    needed = [a.name for a in expected if not a.has_default_value()]
    given = {**dict(zip(positional, args, strict=False)), **named}
    return (
        len(args) <= len(positional)
        and kinds.keys() - positional >= named.keys()
        and given.keys() >= {*needed}
        and all(_fits(x, kinds[k]) for k, x in given.items())
        and _names(arguments) != []
    )


class Tape(TorchDispatchMode):
    """Records operations on functions of parameters, as lines of the serialized form."""

    def __init__(self, fail: Callable[[str], Any], detaches: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fail, self.detaches = fail, detaches
        self.lines: dict[str, str] = {}  # name by operation and arguments: equal ones are shared
        self.names: dict[Any, str] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that no address is reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @staticmethod
    def _key(x: Tensor) -> Any:
        # Aliases of the same elements are the same value.
        return x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    def add(self, x: Tensor, name: str) -> None:
        self.names[self._key(x)] = name
        self.alive.append(x)

    def name(self, x: Any) -> str | None:
        return self.names.get(self._key(x)) if isinstance(x, Tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.fail("expected no item() and `if` with parameters")
        # Autograd detaches what it saves. The tracer records detach() of the function.
        is_known = any(self.name(x) for x in tree_leaves((args, kwargs)))
        if not is_known or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        following = {k: self._written(x) for k, x in kwargs.items() if k not in _FOLLOWING}
        arguments = [self._written(args), following]
        if not fits(str(func), arguments):
            got = f" with {json.dumps(arguments)}" if str(func) in OPERATIONS else ""
            self.refuse(f"an operation that the page 'Custom cells' lists, got {func}{got},")
        result = func(*args, **kwargs)
        self._record(f"{func} {json.dumps(arguments)}", result)
        if self.detaches():
            for _, x in _results("", result):
                self.detached(x, x)
        return result

    def refuse(self, expected: str) -> None:
        """Fails for a function that cannot be a derived parameter."""
        self.fail(
            f"expected {expected} {OF_PARAMETERS}; compute other functions in a module, as a"
            " parametrization of the layer (torch.nn.utils.parametrize)"
        )

    def detached(self, x: Tensor, result: Tensor) -> Tensor:
        """Records that result is x without derivative."""
        self._record(f"aten.detach.default {json.dumps([[self.name(x)], {}])}", result)
        return result

    def _record(self, line: str, result: Any) -> None:
        name = self.lines.setdefault(line, f"%{len(self.lines)}")
        for value, x in _results(name, result):
            if isinstance(x, Tensor):
                self.add(x, value)

    def _written(self, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return [self._written(item) for item in x]
        if isinstance(x, Tensor):
            if name := self.name(x):
                if _is_integer(x):
                    self.refuse(f"no integers, got a tensor of {x.dtype},")
                return name
            if x.requires_grad:
                self.fail(
                    "expected learned tensors in parameters=, got a tensor that requires grad"
                )
            if x.numel() != 1 or x.is_complex():
                got = f"{[*x.shape]}, {x.dtype}"
                self.fail(f"expected outside tensors with a single real value, got {got}")
            return {"tensor": float(x.item())}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        if isinstance(x, str):
            return {"str": x}
        if isinstance(x, torch.dtype):  # the trace runs in float64
            return {"dtype": None if x == torch.float64 else str(x).removeprefix("torch.")}
        return x


class Line(NamedTuple):
    name: str
    op: str
    arguments: Any


def merged(one: Any, other: Any, sizes: tuple[int, int]) -> Any:
    """Combines the arguments of two runs with other hidden sizes."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [merged(a, b, sizes) for a, b in zip(one, other, strict=True)]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {k: merged(one[k], other[k], sizes) for k in one}
    if type(one) is type(other) and one == other and not isinstance(one, dict):
        return one
    if (one, other) == sizes:
        return {"size": 1}
    raise ValueError(f"{one}, then {other}")


def _names(arguments: Any) -> list[str]:
    """Returns the names of values in the arguments of a line."""
    args, named = arguments
    lists = [x if isinstance(x, list) else [x] for x in (*args, *named.values())]
    return [name for several in lists for name in several if isinstance(name, str)]


def _results(line: str, result: Any) -> list[tuple[str, Any]]:
    """Returns the results of a line with their names."""
    if not isinstance(result, (tuple, list)):
        return [(line, result)]
    if len(result) > MOST_RESULTS:
        _wrong(f"at most {MOST_RESULTS} results of an operation", len(result))
    return [(f"{line}[{k}]", x) for k, x in enumerate(result)]


def _line_of(value: str) -> str:
    """Returns the name of the line that computes a value, such as %3 of %3[1]."""
    return value.partition("[")[0]


def needed_lines(lines: Sequence[Line], results: Iterable[str]) -> list[Line]:
    found, kept = {*map(_line_of, results)}, list[Line]()
    for line in reversed(lines):
        if line.name in found:
            kept.append(line)
            found.update(map(_line_of, _names(line.arguments)))
    return kept[::-1]


@dataclass(frozen=True)
class Derivation:
    """The learned parameters of a cell, and the lines that compute its derived parameters."""

    parameters: Mapping[str, Any]  # initial values
    scalars: Sequence[str] = ()
    lines: Sequence[Line] = ()
    results: Mapping[str, str] = field(default_factory=dict)  # value of each derived parameter

    @property
    def text(self) -> str:
        """The serialized form, which follows that of the program. Empty without results."""
        if not self.results:
            return ""
        initial = {k: math.nan if callable(x) else x for k, x in self.parameters.items()}
        lines = [
            f"parameter {k} {x!r}{' scalar' * (k in self.scalars)}" for k, x in initial.items()
        ]
        lines += [f"{x.name} = {x.op} {json.dumps(x.arguments)}" for x in self.lines]
        lines += [f"{name} = {value}" for name, value in self.results.items()]
        return "\n".join(["derived", *lines, "end\n"])

    @staticmethod
    def read(text: str) -> Derivation:
        parameters, scalars = dict[str, float](), list[str]()
        lines, results = list[Line](), dict[str, str]()
        known, rows = set[str](), text.split("\n")
        if rows[0] != "derived" or rows[-2:] != ["end", ""]:
            _wrong("derived parameters after the cell's end", reprlib.repr(text))
        for row in rows[1:-2]:
            name, right = "", False
            with contextlib.suppress(ValueError, RecursionError):  # of float and json
                match row.split(" ", 3):
                    case "parameter", name, value, *rest if name != "=":
                        parameters[name] = float(value)
                        scalars += [name] * len(rest)
                        right = rest in ([], ["scalar"])
                    case name, "=", value:
                        results[name] = value
                        right = _line_of(value) in known
                    case name, "=", op, arguments if name.startswith("%"):
                        lines.append(line := Line(name, op, json.loads(arguments)))
                        right = fits(op, line.arguments)
                        right = right and known.issuperset(map(_line_of, _names(line.arguments)))
            if not right or name in known:
                _wrong("a line of derived parameters", repr(row[:100]))
            known.add(name)
        if not results or len(lines) > MOST_LINES or needed_lines(lines, results.values()) != lines:
            _wrong(f"1 to {MOST_LINES} lines that compute derived parameters", len(lines))
        return Derivation(parameters, tuple(scalars), tuple(lines), results)

    def check(self, scalars: Sequence[str], sizes: Sequence[int] = SIZES) -> None:
        """Computes the derived parameters for hidden sizes. `scalars` have a single value."""
        for size in sizes:
            learned = {
                k: torch.full([1 if k in self.scalars else size], 0.5, device="cpu")
                for k in self.parameters
            }
            most = max(16, size, sum(x.numel() for x in learned.values()))
            for name, (_, of) in self.functions.items():
                function = self._function(name, partial(_check_operands, most))
                try:
                    with torch.no_grad(), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        got = function(*(learned[k] for k in of), size).numel()
                except ArgumentError:
                    raise
                except Exception as error:  # of PyTorch
                    why = str(error).partition("\n")[0]
                    _wrong(f"a function that computes {name} for {size} hidden units", why)
                right = 1 if name in scalars else size
                if got != right:
                    _wrong(f"{right} values in {name}", got)

    def of(self, name: str) -> list[str]:
        """Returns the learned parameters that a derived parameter depends on."""
        lines = needed_lines(self.lines, [self.results[name]])
        words = {self.results[name], *(word for line in lines for word in _names(line.arguments))}
        return [parameter for parameter in self.parameters if parameter in words]

    @cached_property
    def functions(self) -> dict[str, tuple[Callable[..., Tensor], list[str]]]:
        """By derived parameter: its function, and the names of the function's arguments, which the
        hidden size follows."""
        return {name: (self._function(name), self.of(name)) for name in self.results}

    def _function(
        self, name: str, check: Callable[[str, list[Any]], None] | None = None
    ) -> Callable[..., Tensor]:
        names, value = self.of(name), self.results[name]
        lines = needed_lines(self.lines, [value])
        steps = [(x.name, x.op, _operation(x.op), *x.arguments) for x in lines]

        def computed(*arguments: Any) -> Tensor:
            *learned, size = arguments
            # In float32 at least, as the engines compute.
            values = {
                k: x.to(torch.promote_types(x.dtype, torch.float32))
                for k, x in zip(names, learned, strict=True)
            }
            like = values[names[0]]
            for line, op, run, args, named in steps:
                args = [_given(x, values, like, size) for x in args]
                named = {k: _given(x, values, like, size) for k, x in named.items()}
                if check is not None:
                    check(op, [*args, *named.values()])
                values.update(_results(line, run(*args, **named)))
            made: Tensor = values[value].reshape(-1)
            if not made.is_floating_point():
                _wrong(f"{name} with a floating-point dtype", made.dtype)
            return made.to(learned[0].dtype)

        return computed


def _given(x: Any, values: Mapping[str, Tensor], like: Tensor, size: int) -> Any:
    """Returns an argument of an operation."""
    if isinstance(x, str):
        return values[x]
    if isinstance(x, list):
        return [_given(item, values, like, size) for item in x]
    if not isinstance(x, dict):
        return x
    ((kind, of),) = x.items()
    if kind == "tensor":
        return torch.full([], of, dtype=like.dtype, device=like.device)
    if kind == "dtype":
        return like.dtype if of is None else _DTYPES[of]
    return size if kind == "size" else complex(*of) if kind == "complex" else of


def _check_operands(most: int, op: str, given: Sequence[Any]) -> None:
    """Checks the arguments of an operation before its call. A result may have at most `most`
    elements, complex numbers twice as many parts."""
    name, flat = op.split(".")[1], [y for x in given for y in (x if isinstance(x, list) else [x])]
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if any(_is_integer(x) for x in tensors):
        _wrong(f"no integers {OF_PARAMETERS}", f"{op} of integers")
    shapes = [*(x.shape for x in tensors), *([given[1]] if name in _SIZED else [])]
    elements = [_elements(shape) for shape in shapes]
    if name in ("cat", "stack"):
        largest = sum(elements)
    elif name == "repeat":
        largest = math.prod(elements)
    elif name == "view_as_real":
        largest = 2 * elements[0]
    elif name in _SIZED and name != "expand":
        largest = elements[1]
    else:  # by broadcasting
        ranks = range(1, 1 + max(map(len, shapes)))
        largest = _elements([max(x[-k] for x in shapes if len(x) >= k) for k in ranks])
    if largest > (most if shapes[1:] else 2 * most):
        expected = f"at most {most} elements, as the parameters have, {OF_PARAMETERS}"
        _wrong(expected, f"up to {largest} of {op}")


def _elements(shape: Sequence[int]) -> int:
    """Returns the number of elements. An empty dimension counts as 1."""
    return math.prod([max(size, 1) for size in shape])


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _wrong(expected: str, got: object) -> NoReturn:
    raise ArgumentError(f"lltm::cell: expected {expected}, got {got}")
