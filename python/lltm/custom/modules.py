"""The modules of cells that a user has written.

Letters as in modules.py; of a cell: G_x gates that read x, G_h gates that read h.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._C import ArgumentError
from .._prepacked import Prepacked
from .._recurrent import Recurrent
from ..modules import Layer, Step
from .program import Program

# What modules call members of their own.
MEMBERS = {"bias", "hidden_size", "input_size", "training", *Recurrent._parameter_names}


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


class _Custom(Recurrent):
    """What the modules of such a cell share."""

    _HEADER: Program
    _INITIAL: Mapping[str, Any]  # an Initial each, or what a pickle had of it

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        bound = 1 / math.sqrt(self.hidden_size)
        names = getattr(self, "_names", self._parameter_names)
        stems = dict(zip(names, itertools.cycle(self._parameter_names), strict=False))
        with torch.no_grad():
            # What is registered: an attribute may be computed from it.
            for path, parameter in self.named_parameters():
                stem = next((stems[name] for name in path.split(".") if name in stems), "")
                if stem in self._INITIAL:
                    self._fill(stem, parameter)
                else:
                    parameter.uniform_(-bound, bound)

    def _fill(self, stem: str, parameter: Tensor) -> None:
        """A parameter of the cell's own."""
        initial = self._INITIAL[stem]
        if isinstance(initial, Pickled):
            initial = initial.loaded()
        if not callable(initial):
            if math.isnan(initial):
                warnings.warn(
                    f"lltm::{self._where}: {stem} is NaN until a state_dict is loaded: it starts"
                    " from a function, which the text of a cell does not have, nor a pickle of one"
                    f" that cannot be pickled; lltm.Cell(text, {{{stem!r}: function}}) has it",
                    stacklevel=5 if isinstance(self, Layer) else 4,
                )
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

    def _first_states(self, like: Tensor, batch: int) -> Any:
        module: Any = self
        shape = module._state_shape(batch)
        others = (like.new_full(shape, initial) for initial in self._HEADER.states.values())
        return self._returned([like.new_zeros(shape), *others])

    def _get_name(self) -> str:  # TorchScript wants the class's to be an identifier
        return f"{self._HEADER.name}.{type(self).__name__.rsplit('_', 1)[1]}"

    def __copy__(self) -> Any:
        module: Any = self
        return self._like(module.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self
        return self._like(copy.deepcopy(module.__getstate__(), memo))

    def _like(self, state: dict[str, Any]) -> Any:
        """Of the same class, which has functions that no pickle may have."""
        made: Any = self.__new__(type(self))
        made.__setstate__(state)
        return made


def _version(x: Tensor) -> int:
    """What a change in place raises; inference tensors have none."""
    return 0 if x.is_inference() else x._version


class CustomCell(_Custom, Step[Any]):
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


class CustomLayer(_Custom, Layer[Any]):
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

    _PACKED: type[CustomPrepacked]

    def prepack(self, weights: torch.dtype | None = None) -> CustomPrepacked:
        """Returns this layer as it is now in a form for inference; see :meth:`lltm.LLTM.prepack`.

        With torch.qint8 the cell has to be bounded.
        """
        return self._PACKED(self, weights)


class CustomPrepacked(_Custom, Prepacked, Layer[Any]):
    """A layer of a cell for inference whose weights were laid out once."""
