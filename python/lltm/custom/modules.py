"""The modules of cells that a user has written.

Letters as in _recurrent.py; of a cell: G_x gates that read x, G_h gates that read h.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._C import ArgumentError
from .._recurrent import MadeLayer, MadeStep, OfParameters, Prepacked
from .program import Header

# What modules call members of their own.
GATE_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
MEMBERS = {"bias", "hidden_size", "input_size", "training", *GATE_PARAMETERS}


class Pickled:
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
        if isinstance(initial, Pickled):
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

    _PACKED: type[OwnPrepacked]

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

    def prepack(self, weights: torch.dtype | None = None) -> OwnPrepacked:
        """Returns this layer as it is now in a form for inference; see :meth:`lltm.LLTM.prepack`.

        With torch.qint8 the cell has to be bounded.
        """
        return self._PACKED(self, weights)


class OwnPrepacked(_Own, Prepacked):
    """A layer of a cell for inference whose weights were laid out once."""

    _BIASES = ("packed_bias_ih", "packed_bias_hh")
    _FIRST_OF_LAYER = "weight_ih_l0"

    def forward(self, input: Any, hx: Any = None, reset: Tensor | None = None) -> Any:
        """Runs over a sequence; see :meth:`OwnLayer.forward`."""
        return self._run(input, hx, reset)
