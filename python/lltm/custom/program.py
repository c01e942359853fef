"""Cell programs: declarations, serialization.

cpp/src/cell/program_text.h has the grammar.
"""

from __future__ import annotations

import inspect
import keyword
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .derived import Derivation
from .saved import choose_saved
from .values import CUTS, OPERATIONS, Expressions, Operand, Value, needed

# The parser checks the other limits.
MOST_STATES, MOST_PARAMETERS, MOST_GATES, MOST_BYTES, LONGEST_NAME = torch.ops.lltm._limits()


@dataclass(frozen=True)
class Scalar:
    """A parameter with one value for all hidden units; see :func:`lltm.scalar`."""

    initial: float | Callable[[Tensor], Any]


Initial = float | Callable[[Tensor], Any]
Parameters = Mapping[str, Initial | Scalar]
SOURCES = ("x", "h", "product", "input")  # the terms of a pre-activation
Reads = Mapping[str, str | Sequence[str]]


def expect(right: bool, where: str, expected: str, got: object) -> None:
    _check.expect(right, f"cell: {where}", expected, got)


def expect_type(value: object, kind: type | tuple[type, ...], where: str, expected: str) -> None:
    """Checks a type. A bool is not accepted as a number."""
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _check.expect(right, f"cell: {where}", expected, repr(value), TypeError)


# ---- declarations -----------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A cell program: its serialized form, and the declarations in its header."""

    name: str
    gates: tuple[str, ...]  # in the order of z
    gates_x: tuple[str, ...]  # the gates that depend on x, in the order of weight_ih
    gates_h: tuple[str, ...]
    bounded: bool
    states: Mapping[str, float]  # initial values
    parameters: Mapping[str, Initial]  # initial values, or functions that fill a tensor
    gates_input: tuple[str, ...] = ()  # the gates that read columns of the input as they are
    products: tuple[str, ...] = ()  # the gates of gates_h that multiply another value than h
    saved: tuple[str, ...] = ()
    own_gradient: bool = False  # True if backward may differ from forward's derivative
    scalars: tuple[str, ...] = ()  # the parameters with one value
    no_bias: tuple[str, ...] = ()  # the gates without biases
    outputs: tuple[str, ...] = ()  # values of each step that a layer returns; empty: h
    text: str = ""
    derivation: Derivation = field(default_factory=lambda: Derivation({}))

    @property
    def reads(self) -> dict[str, tuple[str, ...]]:
        """Terms of each gate's pre-activation."""
        of_h = {*self.gates_h}.difference(self.products)
        by_source = {"x": self.gates_x, "h": of_h, "product": self.products}
        by_source["input"] = self.gates_input
        return {g: tuple(k for k, gates in by_source.items() if g in gates) for g in self.gates}

    @staticmethod
    def read(text: str) -> Program:
        """Returns the declarations of a serialized cell, which it checks."""
        op = torch.ops.lltm._header.default
        declared = zip(op._schema.returns, _check.call(op, text), strict=True)
        header: dict[str, Any] = {
            x.name: tuple(value) if isinstance(value, list) else value for x, value in declared
        }
        of_gates = chain(header["gates_x"], header["gates_h"], header["gates_input"])
        return Program(gates=tuple(dict.fromkeys(of_gates)), text=text, **header)


def scalar(initial: float | Callable[[Tensor], Any] = 0.0) -> Scalar:
    """Declares a parameter of a custom cell that has one value, of shape (1), for all hidden units.

    Args:
        initial: initial value, or a function that fills a tensor (1) in place or returns it.
            Default: 0

    Example::

        @lltm.cell(gates=("n",), parameters={"alpha": lltm.scalar(0.1)})
        def leaky(z, h, alpha):
            return h + alpha * (torch.tanh(z.n) - h)
    """
    return Scalar(initial)


def is_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and len(name) <= LONGEST_NAME
        and name not in ("inf", "nan")
    )


def _words(source: Any) -> tuple[Any, ...]:
    return tuple(source) if isinstance(source, (tuple, list)) else (source,)


def _check_names(
    where: str,
    gates: Sequence[str],
    names: Sequence[str],
    reads: Reads,
    states: Mapping[str, float],
    parameters: Parameters,
) -> None:
    """Checks the names of the cell, its gates and the arguments of its function."""
    rule = f"a name of at most {LONGEST_NAME} ASCII letters, digits and _, not inf or nan"
    expect(where != "<lambda>", where, "name= for a function without a name", "a lambda")
    expect(is_name(where), where, f"{rule} (name= overrides it)", repr(where))
    for known in (gates, names):
        for k, checked in enumerate(known):
            expect(is_name(checked), where, rule, repr(checked))
            expect(checked not in known[:k], where, "different names", repr(checked))
    for gate, source in reads.items():
        expect(gate in gates, where, f"reads of gates ({', '.join(gates)})", repr(gate))
        words = _words(source)
        expected = f'"x", "h", "product", "input" or a tuple of these in reads of {gate}'
        expect(bool(words) and all(w in SOURCES for w in words), where, expected, repr(source))
        for one, other in (("x", "input"), ("h", "product")):
            both = one in words and other in words
            expect(not both, where, f'"{one}" or "{other}" in reads of {gate}', "both")
    some = any({"x", "input"} & {*_words(reads.get(gate, "x"))} for gate in gates)
    expect(some, where, "a gate that reads x or input", f"reads={dict(reads)}")
    for name in (*states, *parameters):
        there = name in names and name != "h"
        got = f"{name!r}: its arguments are ({', '.join(names)})"
        expect(there, where, "states and parameters that are arguments of the function", got)
        both = name in states and name in parameters
        expect(not both, where, "a state or a parameter", f"{name!r} as both")


def _check_outputs(
    where: str,
    gates: Sequence[str],
    states: Sequence[str],
    bias: Mapping[str, bool],
    outputs: Sequence[Any],
) -> None:
    for gate, value in bias.items():
        expect(gate in gates, where, f"bias of gates ({', '.join(gates)})", repr(gate))
        expect_type(value, bool, where, f"bias of {gate} to be a bool")
    known = ("h", *states)
    for k, name in enumerate(outputs):
        right = name in known and name not in outputs[:k]
        expect(right, where, f"outputs, each once, from {', '.join(known)}", repr(name))


def _check_numbers(
    where: str, count: int, states: Mapping[str, float], parameters: Mapping[str, Initial]
) -> None:
    """Checks the number of states (`count`) and parameters, and the initial values."""
    expect(count <= MOST_STATES, where, f"at most {MOST_STATES} states", count)
    most = f"at most {MOST_PARAMETERS} parameters"
    expect(len(parameters) <= MOST_PARAMETERS, where, most, len(parameters))
    for name, initial in (*states.items(), *parameters.items()):
        if name in states or not callable(initial):
            expect_type(initial, numbers.Real, where, f"a number as the initial value of {name}")
            expect(initial == initial, where, f"an initial value of {name}", initial)
            largest = sys.float_info.max
            fits = not isinstance(initial, int) or -largest <= initial <= largest
            expect(fits, where, f"an initial value of {name} in the range of float", "a larger int")


def _arguments(function: Callable[..., Any], where: str, parameters: Parameters) -> list[str]:
    """Returns the names of the arguments after z; `**p` stands for parameters without one."""
    try:
        signature = [*inspect.signature(function).parameters.values()]
    except ValueError:  # a built-in function
        signature = []
    expected = "a function of z, h, states and parameters"
    expect(bool(signature), where, expected, f"{function!r} without named arguments")
    if signature[1:] and signature[-1].kind is inspect.Parameter.VAR_KEYWORD:
        others = [name for name in parameters if name not in {a.name for a in signature}]
        for x in others:
            right = is_name(x) and not keyword.iskeyword(x)
            expect(right, where, "parameter names that are Python identifiers", repr(x))
        signature[-1:] = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in others]
    for argument in signature:
        several = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        expect(not several, where, "named arguments", argument)
        no_default = argument.default is argument.empty
        expect(no_default, where, "no default (initial values: states=, parameters=)", argument)
    z, *names = [argument.name for argument in signature]
    is_z = z not in ("self", "cls") and signature[0].kind is not inspect.Parameter.KEYWORD_ONLY
    got = f"({', '.join([z, *names])})"
    expected = "z, the gates, as the first argument of a function or bound method"
    expect(is_z and "z" not in names, where, expected, got)
    return names


def declared(
    function: Callable[..., Any],
    where: str,
    *,
    gates: int | Sequence[str],
    reads: Reads | None = None,
    states: int | Mapping[str, float] | None = None,
    parameters: Parameters | None = None,
    bounded: bool = False,
    bias: Mapping[str, bool] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[Program, list[str]]:
    """Returns the program without text, and the names of the arguments after z."""
    reads, parameters = reads or {}, parameters or {}
    states, bias = {} if states is None else states, {} if bias is None else bias
    is_module = isinstance(function, torch.nn.Module)
    if is_module or isinstance(function, type) or not callable(function):
        got = f"the module {type(function).__name__}" if is_module else repr(function)
        raise TypeError(f"lltm::cell: expected a function or a bound method, got {got}")
    kinds = () if isinstance(gates, str) else (int, Sequence)
    for value, kind, expected in (
        (reads, Mapping, "reads to be a dict"),
        (states, (int, Mapping), "states to be an int or a dict"),
        (parameters, Mapping, "parameters to be a dict"),
        (bounded, bool, "bounded to be a bool"),
        (bias, Mapping, "bias to be a dict"),
        (gates, kinds, "gates to be an int or a sequence of names"),
    ):
        expect_type(value, kind, where, expected)
    outputs = () if outputs is None else _words(outputs)
    count = gates if isinstance(gates, int) else len(gates)
    expect(1 <= count <= MOST_GATES, where, f"1 to {MOST_GATES} gates", count)
    gates = tuple(f"g{k}" for k in range(count)) if isinstance(gates, int) else tuple(gates)
    names = _arguments(function, where, parameters)
    state_names = [name for name in names if name != "h" and name not in parameters]

    if isinstance(states, int):
        found = f"{len(state_names)} in its arguments ({', '.join(names)})"
        expect(states == len(state_names), where, f"{states} states", found)
        states = dict.fromkeys(state_names, 0.0)
    for name in {*state_names} & {"x", "input", "t"} - {*states}:
        # The name does not say that it is a state, and the function has no such argument.
        expected = f"the input only in z, and states={{{name!r}: 0}} if {name} is a state"
        expect(False, where, expected, f"an argument {name}")
    _check_names(where, gates, names, reads, states, parameters)
    _check_outputs(where, gates, state_names, bias, outputs)
    given = {name: parameters[name] for name in names if name in parameters}
    initial = {k: x.initial if isinstance(x, Scalar) else x for k, x in given.items()}
    _check_numbers(where, len(state_names), states, initial)

    def reading(*sources: str) -> tuple[str, ...]:
        default = ("x", "h")
        return tuple(g for g in gates if not {*sources}.isdisjoint(_words(reads.get(g, default))))

    program = Program(
        name=where,
        gates=gates,
        gates_x=reading("x"),
        gates_h=reading("h", "product"),
        gates_input=reading("input"),
        products=reading("product"),
        bounded=bounded,
        states={name: float(states.get(name, 0.0)) for name in state_names},
        parameters={k: x if callable(x) else float(x) for k, x in initial.items()},
        scalars=tuple(k for k, x in given.items() if isinstance(x, Scalar)),
        no_bias=tuple(gate for gate in gates if not bias.get(gate, True)),
        outputs=outputs,
    )
    return program, names


# ---- serialization ----------------------------------------------------------

RESERVED = {*OPERATIONS, "z", "h", "inf", "nan", "forward", "save", "backward", "end"}


def _assignments(
    results: Mapping[str, Operand],
    known: Mapping[Value, str],
    others: Sequence[Value],
    taken: set[str],
) -> tuple[list[str], dict[Value, str]]:
    """Returns lines that compute results and others from known values, and all value names."""
    names = dict(known)
    for name, result in results.items():
        if isinstance(result, Value):
            names.setdefault(result, name)
    order = needed([*results.values(), *others], known)
    used, hints, lines = taken | set(names.values()), {v.name for v in order}, list[str]()
    copied = set[str]()

    def copy(name: str) -> None:
        result = results[name]
        if name not in copied and not (isinstance(result, Value) and names[result] == name):
            copied.add(name)
            lines.append(f"{name} = copy {text(result)}")

    def text(operand: Operand) -> str:
        return names[operand] if isinstance(operand, Value) else repr(operand)

    for v in order:
        if v not in names:
            # Uses the name of the user's local variable, if it is free.
            stems = [n for n in (v.name, f"{v.name}_", f"{v.name}__") if v.name and is_name(n)]
            numbered = (f"t{k}" for k in count(1) if f"t{k}" not in hints)
            names[v] = next(n for n in chain(stems, numbered) if n not in used)
            used.add(names[v])
        gradients = [f"d.z.{gate}" for gate in v.gates]
        for name in gradients:
            copy(name)
        lines.append(" ".join([names[v], "=", v.op, *(gradients or map(text, v.args))]))
    for name in results:
        copy(name)
    return lines, names


def written(program: Program, made: Expressions) -> Program:
    """Returns the program with its serialized form."""
    parameters = {made.inputs[name] for name in program.parameters}
    taken, products = RESERVED | set(made.inputs), made.products
    inputs = {v: name for name, v in made.inputs.items() if name not in products}
    saved = choose_saved(made, parameters)
    forward, names = _assignments(products | made.results, inputs, saved, taken)
    known = {v: names[v] for v in (*saved, *parameters)}
    known |= {v: name for name, v in made.tangents.items()}
    backward, _ = _assignments(made.gradients, known, (), taken)
    has_cuts = any(line.split(" ")[2] in CUTS for line in (*forward, *backward))
    optional = {"input": program.gates_input, "no_bias": program.no_bias, "output": program.outputs}
    lines = [
        f"lltm-cell {2 if has_cuts or program.scalars or any(optional.values()) else 1}",
        f"name {program.name}",
        " ".join(["weight_ih", *program.gates_x]),
        " ".join(["weight_hh", *program.gates_h]),
        *(" ".join([key, *values]) for key, values in optional.items() if values),
        *["bounded"] * program.bounded,
        *["reads_h"] * ("h" in made.inputs),
    ]
    others = [
        *(f"state {name} {initial!r}" for name, initial in program.states.items()),
        *(
            f"parameter {k} {math.nan if callable(x) else x!r}" + " scalar" * (k in program.scalars)
            for k, x in program.parameters.items()
        ),
        *("forward", *forward, " ".join(["save", *(names[v] for v in saved)])),
        *("backward", *backward, "end\n"),
    ]
    program = replace(program, saved=tuple(names[v] for v in saved))
    derivative = replace(program, text="\n".join([*lines, *others]))
    # Samples cannot prove that a function's own gradient equals the derivative everywhere.
    if not (made.own_gradient or _is_another(derivative)):
        return derivative
    return replace(program, text="\n".join([*lines, "own_gradient", *others]), own_gradient=True)


def gradients_of(y: Tensor, leaves: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Returns the derivatives of y, zero for leaves that it does not depend on."""
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return [*torch.autograd.grad(y, leaves, create_graph=create_graph, materialize_grads=True)]


def _is_another(program: Program) -> bool:
    """Returns True if backward differs from forward's derivative at random inputs. The cause can be
    an in-place change under torch.no_grad()."""
    generator = torch.Generator().manual_seed(0)
    gates_x, gates_h, states = map(len, (program.gates_x, program.gates_h, program.states))
    units, columns = 64, (gates_x > 0) + len(program.gates_input)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    rows_x, rows_h = gates_x * units, gates_h * units
    leaves = [
        draw(1, columns * units),  # input
        draw(1, units),
        draw(1, states * units) if states else None,
        *(draw(rows_x, units * (rows_x > 0)) / 8, draw(rows_h, units) / 8),
        *(draw(rows_x + len(program.parameters) * units), draw(rows_h)),
    ]
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    args = program.text, *leaves, None, False, None, 0, None
    # In ATen operations, which autograd can differentiate. A function mode would lose the key.
    key, ops = torch._C.DispatchKey.CompositeExplicitAutograd, torch.ops.lltm
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        forward = partial(ops.sequence_forward.default._op_dk, key)
        output, h, c, saved = _check.call(forward, *args)
        dh, dc = draw(*h.shape), draw(*c.shape)
        total = (h * dh).sum() + (c * dc).sum()
        expected = iter(gradients_of(total, [x for x in leaves if x is not None]))
    with torch.no_grad(), torch._C.DisableTorchFunction():
        gradients = None, dh, dc if states else None, [True] * len(leaves)
        ours = ops.sequence_backward.default._op_dk(key, *args, output, saved, *gradients)
    return any(
        not torch.allclose(gradient, next(expected), rtol=1e-6, atol=1e-9, equal_nan=True)
        for gradient, x in zip(ours, leaves, strict=True)
        if x is not None
    )
