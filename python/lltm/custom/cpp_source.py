"""Translates a serialized cell into a C++ cell definition like those in cpp/src/cell/."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..reference import _EQUATIONS as BUILT_IN
from .program import Program, assignments, expect
from .values import OPERATIONS

# Reserved names: C++ keywords, names in the cell definition, types that its struct would hide.
CPP = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
    char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
    constinit continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq
"""
OF_THE_DEFINITION = {"V", "z", "dh", "states", "dstates", "parameters", "saved", "math", "std"}
OF_THE_DEFINITION |= {"forward", "backward", "kSlots", "kSaved", "kCell", "kStates", "kParameters"}
OF_CELL_H = {"V", "CellInfo", "SlotRange", "StepForward", "StepBackward", "ProgramSizes"}
OF_CELL_H |= {"PageRegisters", "Program", "Op"}
FUNCTIONS = {op: op for op in OPERATIONS} | {f: f"logical_{f}" for f in ("and", "or", "not")}
INFIX = {"add": (1, "+"), "subtract": (1, "-"), "multiply": (2, "*"), "divide": (2, "/")}
UNARY, ATOM = 3, 4  # expression precedence
LONGEST = 40  # maximum length to inline


def cpp_source(text: str) -> str:
    """Returns a C++ cell definition that computes the same as the program.

    Built-in cells have no parameters and at most one state besides h, and with such a state they
    do not read h. Other cells use arrays and declare their result types. Raises ArgumentError for
    cells with products or means, which combine hidden units.
    """
    cell = _Cell(Program.read(text))
    steps = itertools.chain(assignments(text, "forward"), assignments(text, "backward"))
    cuts = [f"the product z.{gate}" for gate in cell.header.products]
    cuts += ["a mean over hidden units"] * any(op == "mean" for _, op, _ in steps)
    expected = "an element-wise step, as built-in cells have, for C++ source"
    expect(not cuts, cell.header.name, expected, " and ".join(cuts))
    forward, of_c = _forward(text, cell)
    backward, of_dc = _backward(text, cell)

    def d(names: Iterable[str]) -> str:
        return ", ".join(backward.known[f"d.{g}"] for g in names)

    h_next = forward.known["h'"]
    after = ", ".join(forward.known[f"{s}'"] for s in cell.states)
    kept = ", ".join(forward.known[value] for value in cell.header.saved)
    dz = d(f"z.{gate}" for gate in cell.slots)
    takes_p = ["const V (&parameters)[kParameters]"] * bool(cell.parameters)
    if cell.fits_cell_h:
        results = f"StepForward<{cell.name}, V>", f"StepBackward<{cell.name}, V>"
        takes_c, takes_dc = f"const V& {of_c}", [f"const V& {of_dc}"] * bool(cell.header.states)
        returned = [f"{after}, {{{kept}}}", f"{{{dz}}}, {d(cell.states)}"]
    else:
        results = "Forward<V>", "Backward<V>"
        takes_c, takes_dc = "const V (&states)[kStates]", ["const V (&dstates)[kStates]"]
        dp = f"{{{d(cell.parameters)}}}, " if cell.parameters else ""
        returned = [f"{{{after}}}, {{{kept}}}", f"{{{dz}}}, {dp}{{{d(cell.states)}}}"]
    takes_z, takes_saved = ["const V (&z)[kSlots]"], ["const V (&saved)[kSaved]"]
    lines = [
        *_head(cell),
        *_descriptor(cell),
        *([] if cell.fits_cell_h else _result_types(cell)),
        *_written(
            results[0],
            "forward",
            [*takes_z, takes_c, *takes_p],
            forward,
            f"{h_next}, {returned[0]}",
        ),
        "",
        *_written(
            results[1],
            "backward",
            [*takes_saved, *takes_p, "const V& dh", *takes_dc],
            backward,
            returned[1],
        ),
    ]
    return "\n".join([*lines, "};\n\n}  // namespace\n}  // namespace lltm\n"])


class _Cell:
    """Properties other than the arithmetic."""

    def __init__(self, header: Program) -> None:
        self.header = header
        self.name = _struct_name(header.name)
        x, h = header.gates_x, header.gates_h
        self.slots = [
            *(g for g in x if g not in h),
            *(g for g in x if g in h),
            *(g for g in h if g not in x),
            *(g for g in header.gates_input if g not in h),
        ]
        self.states = [*["h"] * (header.reads_h or not header.states), *header.states]
        self.parameters = list(header.parameters)
        # True if the types of cell.h suffice, as for built-in cells.
        self.fits_cell_h = not self.parameters and len(self.states) == 1 and not header.gates_input


def _forward(text: str, cell: _Cell) -> tuple[_Function, str]:
    """Also returns the name of the state of a cell that fits cell.h."""
    function, of_c = _Function(), ""
    function.known |= {f"z.{gate}": f"z[{k}]" for k, gate in enumerate(cell.slots)}
    if cell.fits_cell_h:
        of_c = function.name(cell.states[0])
    else:
        for k, state in enumerate(cell.states):
            function.bind(state, f"states[{k}]")
    for k, parameter in enumerate(cell.parameters):
        function.bind(parameter, f"parameters[{k}]")
    own_states = ("h", *cell.header.states)
    function.add(text, "forward", {f"{s}'": f"{s}_next" for s in own_states})
    return function, of_c


def _backward(text: str, cell: _Cell) -> tuple[_Function, str]:
    """Also returns the name of the gradient of the next state or states."""
    function, of_dc = _Function(), "dstates"
    function.known["d.h'"] = "dh"
    if cell.fits_cell_h and cell.header.states:
        of_dc = function.name("d of it", f"d{cell.states[0]}_next")
    for k, state in enumerate(cell.states):
        gradient = of_dc if cell.fits_cell_h else f"{of_dc}[{k}]"
        if state != "h":
            function.known[f"d.{state}'"] = gradient
        elif not cell.fits_cell_h:  # h is also in the array of states: its gradient has two parts
            function.statements.append(f"const V {function.name(DH, 'd')} = dh + {gradient};")
    for k, parameter in enumerate(cell.parameters):
        function.bind(parameter, f"parameters[{k}]")
    for k, value in enumerate(cell.header.saved):
        function.bind(value, f"saved[{k}]")
    gradients = [*(f"z.{gate}" for gate in cell.slots), *cell.parameters, *cell.states]
    function.add(text, "backward", {f"d.{g}": "d" + g.replace(".", "_") for g in gradients})
    function.known.setdefault("d.h", "V(0)")  # if the function does not read h
    return function, of_dc


def _head(cell: _Cell) -> list[str]:
    header = cell.header
    sizes = {"kSlots": cell.slots, "kSaved": header.saved}
    if not cell.fits_cell_h:
        sizes["kStates"] = cell.states
        if cell.parameters:
            sizes["kParameters"] = cell.parameters
    return [
        f"// {header.name}, generated by lltm.cell from a Python function.",
        *([] if cell.fits_cell_h else NOT_BUILT_IN),
        *(f"// Initial value of {s}: {v!r}." for s, v in header.states.items() if v != 0),
        '#pragma once\n\n#include "cell/definition.h"\n',
        f"namespace lltm {{\nnamespace {{\n\nstruct {cell.name} {{",
        *(f"  static constexpr int {k} = {len(v)};  // {', '.join(v)}" for k, v in sizes.items()),
    ]


def _descriptor(cell: _Cell) -> list[str]:
    """The lines of kCell (cell.h)."""
    header, slots, x, h = cell.header, cell.slots, cell.header.gates_x, cell.header.gates_h
    from_input, outputs = header.gates_input, header.outputs
    more = [cell.states.index(name) for name in outputs if name != "h"]

    def blocks(gates: Sequence[str], first: int = 0) -> list[int]:
        return [first + gates.index(gate) if gate in gates else first - 1 for gate in slots]

    def bits(names: Sequence[str], all_names: Sequence[str]) -> int:
        return sum(1 << k for k, name in enumerate(all_names) if name in names)

    def quoted(names: Iterable[str]) -> list[str]:
        return [f'"{name}"' for name in names]

    members: dict[str, Any] = {"name": f'"{header.name}"'}
    members["id"] = f"{len(BUILT_IN)}"  # index in Cells (cells.h)
    members |= {"slots": "kSlots", "saved": "kSaved"}
    members |= {"x": [0, len(x)], "h": [len({*x} - {*h}), len({*x, *h})]}
    members |= {"x_blocks": blocks(x), "h_blocks": blocks(h), "states": f"{len(header.states)}"}
    members |= {"reads_h": str("h" in cell.states).lower(), "parameters": len(cell.parameters)}
    members["bounded"] = str(header.bounded).lower()
    members["custom_gradient"] = header.own_gradient and "true"
    members |= {"given": len(from_input), "given_blocks": from_input and blocks(from_input, 1)}
    members |= {"outputs": len(more), "output_states": more}
    modules: dict[str, Any] = {"layer_class": f'"{cell.name}"'}
    modules["step_class"] = f'"{cell.name}Cell"'
    modules |= {"state_names": quoted(header.states), "parameter_names": quoted(cell.parameters)}
    modules |= {"scalars": bits(header.scalars, cell.parameters)}
    modules |= {"without_bias": bits(header.no_bias, slots)}
    modules["output_of_h"] = more and (outputs.index("h") if "h" in outputs else -1)
    members["modules"] = "{\n" + _initializers(modules, " " * 10) + "}"
    return ["  static constexpr CellInfo kCell = {", _initializers(members, " " * 6) + "};\n"]


def _initializers(members: dict[str, Any], indent: str) -> str:
    """Designated initializers of members, except empty values and zeros."""
    lines = []
    for name, value in members.items():
        text = f"{{{', '.join(map(str, value))}}}" if isinstance(value, list) else value
        lines += [f"{indent}.{name} = {text}"] * bool(value)
    return ",\n".join(lines)


def _result_types(cell: _Cell) -> list[str]:
    return [
        "  template <typename V>",
        "  struct Forward {",
        "    V h, states[kStates];",
        "    V saved[kSaved];",
        "  };",
        "  template <typename V>",
        "  struct Backward {",
        "    V dz[kSlots];",
        *["    V dparameters[kParameters];"] * bool(cell.parameters),
        "    V dstates[kStates];",
        "  };\n",
    ]


DH = "d.h'"
NOT_BUILT_IN = [
    "// Built-in cells have no parameters or given gates, and at most one state in addition to h.",
    "// A cell with such a state does not read h. To build this cell in, extend the engines.",
]


def _struct_name(name: str) -> str:
    camel = "".join(word[0].upper() + word[1:] for word in name.split("_") if word)
    return camel if camel[:1].isalpha() and camel not in OF_CELL_H else f"Cell{camel}"


def _written(
    result: str, name: str, takes: Sequence[str], function: _Function, returned: str
) -> list[str]:
    head, arguments = f"  static LLTM_CELL_INLINE {result} {name}(", ", ".join(takes) + ") {"
    if len(head + arguments) > 100:
        head += "\n      "
    if 6 + len(arguments) > 100:
        arguments = arguments.replace(", ", ",\n      ")
    statements = [*function.bound, *function.statements, f"return {{{returned}}};"]
    fill = textwrap.TextWrapper(
        98, initial_indent="    ", subsequent_indent="        ", break_long_words=False
    )
    fill.break_on_hyphens = False
    return [
        "  template <typename V>",
        head + arguments,
        "    using namespace math;",
        *(fill.fill(statement) for statement in statements),
        "  }",
    ]


class _Function:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}  # C++ variables by serialized name
        self.bound: list[str] = []  # argument declarations
        self.statements: list[str] = []
        self.used = {*CPP.split()} | OF_THE_DEFINITION | set(FUNCTIONS.values())
        # Inlined expressions, with their precedence.
        self.inlined: dict[str, tuple[int, str]] = {}

    def name(self, value: str, wanted: str | None = None) -> str:
        stem = wanted or value
        names = (stem + "_" * k for k in itertools.count())
        self.known[value] = next(n for n in names if n not in self.used)
        self.used.add(self.known[value])
        return self.known[value]

    def bind(self, value: str, place: str) -> None:
        wanted = value.replace(".", "_").replace("'", "_next")
        self.bound.append(f"const V& {self.name(value, wanted)} = {place};")

    def add(self, text: str, section: str, results: Mapping[str, str]) -> None:
        lines = list(assignments(text, section))
        uses = Counter(itertools.chain.from_iterable(operands for _, _, operands in lines))
        final = {*results, *(Program.read(text).saved if section == "forward" else ())}
        for value, op, operands in lines:
            level, expression = self.expression(op, operands)
            inline = re.fullmatch(r"t\d+", value) and uses[value] == 1 and value not in final
            if inline and len(expression) <= LONGEST:
                self.inlined[value] = level, expression
            elif not uses[value] and value not in final:
                continue
            elif op == "copy" and operands[0] in self.known and value in results:
                self.known[value] = self.known[operands[0]]
            else:
                name = self.name(value, results.get(value))
                self.statements.append(f"const V {name} = {expression};")

    def operand(self, word: str, level: int = 0) -> str:
        """Operand of an expression with this precedence."""
        if word in self.known:
            return self.known[word]
        if word in self.inlined:
            level_of_it, expression = self.inlined[word]
            return expression if level_of_it >= level else f"({expression})"
        number = float(word)
        if math.isinf(number):
            return f"V({'-' if number < 0 else ''}__builtin_inf())"
        return f"V({int(number) if number.is_integer() and abs(number) < 1e9 else word})"

    def expression(self, op: str, operands: Sequence[str]) -> tuple[int, str]:
        if op == "copy":
            return ATOM, self.operand(operands[0], ATOM)
        if op == "negate":
            return UNARY, f"-{self.operand(operands[0], ATOM)}"
        if op in INFIX:
            level, sign = INFIX[op]
            a, b = self.operand(operands[0], level), self.operand(operands[1], level + 1)
            # An integer needs no type if the other operand has one.
            if operands[1] in self.known or operands[1] in self.inlined:
                a = re.sub(r"^V\((\d+)\)$", r"\1", a)
            else:
                b = re.sub(r"^V\((\d+)\)$", r"\1", b)
            return level, f"{a} {sign} {b}"
        words = [self.operand(word) for word in operands]
        # As lltm.h writes ELU's derivative.
        sign_of = re.fullmatch(r"greater\((\w+), V\((\d+)\)\)", words[0])
        if op == "where" and words[1] == "V(1)" and sign_of:
            words[:2] = [f"{sign_of[1]} > {sign_of[2]}", "1"]
        return ATOM, f"{FUNCTIONS[op]}({', '.join(words)})"
