"""Cells that a user has written, and the modules of them.

Letters as in _recurrent.py; of a cell: K states besides h, P parameters, one number a unit each.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import pickle
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _check, _trace
from ._C import ArgumentError
from ._program import Header
from ._recurrent import (
    MadeLayer,
    MadeStep,
    OfParameters,
    Prepacked,
)

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
        program = _trace.trace(
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
        header = Header.read(text)
        self.name = header.name
        self.gates = header.gates
        self.states = tuple(header.states)
        self.parameters = tuple(header.parameters)
        for parameter in self.parameters:
            if parameter in _MEMBERS or hasattr(OwnCell, parameter):
                raise ArgumentError(
                    f"lltm::cell: {self.name}: expected names of parameters that modules do not"
                    f" have already, got {parameter!r}"
                )
        members = {
            "_CELL": text,
            "_HEADER": header,
            "_OWN": self.parameters,
            "_parameter_names": (*_GATE_PARAMETERS, *self.parameters),
            "_INITIAL": {**header.parameters, **(initial or {})},
            "__module__": getattr(function, "__module__", __name__),
        }
        states = ("h", *header.states)
        states_of_layer = tuple(f"{name}_0" for name in states)
        prepacked = type(
            f"{self.name}_PrepackedLayer",
            (_Prepacked,),
            {**members, "_where": f"{self.name}.Layer", "_STATES": states_of_layer},
        )

        def made(base: type, kind: str, **more: Any) -> Any:
            where = f"{self.name}.{kind}"
            init = _renamed(base.__init__, where)  # type: ignore[misc]
            own = {"_where": where, "__init__": init, "__doc__": base.__doc__}
            return type(f"{self.name}_{kind}", (base,), members | own | more)

        self.Layer: type[OwnLayer] = made(
            OwnLayer, "Layer", mode=self.name, _PACKED=prepacked, _STATES=states_of_layer
        )
        self.Cell: type[OwnCell] = made(OwnCell, "Cell", _STATES=states)

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
        from ._explain_cell import explained

        return explained(self)

    @property
    def page(self) -> str:
        """A page in C++ that computes the same, in the form of the built-in cells'."""
        from ._page import page

        return page(self.text)

    def _called(self, z: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[Tensor]:
        """What the function itself returns, h' and states'; others by name, if it takes them."""
        if self.function is None:
            raise ValueError(
                f"lltm::testing: expected a cell with its function, got {self!r}, a text"
            )
        _, *arguments = inspect.signature(self.function).parameters.values()
        by_name = {a.name: others[a.name] for a in arguments if a.kind is a.KEYWORD_ONLY}
        positional = (others[a.name] for a in arguments if a.name not in by_name)
        gates = _trace.Gates({gate: z[gate] for gate in self.gates})
        result = self.function(gates, *positional, **by_name)
        return [result] if isinstance(result, Tensor) else list(result)

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


class _Pickled:
    """A function that a parameter starts from, in a pickle: loaded when it is called for, because a
    cell runs where its functions are not."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        self.bytes: bytes | None = None
        with contextlib.suppress(Exception):  # of any kind: a lambda, say, cannot be pickled
            self.bytes = pickle.dumps(function)

    def loaded(self) -> Any:
        """The function; NaN where it is lost."""
        try:
            return math.nan if self.bytes is None else pickle.loads(self.bytes)
        except Exception:  # its module is missing, or has changed
            return math.nan


def _picklable(initial: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, _Pickled) or not callable(v) else _Pickled(v)
        for k, v in initial.items()
    }


# What modules call members of their own.
_GATE_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_MEMBERS = {"bias", "hidden_size", "input_size", "training", *_GATE_PARAMETERS}

# ---- modules ------------------------------------------------------------------------


class _Own(OfParameters):
    """What the modules of such a cell share."""

    _CELL: str
    _HEADER: Header
    _INITIAL: Mapping[str, Any]  # an Initial each, or what a pickle had of it
    _where: str
    _STATES: tuple[str, ...]
    hidden_size: int

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """Of the parameters of a direction that reads so many features."""
        x, h = (
            len(gates) * self.hidden_size for gates in (self._HEADER.gates_x, self._HEADER.gates_h)
        )
        return {
            "weight_ih": (x, columns),
            "weight_hh": (h, self.hidden_size),
            "bias_ih": (x,),
            "bias_hh": (h,),
            **dict.fromkeys(self._HEADER.parameters, (self.hidden_size,)),
        }

    def _draw(self, stem: str, parameter: Tensor) -> None:
        if stem not in self._INITIAL:
            super()._draw(stem, parameter)
            return
        initial = self._INITIAL[stem]
        if isinstance(initial, _Pickled):
            initial = initial.loaded()
        with torch.no_grad():
            if not callable(initial):
                if math.isnan(initial):
                    self._warn_of_lost(stem)
                parameter.fill_(initial)
                return
            parameter.fill_(math.nan)
            before = _version(parameter)
            made = initial(parameter)
            if isinstance(made, Tensor):  # in place, most often
                _check.shape(self._where, f"what fills {stem}", made, tuple(parameter.shape))
                parameter.copy_(made)
            elif _version(parameter) == before and parameter.isnan().any():
                raise ArgumentError(
                    f"lltm::{self._where}: expected a function that fills or returns {stem}, got"
                    f" {initial!r}, which does neither"
                )

    def _warn_of_lost(self, stem: str) -> None:
        warnings.warn(
            f"lltm::{self._where}: {stem} is NaN until a state_dict is loaded: it starts from a"
            " function, which the text of a cell does not have, nor a pickle of one that cannot be"
            f" pickled; lltm.Cell(text, {{{stem!r}: function}}) has it",
            stacklevel=5,
        )

    def _get_name(self) -> str:  # TorchScript wants the class's to be an identifier
        return f"{self._HEADER.name}.{type(self).__name__.rsplit('_', 1)[1]}"

    def _reduced(self, kind: str) -> Any:
        """Pickled by the text."""
        return _restore, (self._CELL, _picklable(self._INITIAL), kind), self.__dict__

    def __copy__(self) -> Any:
        return self._like(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._like(copy.deepcopy(self.__dict__, memo))

    def _like(self, state: dict[str, Any]) -> Any:
        """Of the same class, which has functions that no pickle may have."""
        made: Any = self.__new__(type(self))
        made.__setstate__(state)
        return made


def _version(x: Tensor) -> int:
    """What a change in place raises; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def _restore(text: str, initial: Mapping[str, Any], kind: str) -> Any:
    made = Cell(text, initial)
    module = {"Layer": made.Layer, "Cell": made.Cell, "Prepacked": made.Layer._PACKED}[kind]
    return module.__new__(module)


class OwnCell(_Own, MadeStep):
    """One step of a cell; ``cell.Cell``.

    Args:
        input_size: I
        hidden_size: H
        bias: whether there are biases
        device, dtype: of the parameters

    Parameters, for G_x gates that read x and G_h that read h::

        weight_ih  (G_x * H, I)
        weight_hh  (G_h * H, H)
        bias_ih    (G_x * H)
        bias_hh    (G_h * H)

    drawn from the uniform distribution on ±1/sqrt(H); and those of the cell, (H) each.
    """

    @property
    def bias(self) -> bool:
        """Whether there are biases."""
        return self._parameters["bias_ih"] is not None

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            hx: the state: h, (B, H) or (H), of a cell without other states; else the tuple
                ``(h, *states)``, shaped alike; by default zeros and the states' initial values

        Returns:
            The state after the step, in the form of hx.
        """
        return self._run(input, hx)

    def __reduce__(self) -> Any:
        return self._reduced("Cell")


class OwnLayer(_Own, MadeLayer):
    """Layers of a cell over sequences; ``cell.Layer``.

    Args:
        input_size: I
        hidden_size: H
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`lltm.LLTM`
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`lltm.LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction, where G_x
    gates read x and G_h read h::

        weight_ih_l{k}  (G_x * H, I); for k > 0, I is D * H
        weight_hh_l{k}  (G_h * H, H)
        bias_ih_l{k}    (G_x * H)
        bias_hh_l{k}    (G_h * H)

    drawn from the uniform distribution on ±1/sqrt(H); and those of the cell, (H) each.
    """

    _PACKED: type[_Prepacked]

    def _first_states(self, like: Tensor, batch: int) -> Any:
        shape = self._state_shape(batch)
        others = (like.new_full(shape, initial) for initial in self._HEADER.states.values())
        return self._returned([like.new_zeros(shape), *others])

    def forward(self, input: Any, hx: Any = None, reset: Tensor | None = None) -> Any:
        """Runs over a sequence.

        Args:
            input: (T, B, I); (B, T, I) with batch_first; (T, I) for one sequence without a
                batch; or a PackedSequence, sorted or not
            hx: the state: h_0, (L*D, B, H), or (L*D, H) for unbatched input, of a cell without
                other states; else the tuple ``(h_0, *states)``, shaped alike; by default zeros and
                the states' initial values
            reset: as of :meth:`lltm.LLTM.forward`; a state starts anew with its initial value

        Returns:
            (output, state): output like the input, with D*H features; the states after each row's
            last step, in the form of hx.
        """
        return self._run(input, hx, reset)

    def prepack(self, weights: torch.dtype | None = None) -> _Prepacked:
        """Returns this layer as it is now in a form for inference; see :meth:`lltm.LLTM.prepack`.

        With torch.qint8 the cell has to be bounded.
        """
        return self._PACKED(self, weights)

    def __reduce__(self) -> Any:
        return self._reduced("Layer")


class _Prepacked(_Own, Prepacked):
    """A layer of a cell for inference whose weights were laid out once."""

    _BIASES = ("packed_bias_ih", "packed_bias_hh")
    _FIRST_OF_LAYER = "weight_ih_l0"

    def forward(self, input: Any, hx: Any = None, reset: Tensor | None = None) -> Any:
        """Runs over a sequence; see :meth:`OwnLayer.forward`."""
        return self._run(input, hx, reset)

    def __reduce__(self) -> Any:
        return self._reduced("Prepacked")
