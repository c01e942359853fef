"""Traces a Python function of tensors into a cell program.

The function and then its derivative run on small tensors with equal elements. Each ATen operation
that they dispatch becomes operations of the program (RULES). Equal operations share a Value. A
second run with other values and another shape must give the same program. So a dependence on
values or shapes raises an error instead of becoming a constant.

Parameters also have a tensor in the shape of a step, for functions of only parameters that are
expensive or have no operation: they become derived parameters, which are inputs of the program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import linecache
import math
import os
import re
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import FrameType
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .._C import ArgumentError
from .derived import (
    OF_PARAMETERS,
    SIZES,
    Derivation,
    Line,
    Tape,
    merged,
    needed_lines,
)
from .gates import Gates, NoProgram, NoSuchGate, ProductGate, check_gates, name_of, not_a_tensor
from .means import OVER_UNITS, TracerFunction, layer_norm
from .modules import NAMES_IN_MODULES
from .program import MOST_PARAMETERS, RESERVED, Program, declared, expect, is_name, written
from .rules import ELEMENT_WISE, FACTORIES, NO_PRODUCT, OPTIONS, RULES, tie, why_not
from .values import EXPENSIVE, OPERATIONS, Expressions, Operand, Value, apply, needed

# Batch size and hidden size in the two runs.
SHAPES = [*zip((1, 3), SIZES, strict=True)]
# Operations that are not repeated in each step if they depend only on parameters.
ONCE = EXPENSIVE | {"divide", "mean"}
NO_NAN = "expected constants other than NaN, got NaN"


_SAME = "a function that runs the same operations in each call, for all values and sizes"

# An operation, its numbers and its line, to report differences between the runs.
Call: TypeAlias = tuple[str, list[Any], str]


class _Multiplied(TracerFunction):
    """The value that gates multiply. Its gradient is a product of all their gradients."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, tracer: Tracer, gates: list[str]) -> Tensor:
        ctx.tracer, ctx.gates = tracer, gates
        return v.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tracer.product_of_gradients(grad, ctx.gates), None, None


class _PreActivation(TracerFunction):
    """The pre-activation z of a gate, with the operand of its product."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, z: Tensor, gradients: dict[str, Tensor], gate: str) -> Tensor:
        ctx.gradients, ctx.gate = gradients, gate
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.gradients[ctx.gate] = grad
        return torch.zeros_like(grad), None, None, None


class Tracer(TorchDispatchMode):
    def __init__(
        self, function: Callable[..., Any], where: str, shape: tuple[int, int], number: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function, self.where, self.shape, self.number = function, where, shape, number
        self.code = getattr(inspect.unwrap(function), "__code__", None)
        self.graph: dict[Any, Value] = {}
        self.calls: list[Call] = []
        self.warnings: dict[str, str] = {}  # messages with line; the derivative repeats some
        # By data pointer: aliases are the same value.
        self.known: dict[int, Operand] = {}
        self.alive: dict[int, Tensor] = {}  # keeps tensors alive, so that no address is reused
        self.inputs: set[int] = set()
        self.parameters: dict[Value, tuple[int, int]] = {}  # with the shape, 0 if it has no batch
        # Values that depend only on parameters: whether a value does, and its tensor in a step.
        self.pure: dict[Value, bool] = {}
        self.pure_tensors: dict[Value, Tensor] = {}
        self.tape = Tape(self.fail, lambda: self.without_grad and not torch.is_grad_enabled())
        self.computed: dict[str, Tensor] = {}  # by name of the value on the tape
        self.sources: dict[str, Value] = {}  # of derived parameters, by the same name
        self.products: dict[str, Tensor] = {}  # by name of the pre-activation
        # For each value that gates multiply: its tensor, the result of _Multiplied and the gates.
        self.multiplied: dict[Value, tuple[Tensor, Tensor, list[str]]] = {}
        self.gradients: dict[str, Tensor] = {}  # of products, by gate
        self.detached: set[int] = set()
        self.deriving = False
        self.without_grad = False  # True inside the function's torch.no_grad()
        self.own_gradient = False  # True if the function defines its own gradient
        # For autograd's contexts: garbage collection cannot free a cycle through them.
        self.proxy = weakref.proxy(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports torch._dynamo, which takes seconds

    def run(self, program: Program, names: Sequence[str]) -> Expressions:
        """Traces the function, called with z and the named arguments, and its derivative."""
        gates = {
            gate: ProductGate(gate, partial(self.product, gate))
            if gate in program.products
            else self.input(f"z.{gate}")
            for gate in program.gates
        }
        arguments = {name: self.input(name) for name in names}
        for name in program.parameters:
            value, size = self.graph[name], 1 if name in program.scalars else self.shape[1]
            in_a_step = torch.linspace(self.number / 2, 0.75, size, dtype=torch.float64)
            in_a_step.requires_grad_()
            self.parameters[value] = 0, size
            self.pure[value], self.pure_tensors[value] = True, in_a_step
            self.tape.add(in_a_step, name)
            self.computed[name] = arguments[name]
        states = [f"{state}'" for state in ("h", *program.states)]
        tangents = {f"d.{state}": self.input(f"d.{state}") for state in states}
        with self:
            try:
                found = self.call(gates, arguments)
                for z in gates.values():
                    if isinstance(z, ProductGate) and z.got == "no call":
                        not_a_tensor(z)
                results = self.checked(found, states)
                named: dict[str, Any] = {f"z.{gate}": z for gate, z in gates.items()}
                derived = self.named_derived({*arguments, *gates})
                inputs: dict[str, Tensor] = named | self.products | arguments | derived
                values = [self.operand(x) for x in results]
                self.own_gradient |= _calls_functions(results)
                self.deriving = True
                self.calls.append(("the end of the function", [], ""))
                gradients = self.derived(results, inputs.values(), tangents.values())
            except (NoProgram, *_ERRORS) as error:
                of_z = isinstance(error, (NoProgram, NoSuchGate))
                of_function = isinstance(error, TypeError) and str(error) != _NOT_CALLABLE
                if not of_z and (of_function or isinstance(error, ArgumentError)):
                    raise
                frames = reversed([*traceback.walk_tb(error.__traceback__)])
                message = f"lltm::cell: {self.where}: {_in_our_words(error)}{self.line(frames)}"
                kind = TypeError if isinstance(error, NoProgram) else ArgumentError
                raise kind(message) from (None if of_z else error)
        return Expressions(
            inputs={name: self.graph[name] for name in inputs},
            tangents={name: self.graph[name] for name in tangents},
            results=dict(zip(states, values, strict=True)),
            gradients={f"d.{name}": x for name, x in zip(inputs, gradients, strict=True)},
            own_gradient=self.own_gradient,
        )

    def input(self, name: str) -> Tensor:
        with torch.enable_grad():
            leaf = torch.full(self.shape, self.number, dtype=torch.float64, requires_grad=True)
            tensor = leaf.clone()  # PyTorch's error for in-place changes of leaves would be unclear
        value = self.graph[name] = Value(self.graph, "input", (), len(self.graph))
        self.inputs.add(tensor.data_ptr())
        self.keep(tensor, value)
        return tensor

    def product(self, gate: str, v: Any) -> Tensor:
        """Returns the pre-activation of a gate whose recurrent weights multiply v."""
        expected = f"expected a value with the shape and dtype of a gate in z.{gate}(...)"
        if not isinstance(v, Tensor):
            self.fail(f"{expected}, got {name_of(v)}")
        if v.shape != self.shape or v.dtype != torch.float64:
            self.fail(f"{expected} (here {[*self.shape]}), got {[*v.shape]}, {v.dtype}")
        operand = self.known.get(v.data_ptr())
        if not isinstance(operand, Value) or operand in self.parameters:
            got = "a parameter" if operand in self.parameters else "a constant"
            self.fail(f"expected a value of the step in z.{gate}(...), got {got}")
        if operand not in self.multiplied:
            gates: list[str] = []
            with torch.enable_grad():  # for gates that are called later
                known = _Multiplied.apply(v, self.proxy, gates)  # type: ignore[no-untyped-call]
            self.multiplied[operand] = v, known, gates
        first, known, gates = self.multiplied[operand]
        if first is not v and _calls_functions((first, v)):  # their gradients may differ
            self.fail(
                f"expected one tensor for z.{gates[0]}(...) and z.{gate}(...), got equal tensors"
            )
        gates.append(gate)
        z = torch.full(self.shape, self.number, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            made: Tensor = _PreActivation.apply(known, z, self.gradients, gate)  # type: ignore[no-untyped-call]
        name = f"z.{gate}"
        self.graph[name] = Value(self.graph, "product", (operand,), len(self.graph))
        self.products[name] = self.keep(made, self.graph[name])
        return made.clone()  # the function may change it in place

    def product_of_gradients(self, like: Tensor, gates: Sequence[str]) -> Tensor:
        """Returns the gradient of an operand."""
        found = [self.operand(self.gradients[g]) if g in self.gradients else 0.0 for g in gates]
        result = torch.zeros_like(like)
        if not any(found):
            return result
        value = Value(self.graph, "product", tuple(found), len(self.graph), gates=tuple(gates))
        self.graph["product", tuple(gates)] = value
        return self.keep(result, value)  # type: ignore[no-any-return]

    def mean(self, x: Tensor) -> Tensor:
        y = x.clone()
        operand = self.operand(y)
        return self.keep(y, apply("mean", operand) if isinstance(operand, Value) else None)  # type: ignore[no-any-return]

    def shape_in_a_step(self, value: Value) -> list[int]:
        """Returns the shape of a value in a step, where parameters have no batch."""
        sizes = dict(self.parameters)
        for v in needed([value], sizes):
            of_args = (sizes[a] for a in v.args if isinstance(a, Value))
            rows, units = map(max, (0, 0), (0, 0), *of_args) if v.args else self.shape
            sizes[v] = rows, 1 if v.op == "mean" else units
        return [size for size in sizes[value] if size]

    # ---- functions of only parameters

    def is_pure(self, x: Tensor) -> bool | None:
        """True if a tensor depends only on parameters, None if it is a constant."""
        value = self.known.get(x.data_ptr())
        if not isinstance(value, Value):
            return True if value is None and self.tape.name(x) else None
        for v in needed([value], self.pure):
            args = [self.pure[a] for a in v.args if isinstance(a, Value)]
            self.pure[v] = v.op != "product" and bool(args) and all(args)
        return self.pure[value]

    def in_a_step(self, x: Any) -> Any:
        """Computes a function of parameters with the shapes in a step."""
        value = self.known.get(x.data_ptr()) if isinstance(x, Tensor) else None
        if not isinstance(value, Value):
            return x
        if _calls_functions((x,)):
            self.fail("expected no torch.autograd.Function before this function of parameters")
        with torch.enable_grad(), self.tape:
            for v in needed([value], self.pure_tensors):
                args: list[Any] = [self.pure_tensors.get(a, a) for a in v.args]  # type: ignore[arg-type]
                if v.op == "mean":
                    made = args[0].mean(-1, keepdim=True)
                elif v.op == "detach":
                    made = self.tape.detached(args[0], args[0].detach().clone())
                elif v.op in ("add", "multiply", "divide") and isinstance(args[0], Tensor):
                    made = OPERATIONS[v.op](*args)
                else:
                    made = OPERATIONS[v.op](*(torch.as_tensor(a, dtype=torch.double) for a in args))
                self.pure_tensors[v] = made.to(torch.float64)
            return self.pure_tensors[value].to(x.dtype)  # of a condition: bool

    def computed_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of only parameters. Its results are values if they have a value per
        hidden unit, or a single one. Others are inputs of other functions of parameters."""
        args, kwargs = tree_map(self.in_a_step, (args, kwargs))
        with self.tape:
            results = func(*args, **kwargs)
        if func in _DETACHING:
            results = self.tape.detached(results, results.clone())
        return tree_map(lambda x: self.derive(x) if self.is_per_unit(x) else x, results)

    def is_per_unit(self, x: Any) -> bool:
        right = isinstance(x, Tensor) and x.dtype == torch.float64 and x.dim() <= 1
        return right and x.numel() in (1, self.shape[1]) and self.tape.name(x) is not None

    def derive(self, x: Tensor, source: Value | None = None) -> Tensor:
        """Returns a derived parameter with the value of x, which has the shape in a step."""
        name = self.tape.name(x) or ""
        if name not in self.computed:
            self.computed[name] = self.input(f"derived {name}")
            value = self.graph[f"derived {name}"]
            self.parameters[value], self.pure[value] = (0, x.numel()), True
            self.pure_tensors[value] = x
            self.sources[name] = source or value
        with torch.enable_grad():
            return self.computed[name].clone()  # the function may change it in place

    def derived_in(self, arguments: Any) -> Any:
        """Replaces functions of parameters, in a call with values of the step."""

        def replaced(x: Any) -> Any:
            if not isinstance(x, Tensor) or not self.is_pure(x):
                return x
            value = self.known.get(x.data_ptr())
            if isinstance(value, Value):
                order = needed([value], self.parameters)
                if ONCE.isdisjoint(v.op for v in order) or _calls_functions((x,)):
                    return x
            is_condition, made = x.dtype == torch.bool, self.in_a_step(x)
            with self.tape:
                while made.dim() > 1 and len(made) == 1:
                    made = made.squeeze(0)
                made = made.double() if is_condition else made
            if not self.is_per_unit(made):
                expected = (
                    "functions of only parameters with a value per hidden unit or a single one"
                )
                self.fail(f"expected {expected}, got {[*x.shape]}, {x.dtype}")
            derived = self.derive(made, value if isinstance(value, Value) else None)
            return derived != 0 if is_condition else derived

        return tree_map(replaced, arguments)

    def named_derived(self, taken: set[str]) -> dict[str, Tensor]:
        """Returns the derived parameters, named after local variables of the function."""
        named = dict[str, Tensor]()
        for on_tape, source in self.sources.items():
            value = self.graph[f"derived {on_tape}"]
            name = value.name or source.name or "derived"
            while name in taken | RESERVED | NAMES_IN_MODULES or not is_name(name):
                name = f"{name}_" if is_name(name) else "derived"
            taken.add(name)
            self.graph[name], named[name] = value, self.computed[on_tape]
        return named

    def hook(self, x: Tensor) -> None:
        """Notes a gradient hook. Rejects it on a tensor that a step broadcasts: in the trace, its
        gradient is not yet summed."""
        value = self.known.get(x.data_ptr())
        if isinstance(value, Value):
            self.own_gradient = True
            if (shape := self.shape_in_a_step(value)) != [*self.shape]:
                self.fail(
                    f"expected gradient hooks only on tensors with the shape of a gate (here"
                    f" {[*self.shape]}), got {shape}; register hooks of parameters on the layer's"
                )

    def check_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Calls a function of PyTorch with tensors of the shapes in a step, to check arguments."""

        def in_a_step(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            value = self.known.get(x.data_ptr())
            if not isinstance(value, Value):  # a constant, which func may change
                return (x.double() if x.is_floating_point() else x).clone()
            shape = self.shape_in_a_step(value)
            return torch.zeros(shape, dtype=x.dtype, requires_grad=x.requires_grad)

        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                func(*tree_map(in_a_step, args), **tree_map(in_a_step, kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self.fail(str(error).replace("Expected", "expected", 1))

    def call(self, z: Mapping[str, Any], arguments: Mapping[str, Tensor]) -> Any:
        """Calls the function, and names values after its local variables."""

        def on_event(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code is self.code:
                for name, x in frame.f_locals.items():
                    value = self.known.get(x.data_ptr()) if isinstance(x, Tensor) else None
                    if isinstance(value, Value):
                        value.name = value.name or name

        before = sys.getprofile()
        with _Detaching(self):
            sys.setprofile(on_event)
            try:
                return _called(self.function, z, arguments)
            finally:
                sys.setprofile(before)

    def checked(self, found: Any, names: list[str]) -> Sequence[Tensor]:
        """Checks the results of the function. Returns a result for each name."""
        returned = f"({', '.join(names)})" if names[1:] else "only h'"
        states = "; arguments other than h and parameters= are states" if names[1:] else ""
        results = found if names[1:] else (found,)
        if not isinstance(results, (tuple, list)):
            self.fail(f"expected the function to return {returned}, got {name_of(found)}{states}")
        if not all(isinstance(x, Tensor) for x in results) or len(results) != len(names):
            kinds = ", ".join(map(name_of, results)) or "nothing"
            self.fail(f"expected the function to return {returned}, got {kinds}{states}")
        for name, x in zip(names, results, strict=True):
            if x.shape != self.shape or not x.is_floating_point():
                self.fail(
                    f"expected {name} with the shape of a gate (here {[*self.shape]}) and a"
                    f" floating-point dtype, got {[*x.shape]}, {x.dtype}"
                )
        return results

    def derived(
        self, results: Sequence[Tensor], inputs: Iterable[Tensor], tangents: Iterable[Tensor]
    ) -> list[Operand]:
        # A sum of products, because autograd.grad of several results imports sympy.
        with _disable_current_modes():
            pairs = zip(results, tangents, strict=True)
            products = [(x * d).sum() for x, d in pairs if x.requires_grad]
            if not products:
                return [0.0 for _ in inputs]
            total = functools.reduce(torch.add, products)
        gradients: Sequence[Any] = torch.autograd.grad(total, (*inputs,), allow_unused=True)
        return [0.0 if x is None else self.operand(x) for x in gradients]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.fail(f"expected no random numbers, got {func._schema.name}")
        constant = not self.knows((args, kwargs))
        if not constant and name not in RULES and name not in FACTORIES:
            self.unsupported(func)
        if func._schema.is_mutable and not constant:
            self.check_in_place(func, args, kwargs)
        if constant or name in FACTORIES:  # operand() reads its number
            return self.keep(func(*args, **kwargs), None)
        operands = [self.operand(x) for x in args]
        named = {k: self.operand(x) for k, x in kwargs.items() if k not in OPTIONS}
        result = func(*args, **kwargs)
        first = result if isinstance(result, Tensor) else result[0]
        if first.is_floating_point() and first.dtype != torch.float64:
            operands = [self.rounded(x, first.dtype) for x in operands]
            named = {k: self.rounded(x, first.dtype) for k, x in named.items()}
        numbers = [x for x in (*operands, *named.values()) if not isinstance(x, Value)]
        self.calls.append((func._schema.name, numbers, self.line()))
        if first.is_complex() or (name == "_to_copy" and self.rounds(args[0].dtype, first.dtype)):
            self.unsupported(func)
        if name.startswith("logical"):
            operands = [
                v if x.dtype == torch.bool else apply("not_equal", v, 0.0)
                for v, x in zip(operands, args, strict=True)
            ]
        elif first.dtype == torch.bool:
            name = {"add": "logical_or", "mul": "logical_and"}.get(name, name)
        elif name.startswith("bitwise") or (name == "view" and first.shape != args[0].shape):
            self.unsupported(func)
        if self.deriving and name in ("eq", "gt", "lt") and func._overloadname == "Tensor":
            operands = tie(*operands)
        value = RULES[name](*operands, **named)
        if value is NotImplemented:
            self.unsupported(func)
        if self.without_grad and not torch.is_grad_enabled() and isinstance(value, Value):
            value = apply("detach", value)
            if not func._schema.is_mutable:  # an alias, as of detach(), needs another address
                result = first.clone() if first is result else result
        return self.keep(result, value)

    def knows(self, arguments: Any) -> bool:
        """Returns True if an argument is a value of the program."""
        tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor))
        return any(x.data_ptr() in self.known for x in tensors)

    def keep(self, result: Any, value: Operand | None) -> Any:
        for k, x in enumerate(tree_leaves(result)):
            if isinstance(x, Tensor):
                self.alive[x.data_ptr()] = x
                self.known.pop(x.data_ptr(), None)
                if value is not None:  # derivatives ignore other results, as of log_sigmoid
                    self.known[x.data_ptr()] = value if k == 0 else math.nan
        return result

    def operand(self, x: Any) -> Any:
        """Returns the Value or constant number of a tensor, or a number as a float."""
        if not isinstance(x, Tensor):
            x = float(x) if isinstance(x, (bool, int, float)) else x
            return self.fail(NO_NAN) if x != x else x
        if (value := self.known.get(x.data_ptr())) is not None:
            return value
        if x.requires_grad:
            self.fail("expected learned tensors in parameters=, got a tensor that requires grad")
        if x.is_complex() or x.is_meta or not self.is_one_number(x):
            got = f"{[*x.shape]}, {x.dtype}{', on meta' * x.is_meta}"
            self.fail(f"expected outside tensors with a single real value, got {got}")
        number = float(x.flatten()[-1].item())
        if math.isnan(number):
            self.fail(NO_NAN)
        if x.dtype != torch.float64 and math.frexp(number)[0] * 2**11 % 1 > 0:  # inexact anyway
            self.warn(
                f"the constant is {number!r} in {x.dtype}; with dtype=torch.float64, or as a Python"
                " number, it is not rounded"
            )
        return number

    def rounded(self, x: Any, dtype: torch.dtype) -> Any:
        """Rounds a number as PyTorch does in operations with tensors of a narrower dtype."""
        if not isinstance(x, float):
            return x
        number = float(torch.tensor(x, dtype=dtype).item())
        if number != x and x == x:
            self.warn(
                f"the constant {x!r} is rounded to {number!r}, because the function computes in"
                f" {dtype} here; convert to the dtype of z with .to(z[0].dtype)"
            )
        return number

    def warn(self, message: str) -> None:
        self.warnings.setdefault(message, self.line())

    def is_one_number(self, x: Tensor) -> bool:
        """Returns True if the value is the same for all batch elements and hidden units."""
        if x.numel() == 1:
            return True
        sizes = zip(reversed(x.shape), reversed(self.shape), strict=False)
        fits = x.dim() <= len(self.shape) and all(n in (1, size) for n, size in sizes)
        # ATen's vector loops round otherwise than its scalar loop, which computes the last element.
        eps, wide = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0, x.double()
        rtol = eps if eps > 1e-5 else 16 * eps
        alike = torch.allclose(wide, wide.flatten()[-1:], rtol, 0.0, equal_nan=True)
        return fits and x.numel() > 0 and alike

    def rounds(self, before: torch.dtype, after: torch.dtype) -> bool:
        """Returns True if a conversion rounds. A gradient may round to its condition's dtype."""
        rounds = torch.promote_types(before, after) != after
        return rounds and not (self.deriving and after.is_floating_point)

    def check_in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        address = args[0].data_ptr()
        kinds = {"an argument": self.inputs, "a detached tensor": self.detached}
        other = "" if address in self.alive else "an outside tensor"
        if kind := next((kind for kind, known in kinds.items() if address in known), other):
            self.fail(f"expected no in-place change of {kind}, got {func._schema.name}")
        if not self.deriving:
            self.check_call(func, args, kwargs)

    def unsupported(self, func: Any) -> NoReturn:
        of = " in the derivative" if self.deriving else ""
        self.fail(f"{why_not(func, self.deriving)}, got {func._schema.name}{of}")

    def fail(self, message: str) -> NoReturn:
        raise NoProgram(message)

    def line(self, frames: Iterable[tuple[FrameType, int]] | None = None) -> str:
        """Returns the innermost line of the user's code in the frames. Default: the stack."""
        ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
        for frame, number in frames or traceback.walk_stack(sys._getframe()):
            file = frame.f_code.co_filename
            if frame.f_code is Tracer.run.__code__:
                break
            if not file.startswith(ours):
                return f"\n  {file}:{number}: {linecache.getline(file, number).strip()}"
        return f"\n  {self.code.co_filename}:{self.code.co_firstlineno}" if self.code else ""


# Exceptions of PyTorch, and StopIteration, which ends iterators of the caller.
_ERRORS = RuntimeError, OverflowError, ValueError, TypeError, StopIteration
_NOT_CALLABLE = "'Tensor' object is not callable"


def _in_our_words(error: Exception) -> str:
    """Replaces PyTorch's message about NumPy, which advises detach(): it has no derivative."""
    if str(error) == _NOT_CALLABLE:
        return 'expected calls only of gates with "product" in reads, got a call of a tensor'
    if isinstance(error, StopIteration):
        return "expected a function that returns, got StopIteration"
    of_numpy = "tensor.detach().numpy()" in str(error)
    return "expected torch functions instead of NumPy functions" if of_numpy else _of_sizes(error)


def _of_sizes(error: object) -> str:
    """Explains sizes in PyTorch's message."""
    text = str(error)
    hint = "; the function is traced with other sizes: use those of a tensor, as z.a.shape[-1]"
    return text + hint * (re.search(r"\bsize|\bshape", text) is not None)


def _calls_functions(results: Iterable[Tensor]) -> bool:
    """Returns True if the results depend on a torch.autograd.Function."""
    found, todo = set(), [x.grad_fn for x in results]
    while todo:
        if (node := todo.pop()) is not None and node not in found:
            applied = getattr(node, "_forward_cls", None)
            if applied is not None and not issubclass(applied, TracerFunction):
                return True
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return False


class _Detaching(TorchFunctionMode):
    """Records detach(), torch.no_grad() and gradient hooks of the function. It is a function mode,
    because autograd also calls aten::detach. PyTorch also checks some arguments before it calls an
    ATen operation."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        pure = [tracer.is_pure(x) for x in tensors]
        if True in pure and False in pure:
            target = args[: _is_in_place(getattr(func, "__name__", ""))]
            args, kwargs = tracer.derived_in((args[len(target) :], kwargs))
            args = (*target, *args)
        elif True in pure:
            value = tracer.known.get(args[0].data_ptr()) if func in _SIZES else None
            if isinstance(value, Value):
                return func(torch.empty(tracer.shape_in_a_step(value)), *args[1:], **kwargs)
            try:
                of_shape = func is layer_norm or getattr(func, "__name__", "") in _OF_SHAPE
                if of_shape or any(tracer.tape.name(x) for x in tensors):
                    return tracer.computed_once(func, args, kwargs)
                return self.called(func, args, kwargs)
            except (NoProgram, *_ERRORS):
                if func in _HOOKS or _is_in_place(getattr(func, "__name__", "")):
                    raise
                try:
                    results = tracer.computed_once(func, args, kwargs)
                    if any(isinstance(x, Tensor) for x in tree_leaves(results)):
                        return results
                except NoProgram as error:
                    if OF_PARAMETERS in str(error):
                        raise
                raise
        return self.called(func, args, kwargs)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        is_product = name.strip("_") in ("linear", "bilinear", "matmul", "rmatmul", "einsum")
        of_units = OVER_UNITS.get(func if func is layer_norm else name)
        if (of_units or name == "prelu") and self.tracer.knows((args, kwargs)):
            kwargs = {_OF_NUMPY.get(k, k): x for k, x in kwargs.items()}
            self.tracer.check_call(func, args, kwargs)
            return (of_units or _prelu)(self.tracer.proxy, *args, **kwargs)
        if (is_product or name.endswith("_norm")) and self.tracer.knows((args, kwargs)):
            why = NO_PRODUCT if is_product else ELEMENT_WISE
            self.tracer.fail(f"{why}, got {name.strip('_')}")
        result = func(*args, **kwargs)
        if func is torch._C._set_grad_enabled:
            self.tracer.without_grad = not args[0]
        if func in _HOOKS:
            self.tracer.hook(args[0])
        if func in _DETACHING:
            result = result.clone()  # to get another address
            if (value := self.tracer.known.get(result.data_ptr())) is not None:
                self.tracer.keep(result, apply("detach", value))
                self.tracer.detached.add(result.data_ptr())
        return result


_HOOKS = torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_DETACHING = torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__  # type: ignore[attr-defined]
# Functions of a shape, which parameters have without a batch.
_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.ndim.__get__, torch.Tensor.__len__}  # type: ignore[attr-defined]
_SIZES |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}
# Functions that could have another meaning for parameters with a batch, or another shape.
_OF_SHAPE = {"view", "view_as", "reshape", "reshape_as", "expand", "flatten", "ravel"}
_OF_SHAPE |= {name for name in OVER_UNITS if isinstance(name, str)}


def _is_in_place(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name[-1:] == "_" != name[-2:-1])


# PyTorch also accepts NumPy's names of arguments.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input"}


def _prelu(_: Tracer, input: Tensor, weight: Tensor) -> Tensor:
    """torch.prelu, which accepts no weight of another dtype or of the shape of input."""
    return torch.where(input > 0, input, weight * input)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Disables all modes of the caller."""
    eager: Any = contextlib.nullcontext()
    inside = torch.compiler.is_compiling()
    if "torch._dynamo" in sys.modules and not inside:
        try:  # the function may be or call a compiled function
            eager = torch.compiler.set_stance("force_eager")
        except RuntimeError:
            inside = True
    if inside:  # Dynamo of PyTorch 2.11 cannot trace `raise ... from None`
        message = "lltm::cell: expected cells to be created outside torch.compile"
        raise ArgumentError(message)
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager)
        stack.enter_context(temporarily_clear_interpreter_stack())  # vmap and other transforms
        stack.enter_context(_disable_current_modes())
        native: Any = torch._C
        for _ in range(native._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.callback(native._set_tracing_state, native._get_tracing_state())  # of torch.jit
        native._set_tracing_state(None)
        while hooks := native._autograd._top_saved_tensors_default_hooks(True):
            native._autograd._pop_saved_tensors_default_hooks()
            stack.callback(native._autograd._push_saved_tensors_default_hooks, *hooks)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            yield


def trace(
    function: Callable[..., Any], *, name: str | None = None, warn_at: int = 2, **declarations: Any
) -> Program:
    """Traces function(z, ...) into a cell program. `declarations` are arguments of lltm.cell.

    warn_at is the stacklevel of warnings. Raises TypeError, with the line, if the function uses
    an unsupported operation, or if an argument has a wrong type. Raises ArgumentError for wrong
    values and names.
    """
    where = str(getattr(function, "__name__", type(function).__name__)) if name is None else name
    program, names = declared(function, where, **declarations)
    check_gates(where, program.gates)
    with plain_torch():
        tracers = [
            Tracer(function, where, shape, value)
            for shape, value in zip(SHAPES, (0.5, -0.25), strict=True)
        ]
        made, again = [tracer.run(program, names) for tracer in tracers]
        same = made.written_out() == again.written_out()
        expect(same, where, _SAME, "" if same else _difference(*tracers))
        for message, line in tracers[0].warnings.items():
            warnings.warn(f"lltm::cell: {where}: {message}{line}", stacklevel=warn_at)
        return written(*with_derived(program, made, tracers))


def with_derived(
    program: Program, made: Expressions, tracers: Sequence[Tracer]
) -> tuple[Program, Expressions]:
    """Declares the derived parameters that the program uses, in place of their own parameters."""
    first, last = tracers
    order = needed([*made.products.values(), *made.results.values(), *made.gradients.values()])
    names = {first.graph[f"derived {k}"]: k for k in first.sources}
    used = {name: names[v] for name, v in made.inputs.items() if v in names and v in order}
    if not used:
        unused = {name for name, v in made.inputs.items() if v in names}
        return program, _without(made, unused)
    sizes, lines = (first.shape[1], last.shape[1]), list[Line]()
    for one, other in zip_longest(first.tape.lines, last.tape.lines, fillvalue="nothing []"):
        (op, args), (again, others) = (x.split(" ", 1) for x in (one, other))
        try:
            expect(op == again, program.name, _SAME, f"{op}, then {again}")
            arguments = merged(json.loads(args), json.loads(others), sizes)
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            expect(False, program.name, _SAME, f"{op} with {error}")
        lines.append(Line(first.tape.lines[one], op, arguments))
    lines = needed_lines(lines, used.values())
    derivation = Derivation(program.parameters, program.scalars, lines, used)
    inside = {p for name in used for p in derivation.of(name)}
    gone = {
        p
        for p in inside
        if made.inputs[p] not in order and not isinstance(made.gradients[f"d.{p}"], Value)
    }
    gone |= {name for name, v in made.inputs.items() if v in names and name not in used}
    parameters = {k: x for k, x in program.parameters.items() if k not in gone}
    parameters |= dict.fromkeys(used, math.nan)
    most = f"at most {MOST_PARAMETERS} parameters with derived ones"
    expect(len(parameters) <= MOST_PARAMETERS, program.name, most, ", ".join(parameters))
    singles = {name for name, k in used.items() if last.pure_tensors[last.graph[name]].numel() == 1}
    scalars = tuple(k for k in parameters if k in singles or k in program.scalars)
    program = replace(program, parameters=parameters, scalars=scalars, derivation=derivation)
    return program, _without(made, gone)


def _without(made: Expressions, names: set[str]) -> Expressions:
    inputs = {k: v for k, v in made.inputs.items() if k not in names}
    gradients = {k: x for k, x in made.gradients.items() if k.removeprefix("d.") not in names}
    return replace(made, inputs=inputs, gradients=gradients)


def call(
    function: Callable[..., Any], z: Mapping[str, Any], others: Mapping[str, Tensor]
) -> list[Tensor]:
    """Calls the function itself. Returns h' and the next states. `others` are by name.

    z[gate] of a gate that reads a product is a function of the operand.
    """
    result = _called(function, z, others)
    return [result] if isinstance(result, Tensor) else list(result)


def _called(
    function: Callable[..., Any], z: Mapping[str, Any], others: Mapping[str, Tensor]
) -> Any:
    _, *arguments = inspect.signature(function).parameters.values()
    positional = [a.name for a in arguments if a.kind < a.KEYWORD_ONLY]
    by_name = {a.name: others[a.name] for a in arguments if a.kind is a.KEYWORD_ONLY}
    if any(a.kind is a.VAR_KEYWORD for a in arguments):
        by_name = {k: x for k, x in others.items() if k not in ("h", *positional)}
    return function(Gates(z), *(others[name] for name in positional), **by_name)


def _difference(a: Tracer, b: Tracer) -> str:
    """Describes the first call that differs between a and b, with its line."""

    def said(call: Call) -> str:
        name, numbers, _ = call
        return " ".join([name, *["with"] * bool(numbers), ", ".join(map(str, numbers))]).strip()

    nothing: Call = ("nothing", [], "")
    pairs: Iterator[tuple[Call, Call]] = zip_longest(a.calls, b.calls, fillvalue=nothing)
    for one, other in pairs:
        if one[:2] != other[:2]:
            return f"{said(one)}, then {said(other)}{one[2] or other[2]}"
    return "different operations or numbers"
