"""Derived parameters of custom cells: functions of learned parameters, computed once a call.

The tracer records the ATen operations that compute them. Their source, a Python function per
derived parameter, runs in modules and in TorchScript.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import linecache
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._C import ArgumentError

# Arguments that follow the parameters.
_FOLLOWING = {"layout", "device", "pin_memory", "memory_format", "non_blocking"}


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
        result = func(*args, **kwargs)
        # Autograd detaches what it saves. The tracer records detach() of the function.
        is_known = any(self.name(x) for x in tree_leaves((args, kwargs)))
        if is_known and func is not torch.ops.aten.detach.default:
            if func._schema.is_mutable:
                self.fail(
                    f"expected no in-place change in a function of only parameters, got {func}"
                )
            following = {k: self._written(x) for k, x in kwargs.items() if k not in _FOLLOWING}
            self._record(f"{func} {json.dumps([self._written(args), following])}", result)
            if self.detaches():
                for x in result if isinstance(result, (tuple, list)) else [result]:
                    self.detached(x, x)
        return result

    def detached(self, x: Tensor, result: Tensor) -> Tensor:
        """Records that result is x without derivative."""
        self._record(f"aten.detach.default {json.dumps([[self.name(x)], {}])}", result)
        return result

    def _record(self, line: str, result: Any) -> None:
        name = self.lines.setdefault(line, f"%{len(self.lines)}")
        several = isinstance(result, (tuple, list))
        for k, x in enumerate(result if several else [result]):
            if isinstance(x, Tensor):
                self.add(x, f"{name}[{k}]" if several else name)

    def _written(self, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return [self._written(item) for item in x]
        if isinstance(x, Tensor):
            if name := self.name(x):
                return name
            if x.numel() != 1 or x.is_complex():
                got = f"{[*x.shape]}, {x.dtype}"
                self.fail(f"expected outside tensors with a single real value, got {got}")
            return {"tensor": x.item()}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        if isinstance(x, str):
            return {"str": x}
        if isinstance(x, torch.dtype):  # the trace runs in float64
            return {"dtype": None if x == torch.float64 else str(x).removeprefix("torch.")}
        return x


_LINE = re.compile(r"%\d+ aten\.\w+\.\w+")


def _is_argument(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


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
    same = type(one) is type(other) and (one == other or (one != one and other != other))
    if same and not isinstance(one, dict):
        return one
    if (one, other) == sizes:
        return {"size": 1}
    raise ValueError(f"{one}, then {other}")


def _words(arguments: Any) -> Iterable[str]:
    """Yields the names of values in arguments."""
    if isinstance(arguments, str):
        yield arguments
    elif isinstance(arguments, list):
        for x in arguments:
            yield from _words(x)
    elif isinstance(arguments, dict) and not arguments.keys() & {"str", "dtype"}:
        yield from _words([*arguments.values()])


def _line_of(value: str) -> str:
    """Returns the name of the line that computes a value, such as %3 of %3[1]."""
    return re.sub(r"\[\d+\]$", "", value)


def needed_lines(lines: Sequence[Line], results: Iterable[str]) -> list[Line]:
    found, kept = {*map(_line_of, results)}, list[Line]()
    for line in reversed(lines):
        if line.name in found:
            kept.append(line)
            found.update(map(_line_of, _words(line.arguments)))
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
        right = rows[0] == "derived" and rows[-2:] == ["end", ""]
        for row in rows[1:-2]:
            with contextlib.suppress(ValueError, RecursionError):  # of float and json
                match row.split(" ", 3):
                    case "parameter", name, value, *rest if name.isidentifier():
                        parameters[name] = float(value)
                        scalars += [name] * (rest == ["scalar"])
                        known.add(name)
                        continue
                    case name, "=", value if name.isidentifier() and _line_of(value) in known:
                        results[name] = value
                        continue
                    case name, "=", op, arguments if _LINE.fullmatch(f"{name} {op}"):
                        line = Line(name, op, json.loads(arguments))
                        lines.append(line)
                        words, (_, named) = {*map(_line_of, _words(line.arguments))}, line.arguments
                        right = right and bool(words) and words <= known and name not in known
                        right = right and all(map(_is_argument, named))
                        known.add(name)
                        continue
            right = False
        if not right or not results:
            raise ArgumentError("lltm::cell: expected derived parameters after the cell's end")
        made = Derivation(parameters, tuple(scalars), tuple(lines), results)
        assert made.functions  # raises an error for wrong arguments
        return made

    def of(self, name: str) -> list[str]:
        """Returns the learned parameters that a derived parameter depends on."""
        lines = needed_lines(self.lines, [self.results[name]])
        words = {self.results[name], *(word for line in lines for word in _words(line.arguments))}
        return [parameter for parameter in self.parameters if parameter in words]

    @cached_property
    def functions(self) -> dict[str, tuple[Callable[..., Tensor], list[str]]]:
        """By derived parameter: its function, and the names of the function's arguments."""
        return {name: (self._function(name), self.of(name)) for name in self.results}

    def _function(self, name: str) -> Callable[..., Tensor]:
        names, value = self.of(name), self.results[name]
        typed = "".join(f"_{k}: Tensor, " for k in names)
        body = [f"def {name}_of({typed}size: int) -> Tensor:"]
        # In float32 at least, as the engines compute.
        wide = "torch.promote_types({0}.dtype, torch.float32)"
        body += [f"    p_{k} = _{k}.to({wide.format(f'_{k}')})" for k in names]
        like = f"p_{names[0]}"
        for line in needed_lines(self.lines, [value]):
            args, kwargs = line.arguments
            shown = [_source(x, like) for x in args]
            shown += [f"{k}={_source(x, like)}" for k, x in kwargs.items()]
            _, op, overload = line.op.split(".")
            # TorchScript's functions, such as aten.save, are no operations.
            registered = f"aten::{op}" if overload == "default" else f"aten::{op}.{overload}"
            if not torch._C._dispatch_has_kernel(registered):
                raise ArgumentError(f"lltm::cell: expected an operation of PyTorch, got {line.op}")
            body.append(f"    {_source(line.name, like)} = torch.ops.aten.{op}({', '.join(shown)})")
        body.append(f"    return {_source(value, like)}.reshape(-1).to(_{names[0]}.dtype)")
        source = "\n".join(body) + "\n"
        file = f"<lltm derived parameter {name} {hash(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "__name__": __name__}
        exec(compile(source, file, "exec", dont_inherit=True), namespace)
        made: Callable[..., Tensor] = namespace[f"{name}_of"]
        return made


def _source(x: Any, like: str) -> str:
    """Returns an argument as source, in Python and TorchScript."""
    match x:
        case str():
            return x.replace("%", "v", 1) if x.startswith("%") else f"p_{x}"
        case list():
            return f"[{', '.join(_source(item, like) for item in x)}]"
        case {"tensor": number}:
            return (
                f"torch.full([], {_source(number, like)}, dtype={like}.dtype, device={like}.device)"
            )
        case {"complex": [float(real), float(imag)]}:
            return f"complex({_source(real, like)}, {_source(imag, like)})"
        case {"str": str(text)}:
            return repr(text)
        case {"dtype": None}:
            return f"{like}.dtype"
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return f"torch.{name}"
        case {"size": 1}:
            return "size"
        case None | bool() | int():
            return repr(x)
        case float():
            return repr(x) if math.isfinite(x) else f"float('{x!r}')"
    raise ArgumentError(f"lltm::cell: expected an argument of derived parameters, got {x!r}")
