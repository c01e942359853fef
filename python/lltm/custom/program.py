"""Cell programs: declarations, serialization, parsing, evaluation.

cpp/src/cell/program_text.h has the grammar.
"""

from __future__ import annotations

import inspect
import keyword
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .derived import Derivation
from .saved import choose_saved
from .values import CUTS, OPERATIONS, Expressions, Operand, Value, needed

# As in cpp/src/cell/cell.h and program_text.h. The parser checks the other limits.
MOST_STATES, MOST_PARAMETERS, MOST_GATES, MOST_BYTES, LONGEST_NAME = 4, 16, 12, 65_536, 64


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
    reads_h: bool  # True if the element-wise functions read h
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
        words: dict[str, list[list[str]]] = {}
        products = set[str]()
        for line in text.split("\n"):
            first, *rest = line.split(" ")
            if rest[:1] != ["="]:
                words.setdefault(first, []).append(rest)
            elif rest[1:2] == ["product"] and first.startswith("z."):
                products.add(first[2:])

        def numbers(key: str) -> dict[str, float]:
            return {name: float(value) for name, value, *_ in words.get(key, [])}

        keys = ("weight_ih", "weight_hh", "input", "no_bias", "output")
        gates_x, gates_h, gates_input, *others = [tuple(words.get(key, [[]])[0]) for key in keys]
        return Program(
            name=words["name"][0][0],
            gates=tuple(dict.fromkeys(chain(gates_x, gates_h, gates_input))),
            gates_x=gates_x,
            gates_h=gates_h,
            gates_input=gates_input,
            products=tuple(gate for gate in gates_h if gate in products),
            bounded="bounded" in words,
            reads_h="reads_h" in words,
            states=numbers("state"),
            parameters=numbers("parameter"),
            saved=tuple(words["save"][0]),
            own_gradient="own_gradient" in words,
            scalars=tuple(name for name, _, *rest in words.get("parameter", []) if rest),
            no_bias=others[0],
            outputs=others[1],
            text=text,
        )


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
) -> tuple[Program, list[str], list[str]]:
    """Returns the program without text, and the positional and keyword arguments after z."""
    reads, parameters = reads or {}, parameters or {}
    states, bias = {} if states is None else states, {} if bias is None else bias
    is_module = isinstance(function, torch.nn.Module)
    if is_module or isinstance(function, type) or not callable(function):
        got = f"the module {type(function).__name__}" if is_module else repr(function)
        raise TypeError(f"lltm::cell: expected a function or a bound method, got {got}")
    expect_type(reads, Mapping, where, "reads to be a dict")
    expect_type(states, (int, Mapping), where, "states to be an int or a dict")
    expect_type(parameters, Mapping, where, "parameters to be a dict")
    expect_type(bounded, bool, where, "bounded to be a bool")
    expect_type(bias, Mapping, where, "bias to be a dict")
    outputs = () if outputs is None else _words(outputs)
    kinds = () if isinstance(gates, str) else (int, Sequence)
    expect_type(gates, kinds, where, "gates to be an int or a sequence of names")
    count = gates if isinstance(gates, int) else len(gates)
    expect(1 <= count <= MOST_GATES, where, f"1 to {MOST_GATES} gates", count)
    gates = tuple(f"g{k}" for k in range(count)) if isinstance(gates, int) else tuple(gates)
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
    z, *arguments = signature
    for argument in signature:
        several = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        expect(not several, where, "named arguments", argument)
        no_default = argument.default is argument.empty
        expect(no_default, where, "no default (initial values: states=, parameters=)", argument)
    names = [argument.name for argument in arguments]
    is_z = z.name not in ("self", "cls") and z.kind is not z.KEYWORD_ONLY and "z" not in names
    got = f"({', '.join([z.name, *names])})"
    expect(is_z, where, "z, the gates, as the first argument of a function or bound method", got)
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
    scalars = tuple(name for name in names if isinstance(parameters.get(name), Scalar))
    initial = {k: x.initial if isinstance(x, Scalar) else x for k, x in parameters.items()}
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
        reads_h="h" in names,
        states={name: float(states.get(name, 0.0)) for name in state_names},
        parameters={
            name: x if callable(x) else float(x)
            for name, x in sorted(initial.items(), key=lambda item: names.index(item[0]))
        },
        scalars=scalars,
        no_bias=tuple(gate for gate in gates if not bias.get(gate, True)),
        outputs=outputs,
    )
    by_name = [a.name for a in arguments if a.kind is a.KEYWORD_ONLY]
    return program, [name for name in names if name not in by_name], by_name


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
    body = ["forward", *forward, " ".join(["save", *(names[v] for v in saved)])]
    body += ["backward", *backward, "end\n"]
    program = replace(program, text="\n".join(body), saved=tuple(names[v] for v in saved))
    # Samples cannot prove that a function's own gradient equals the derivative everywhere.
    own_gradient = made.own_gradient or _is_another(
        program, list(made.inputs), list(made.gradients)
    )
    has_cuts = any(line.split(" ")[2] in CUTS for line in (*forward, *backward))
    optional = {"input": program.gates_input, "no_bias": program.no_bias, "output": program.outputs}
    lines = [
        f"lltm-cell {2 if has_cuts or program.scalars or any(optional.values()) else 1}",
        f"name {program.name}",
        " ".join(["weight_ih", *program.gates_x]),
        " ".join(["weight_hh", *program.gates_h]),
        *(" ".join([key, *values]) for key, values in optional.items() if values),
        *["bounded"] * program.bounded,
        *["reads_h"] * program.reads_h,
        *["own_gradient"] * own_gradient,
        *(f"state {name} {initial!r}" for name, initial in program.states.items()),
        *(
            f"parameter {k} {math.nan if callable(x) else x!r}" + " scalar" * (k in program.scalars)
            for k, x in program.parameters.items()
        ),
        *body,
    ]
    return replace(program, text="\n".join(lines), own_gradient=own_gradient)


def gradients_of(y: Tensor, leaves: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Returns the derivatives of y, zero for leaves that it does not depend on."""
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return [*torch.autograd.grad(y, leaves, create_graph=create_graph, materialize_grads=True)]


def _is_another(program: Program, inputs: list[str], gradients: list[str]) -> bool:
    """Returns True if backward differs from forward's derivative at random inputs. The cause can be
    an in-place change under torch.no_grad()."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, 64, generator=generator, dtype=torch.float64)

    weights = {gate: draw(64) / 8 for gate in program.products}
    leaves = {name: draw().requires_grad_() for name in inputs}
    with torch.enable_grad():
        made = {**leaves, **evaluate(program.text, "forward", leaves, weights)}
        results = [made[f"{name}'"] for name in ("h", *program.states)]
        tangents = [draw() for _ in results]
        total = torch.stack([(y * t).sum() for y, t in zip(results, tangents, strict=True)]).sum()
        derived = gradients_of(total, [*leaves.values()])
    known = {name: made[name].detach() for name in (*program.saved, *program.parameters)}
    names = (f"d.{name}'" for name in ("h", *program.states))
    known |= dict(zip(names, tangents, strict=True))
    ours = evaluate(program.text, "backward", known, weights)
    return any(
        not torch.allclose(ours[f"d.{name}"], derivative, rtol=1e-6, atol=1e-9, equal_nan=True)
        for name, derivative in zip(leaves, derived, strict=True)
        if f"d.{name}" in gradients
    )


# ---- parsing and evaluation ---------------------------------------------------


def assignments(text: str, section: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields name, operation and operands of each assignment in forward or backward."""
    lines = text.splitlines()
    for line in lines[lines.index(section) + 1 :]:
        name, *words = line.split(" ")
        if words[:1] != ["="]:
            return
        yield name, words[1], words[2:]


def parts(lines: Iterable[str]) -> list[tuple[list[str], list[str]]]:
    """Divides assignments into element-wise parts. Returns for each part the products and means
    before it, and its assignments."""
    depth, divided = dict[str, int](), [(list[str](), list[str]())]
    for line in lines:
        name, _, op, *words = line.split(" ")
        depth[name] = k = max([0, *(depth.get(word, 0) for word in words)]) + (op in CUTS)
        divided += [([], [])] * (k == len(divided))
        divided[k][op not in CUTS].append(line)
    return divided


def evaluate(
    text: str,
    section: str,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Evaluates forward or backward with tensors by name. Returns the assigned values.

    weights are the recurrent weights (H, H) of gates that are products. Forward adds the products
    to the z of these gates in inputs.
    """
    values, assigned = dict(inputs), dict[str, Tensor]()
    shape = torch.broadcast_shapes(*(x.shape for x in inputs.values()))
    dtype = next(iter(inputs.values())).dtype
    for name, op, words in assignments(text, section):
        operands = [
            values[w] if w in values else torch.tensor(float(w), dtype=dtype) for w in words
        ]
        if op == "mean":
            result = operands[0].mean(-1, keepdim=True)
        elif op == "product" and section == "forward":
            result = values[name] + operands[0] @ (weights or {})[name.removeprefix("z.")].T
        elif op == "product":
            of = [(weights or {})[word.removeprefix("d.z.")] for word in words]
            result = torch.stack([x @ u for x, u in zip(operands, of, strict=True)]).sum(0)
        else:
            result = OPERATIONS[op](*operands)
        values[name] = assigned[name] = result.to(dtype).expand(shape)
    return assigned
