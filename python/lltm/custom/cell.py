"""Cells that a user has written: `lltm.cell` and `lltm.Cell`."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._C import ArgumentError
from . import explanation
from .cpp_source import cpp_source
from .modules import MEMBERS, CustomCell, CustomLayer, CustomPrepacked, Pickled
from .program import Program
from .trace import call, trace

Initial = float | Callable[[Tensor], object]
Path = str | os.PathLike[str]


def cell(
    gates: int | Sequence[str],
    *,
    reads: Mapping[str, str] | None = None,
    states: int | Mapping[str, float] | None = None,
    parameters: Mapping[str, Initial] | None = None,
    bounded: bool = False,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Cell]:
    """Makes a cell of a function of tensors; a decorator.

    The function is called as ``function(z, *others)``: z has the pre-activations of the gates,
    ``W_ih x + W_hh h + b``, and returns h', or ``(h', *states')``. It computes element by element,
    with the operations that the page "Your own cell" lists. It is called here alone, to be traced:
    what runs is a program of its operations and of their derivative, between the matrix products.

    Args:
        gates: how many gates, z[0], z[1], ...; or their names, z["i"] or z.i
        reads: gates that have only a part from x or from h, such as ``{"n_x": "x", "n_h": "h"}``;
            they have rows in weight_ih or in weight_hh alone
        states: initial values of states, 0 for those that are not named here; or how many there
            are, to be checked
        parameters: of those of the function's arguments that are parameters, learned, one number a
            unit: the initial value, or a function of a tensor (H) that fills or returns one
        bounded: promises abs(h') <= 1, which ``prepack(torch.qint8)`` needs
        name: of the cell; by default the function's

    The function's arguments after z are, by their names, ``h`` (h itself, element by element),
    parameters, or else states, in the order in which the function returns and modules take them.

    Example::

        @lltm.cell(gates=("i", "o", "g"))
        def cifg(z, c):
            i, o, g = torch.sigmoid(z.i), torch.sigmoid(z.o), torch.tanh(z.g)
            c_next = (1 - i) * c + i * g
            return o * torch.tanh(c_next), c_next

        layer = cifg.Layer(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """
    if callable(gates):
        raise TypeError(
            "lltm::cell: expected gates to be an int or a sequence of names, as in"
            f" @lltm.cell(gates=3), got {gates!r}"
        )

    def make(function: Callable[..., Any]) -> Cell:
        program = trace(
            function,
            gates=gates,
            reads=reads,
            states=states,
            parameters=parameters,
            bounded=bounded,
            name=name,
            warn_at=3,
        )
        made = Cell(program.text, parameters, function)
        made.gates = program.gates  # in the order of z
        return made

    return make


class Cell:
    """A recurrent cell that a user has written; made by :func:`lltm.cell` or from a text.

    Attributes:
        text: the cell's program; what the operators take as the name of the cell, and what
            saved models carry, so that they run where the function is not
        name, gates, states, parameters: the names that the text gives
        Layer: layers of this cell over sequences, used like torch.nn.LSTM or, without states,
            torch.nn.GRU
        Cell: one step of it, likewise
    """

    def __init__(
        self,
        text: str,
        initial: Mapping[str, Initial] | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(text, str):
            raise TypeError(f"lltm::cell: expected the text of a cell, got {text!r}")
        try:
            torch.ops.lltm._cell(text)  # checks it
        except ValueError as error:
            raise _check.of_operator(error) from None
        if "\n" not in text:
            raise ArgumentError(
                f"lltm::cell: expected the text of a cell, got {text!r}, the name of a built-in one"
            )
        self.text = text
        self.function = function
        header = Program.read(text)
        self.name = header.name
        self.gates = header.gates
        self.states = tuple(header.states)
        self.parameters = tuple(header.parameters)
        for parameter in self.parameters:
            if parameter in MEMBERS or hasattr(CustomCell, parameter):
                raise ArgumentError(
                    f"lltm::cell: {self.name}: expected names of parameters that modules do not"
                    f" have already, got {parameter!r}"
                )
        states = ("h", *header.states)

        def made(base: Any, kind: str, **members: Any) -> Any:
            where = f"{self.name}.{kind.removeprefix('Prepacked')}"
            members |= {
                "_CELL": text,
                "_HEADER": header,
                "_parameter_names": (*base._parameter_names, *self.parameters),
                "_INITIAL": {**header.parameters, **(initial or {})},
                "_STATES": states if kind == "Cell" else tuple(f"{name}_0" for name in states),
                "_where": where,
                "__init__": _renamed(base.__init__, where),
                "__doc__": base.__doc__,
                "__module__": getattr(function, "__module__", __name__),
                "__reduce__": _pickled_as(kind),
            }
            return type(f"{self.name}_{kind}", (base,), members)

        prepacked = made(CustomPrepacked, "PrepackedLayer")
        self.Layer: type[CustomLayer] = made(
            CustomLayer, "Layer", mode=self.name, _PACKED=prepacked
        )
        self.Cell: type[CustomCell] = made(CustomCell, "Cell")

    def save(self, path: Path) -> None:
        """Writes the text, for :meth:`load` and for ``lltm::Cell::load`` in C++."""
        with open(path, "w", encoding="ascii", newline="\n") as file:
            file.write(self.text)

    @staticmethod
    def load(path: Path) -> Cell:
        """Reads what :meth:`save` wrote."""
        with open(path, encoding="ascii", newline="") as file:
            try:
                return Cell(file.read())
            except UnicodeDecodeError as error:
                got = f"{os.fspath(path)}: {error}"
                raise ArgumentError(f"lltm::cell: expected the text of a cell, got {got}") from None

    def explain(self) -> str:
        """What was made of the function: what forward saves, the instructions, hints, the page."""
        return explanation.explained(self.text, self.gates, self.function)

    @property
    def cpp_source(self) -> str:
        """C++ source that computes the same, in the form of the built-in cells'."""
        return cpp_source(self.text)

    def _called(self, z: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[Tensor]:
        """What the function itself returns, h' and states'; others by name, if it takes them."""
        if self.function is None:
            raise ValueError(
                f"lltm::testing: expected a cell with its function, got {self!r}, a text"
            )
        return call(self.function, {gate: z[gate] for gate in self.gates}, others)

    def __reduce__(self) -> Any:
        """Pickled by the text, without the function, as modules of the cell are."""
        return Cell, (self.text, _picklable(self.Layer._INITIAL)), {"gates": self.gates}

    def __copy__(self) -> Cell:
        return self

    def __deepcopy__(self, _: Any) -> Cell:
        return self

    def __repr__(self) -> str:
        return f"lltm.Cell({self.name!r}, gates={self.gates}, states={self.states})"


def _renamed(function: Any, name: str) -> Any:
    """A copy by whose name Python says that an argument is missing."""
    parts = function.__name__, function.__defaults__, function.__closure__
    copied = types.FunctionType(function.__code__, function.__globals__, *parts)
    copied.__annotations__, copied.__kwdefaults__ = (
        function.__annotations__,
        function.__kwdefaults__,
    )
    copied.__qualname__ = name
    return copied


def _picklable(initial: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, Pickled) or not callable(v) else Pickled(v)
        for k, v in initial.items()
    }


def _pickled_as(kind: str) -> Callable[..., Any]:
    """How a module of a cell is pickled: by the text."""

    def reduce(self: Any) -> Any:
        return _restore, (self._CELL, _picklable(self._INITIAL), kind), self.__getstate__()

    return reduce


def _restore(text: str, initial: Mapping[str, Any], kind: str) -> Any:
    made = Cell(text, initial)
    prepacked = made.Layer._PACKED
    module = {"Layer": made.Layer, "Cell": made.Cell, "PrepackedLayer": prepacked}[kind]
    return module.__new__(module)
