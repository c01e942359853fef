"""Custom cells: `lltm.cell` and `lltm.Cell`."""

from __future__ import annotations

import keyword
import os
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._C import ArgumentError
from ..reference import _EQUATIONS as BUILT_IN
from . import explanation
from .derived import Derivation
from .gates import check_gates
from .modules import (
    NAMES_IN_MODULES,
    CustomCell,
    CustomLayer,
    CustomPrepacked,
    Pickled,
    derived_attribute,
)
from .program import (
    MOST_BYTES,
    MOST_PARAMETERS,
    Parameters,
    Program,
    Reads,
    Scalar,
    _check_numbers,
    expect,
    expect_type,
    is_name,
)
from .trace import call, trace

Path = str | os.PathLike[str]


def cell(
    gates: int | Sequence[str],
    *,
    reads: Reads | None = None,
    states: int | Mapping[str, float] | None = None,
    parameters: Parameters | None = None,
    bounded: bool = False,
    bias: Mapping[str, bool] | None = None,
    outputs: Sequence[str] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Cell]:
    """Decorator that creates a custom recurrent cell from a Python function for one time step.

    The function ``function(z, *others)`` returns h', or ``(h', *states')``. z holds the
    gates' pre-activations, ``W_ih x + b_ih + W_hh h + b_hh``. Each other argument is, by its
    name, ``h`` (used element-wise), a parameter, or else a state. States have the order in which
    the function returns them and modules accept them.

    The function uses only the operations listed on the page about custom cells. They are
    element-wise, except for means and norms over the hidden units, such as
    ``v.mean(-1, keepdim=True)`` and :func:`lltm.layer_norm`, and products ``z.n(v)``. Functions of
    only parameters may use more operations, and are computed once a call. The function is called
    only here, for tracing. Layers run the traced operations and their derivatives between the
    GEMMs.

    Args:
        gates: number of gates, read as z[0], z[1], ..., or a sequence of their names, read as
            z["i"] or z.i. At most 16
        reads: dict with the terms of pre-activations, such as ``{"n_x": "x", "n_h": "h"}``, each
            a string or a tuple of strings. Default: ``("x", "h")`` for every gate

            - ``"x"``: ``W_ih x + b_ih``. The gate has rows in weight_ih
            - ``"h"``: ``W_hh h + b_hh``. The gate has rows in weight_hh
            - ``"product"`` instead of ``"h"``: the rows in weight_hh multiply a value of the step.
              The function calls the gate once: ``z.n(v)`` is ``W_ih x + b_ih + W_hh v + b_hh``.
              Gates called with the same value share a GEMM
            - ``"input"`` instead of ``"x"``: H columns of the input, without weights. The last
              columns of the input belong to these gates, in their order
        states: dict with initial values, or the number of states, as a check. At most 6 states.
            Default: 0 for each state
        parameters: dict with the learned parameters among the function's arguments, at most 16. A
            parameter has a value per hidden unit, and starts from a number, or from a function
            that fills a tensor (H) in place or returns it. With :func:`lltm.scalar` it has a single
            value. Default: none
        bounded: if True, declares that abs(h') <= 1, as ``prepack(torch.qint8)`` requires.
            Default: False
        bias: dict, False for gates without biases, such as ``{"m": False}``. They have no rows in
            bias_ih and bias_hh. Default: True for every gate
        outputs: names of h and states that a layer returns of each step, such as ``("h", "c")``:
            its output is then a tuple of tensors (T, B, D*H). The first is the input of the next
            layer. Default: h, not in a tuple
        name: name of the cell. Default: the function's name

    Returns:
        A decorator that returns a :class:`Cell`.

    Example::

        @lltm.cell(gates=("i", "o", "g"))
        def cifg(z, c):
            i, o, g = torch.sigmoid(z.i), torch.sigmoid(z.o), torch.tanh(z.g)
            c_next = (1 - i) * c + i * g
            return o * torch.tanh(c_next), c_next

        layer = cifg.Layer(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """
    options: dict[str, Any] = locals()
    if callable(gates):
        raise TypeError(
            "lltm::cell: expected gates to be an int or a sequence of names, as in"
            f" @lltm.cell(gates=3), got {gates!r}"
        )

    def make(function: Callable[..., Any]) -> Cell:
        if isinstance(function, Cell):
            raise TypeError(f"lltm::cell: expected a function or a bound method, got {function!r}")
        program = trace(function, **options, warn_at=3)
        made = Cell(program.text + program.derivation.text, parameters, function)
        made.gates = program.gates  # in the order of z
        return made

    return make


class Cell:
    """A custom recurrent cell, created by :func:`lltm.cell` or from a serialized cell.

    Args:
        text: serialized cell, as in the attributes ``serialized`` and ``text``
        initial (dict): initial values or functions for parameters, which replace the values in
            the serialized cell. Default: None
        function: Python function for a time step, for :mod:`lltm.testing`. Default: None

    Attributes:
        text (str): serialized cell, with the cell program. Operators accept it as the cell, with
            derived parameters as parameters
        serialized (str): text, and how modules compute derived parameters. Saved models contain it
            and therefore run without the function
        name (str): cell name
        gates (tuple[str, ...]): gate names
        states (tuple[str, ...]): state names, without h
        parameters (tuple[str, ...]): parameter names
        outputs (tuple[str, ...]): names of the values that a layer returns of each step; empty if h
        Layer (type): class for multi-layer modules, used like torch.nn.LSTM or, without states,
            torch.nn.GRU; see :class:`CustomLayer`
        Cell (type): class for single-step modules; see :class:`CustomCell`
    """

    def __init__(
        self,
        text: str,
        initial: Parameters | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(text, str):
            raise TypeError(f"lltm::cell: expected a serialized cell, got {reprlib.repr(text)}")
        if not text.startswith("lltm-cell "):
            why = "the name of a built-in cell" if text in BUILT_IN else "without 'lltm-cell' first"
            got = f"{reprlib.repr(text)}, {why}"
            raise ArgumentError(f"lltm::cell: expected a serialized cell, got {got}")
        # Parsers reject the escape of a character that is not ASCII.
        text, end, derived = (
            text.encode("ascii", "backslashreplace").decode().partition("\nend\nderived\n")
        )
        if end:
            text, derived = f"{text}\nend\n", f"derived\n{derived}"
        header = Program.read(text)
        learned = Derivation(header.parameters, header.scalars)
        if derived:
            learned = _derivation_of(header, text, derived)
        self.text, self.serialized, self.function = text, text + learned.text, function
        self.name, self.gates, self.outputs = header.name, header.gates, header.outputs
        self.states, self.parameters = tuple(header.states), tuple(learned.parameters)
        check_gates(self.name, self.gates)
        for parameter in (*self.parameters, *header.parameters):
            expected = "parameter names that are not names in modules and state_dicts"
            right = is_name(parameter) and not keyword.iskeyword(parameter)
            right = right and parameter not in NAMES_IN_MODULES
            expect(right, self.name, expected, repr(parameter))
        made = _checked(self.name, learned, {} if initial is None else initial)
        members = {
            "_CELL": text,
            "_HEADER": header,
            "_DERIVATION": learned,
            "_INITIAL": {**learned.parameters, **made},
            "_OUTPUTS": header.outputs,
            "__module__": getattr(function, "__module__", None) or __name__,
        }
        prepacked = _class_of(header, CustomPrepacked, "PrepackedLayer", members)
        of_layer = {"mode": self.name, "_PACKED": prepacked}
        if learned.results:
            members["__getattr__"] = derived_attribute
        self.Layer: type[CustomLayer] = _class_of(header, CustomLayer, "Layer", members | of_layer)
        self.Cell: type[CustomCell] = _class_of(header, CustomCell, "Cell", members)

    def save(self, path: Path) -> None:
        """Writes the serialized cell to the file ``path``, for :meth:`load` in Python and, without
        derived parameters, C++."""
        with open(os.fspath(path), "w", encoding="ascii", newline="\n") as file:
            file.write(self.serialized)

    @staticmethod
    def load(path: Path) -> Cell:
        """Reads a cell from the file ``path``, written by :meth:`save`."""
        with open(os.fspath(path), "rb") as file:
            text = file.read(MOST_BYTES + 1)  # exceeds the parser's limit by 1
        try:
            return Cell(text.decode("ascii", "backslashreplace"))
        except ArgumentError as error:
            why = str(error).removeprefix("lltm::cell: ").removeprefix("lltm::")
            got = f"the file {os.fspath(path)!r}, not a serialized cell: {why}"
            raise ArgumentError(f"lltm::cell: expected a serialized cell, got {got}") from None

    def explain(self) -> str:
        """Returns a report: interface, saved values, instructions and hints."""
        return "\n".join(explanation.sections(explanation.STAGES, self, self.name))

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        expected = f"a call of its class {self.name}.Layer or {self.name}.Cell"
        raise TypeError(f"lltm::cell: {self.name}: expected {expected}, got a call of the cell")

    def _called(self, z: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[Tensor]:
        """Calls the Python function. Returns h' and the next states. `others` are by name.

        z[gate] of a gate that reads a product is a function of its operand.
        """
        if self.function is None:
            raise ValueError(
                f"lltm::testing: expected a cell with its function, got {self!r} without function"
            )
        arguments = [{gate: z[gate] for gate in self.gates}, others]
        if not self.Layer._HEADER.own_gradient:
            return call(self.function, *arguments)

        def with_gradient(x: Any) -> Any:  # for hooks, which see only the gradient of this step
            return x.view_as(x).requires_grad_() if isinstance(x, Tensor) else x

        derives = torch.is_grad_enabled()
        with torch.enable_grad():
            arguments = [{k: with_gradient(x) for k, x in part.items()} for part in arguments]
            after = call(self.function, *arguments)
        return after if derives else [x.detach() for x in after]

    def __getstate__(self) -> Any:
        """Pickles the serialized cell without the function, like the modules of the cell."""
        state = {k: v for k, v in vars(self).items() if k not in ("function", "Layer", "Cell")}
        return state, _picklable(self.Layer._INITIAL)

    def __setstate__(self, state: Any) -> None:
        Cell.__init__(self, state[0]["serialized"], state[1])
        vars(self).update(state[0])

    def __copy__(self) -> Cell:
        return self

    def __deepcopy__(self, _: Any) -> Cell:
        return self

    def __repr__(self) -> str:
        return f"lltm.Cell({self.name!r}, gates={self.gates}, states={self.states})"


def _derivation_of(header: Program, text: str, derived: str) -> Derivation:
    """Reads the derived parameters that follow a text, and checks that they fit its header."""
    size = len(text + derived)
    expect(size <= MOST_BYTES, header.name, f"at most {MOST_BYTES} bytes", size)
    learned = Derivation.read(derived)
    count, most = len(learned.parameters), f"at most {MOST_PARAMETERS} parameters"
    expect(count <= MOST_PARAMETERS, header.name, most, count)
    known, names = {*learned.parameters, *learned.results}, {*header.parameters}
    right = {*learned.results} <= names <= known
    expect(right, header.name, f"parameters {', '.join(sorted(known))}", sorted(names))
    alike = {*header.scalars} - {*learned.results} == names & {*learned.scalars}
    expect(alike, header.name, f"scalars {', '.join(header.scalars)}", learned.scalars)
    learned.check(header.scalars)
    return learned


def _class_of(header: Program, base: Any, kind: str, members: Mapping[str, Any]) -> Any:
    """Returns a class of the modules of a cell."""
    where, states = f"{header.name}.{kind.removeprefix('Prepacked')}", ("h", *header.states)
    of_kind = {
        "_parameter_names": (*base._parameter_names, *header.parameters),
        "_STATES": states if kind == "Cell" else tuple(f"{name}_0" for name in states),
        "_where": where,
        "__init__": _renamed(base.__init__, where),
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduced_as(kind),
    }
    return type(f"{header.name}_{kind}", (base,), {**members, **of_kind})


def _renamed(function: Any, name: str) -> Any:
    """Returns a copy with another name, which Python shows in errors about arguments."""
    parts = function.__name__, function.__defaults__, function.__closure__
    copied = types.FunctionType(function.__code__, function.__globals__, *parts)
    for attribute in ("__annotations__", "__kwdefaults__", "__dict__"):
        setattr(copied, attribute, getattr(function, attribute))
    copied.__qualname__ = name
    return copied


def _checked(where: str, learned: Derivation, initial: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the initial values of parameters. Returns them without :class:`Scalar`."""
    names = ", ".join(learned.parameters) or "none"
    expect_type(initial, Mapping, where, "initial to be a dict")
    values = {k: x.initial if isinstance(x, Scalar) else x for k, x in initial.items()}
    for name, value in initial.items():
        expect(name in learned.parameters, where, f"parameters of the cell ({names})", repr(name))
        right = name in learned.scalars or not isinstance(value, Scalar)
        expect(right, where, f"{name} with a value per hidden unit", "lltm.scalar")
        if not isinstance(value, Pickled):
            _check_numbers(where, 0, {}, {name: values[name]})
    return values


def _picklable(initial: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, Pickled) or not callable(v) else Pickled(v)
        for k, v in initial.items()
        if v == v  # NaN: the function was not saved
    }


def _reduced_as(kind: str) -> Callable[..., Any]:
    """Returns the __reduce_ex__ method of a module of a cell. It pickles the serialized cell."""

    def reduce(self: Any, protocol: Any) -> Any:
        if "_CELL" not in vars(type(self)):  # a subclass, which pickle finds by its import path
            return object.__reduce_ex__(self, protocol)
        serialized = self._CELL + self._DERIVATION.text
        return _restore, (serialized, _picklable(self._INITIAL), kind), self.__getstate__()

    return reduce


def _restore(text: str, initial: Mapping[str, Any], kind: str) -> Any:
    made = Cell(text, initial)
    module = made.Layer._PACKED if kind == "PrepackedLayer" else getattr(made, kind)
    return module.__new__(module)
