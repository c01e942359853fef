"""Modules of custom cells.

Symbols as in modules.py. A cell has G_x gates that depend on x, and G_h gates that depend on h.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from .._prepacked import Prepacked
from .._recurrent import Recurrent, documented
from ..modules import LLTM, Layer, Step
from .derived import Derivation
from .program import Program


class Pickled:
    """A parameter's pickled initializer function. It is loaded on use: a cell also runs without
    its functions."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        self.bytes: bytes | None = None
        with contextlib.suppress(Exception):  # a lambda, for example, cannot be pickled
            self.bytes = pickle.dumps(function)

    def loaded(self) -> Any:
        """Returns the function, or NaN if it cannot be loaded."""
        try:
            return math.nan if self.bytes is None else pickle.loads(self.bytes)
        except Exception:  # for example, its module is missing
            return math.nan


class _Custom(Recurrent):
    """Base of custom cells' modules."""

    _HEADER: Program
    _DERIVATION: Derivation
    _INITIAL: Mapping[str, Any]  # by parameter: an Initial, or a Pickled function

    heads = 1

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """A direction's parameter shapes. Gates that read the input have its last columns."""
        gates, shapes = self._HEADER.gates_input, super()._shapes(columns)
        rows, needed = shapes["weight_ih"][0], len(gates) * self.hidden_size
        expected = f"{'at least ' * (rows > 0)}{needed} input features, hidden_size for each gate"
        expected += f" that reads the input ({', '.join(gates)})"
        right = columns == needed or (columns > needed and rows > 0)
        _check.expect(right, self._where, expected, columns)
        if self.heads > 1:
            units = self.hidden_size // self.heads
            shapes["weight_hh"] = (self.heads, shapes["weight_hh"][0] // self.heads, units)
        for name, of_bias in (("bias_ih", self._HEADER.gates_x), ("bias_hh", self._HEADER.gates_h)):
            shapes[name] = (len({*of_bias} - {*self._HEADER.no_bias}) * self.hidden_size,)
        shapes |= {"weight_ih": (rows, columns - needed)}
        learned, scalars = self._DERIVATION.parameters, self._DERIVATION.scalars
        of_cell = {k: (1 if k in scalars else self.hidden_size,) for k in learned}
        return {k: shapes[k] for k in Recurrent._parameter_names} | of_cell

    def _learned(self, first: str) -> dict[str, str]:
        """Returns the registered names by stem, of the direction with this first name."""
        suffix = first.removeprefix("weight_ih")
        stems = (*Recurrent._parameter_names, *self._DERIVATION.parameters)
        return {stem: stem + suffix for stem in stems}

    def _registered_of(self, k: int) -> Sequence[str]:
        module: Any = self
        return [*self._learned(module._names_of(k)[0]).values()]

    def _register(
        self, names: Sequence[str], columns: int, bias: bool, device: Any, dtype: Any
    ) -> None:
        super()._register([*self._learned(names[0]).values()], columns, bias, device, dtype)
        if self._DERIVATION.results:
            self._DERIVATION.check(self._HEADER.scalars, [self.hidden_size])

    def _set_heads(self, hidden_size: int, heads: int) -> None:
        size = _check.integer(self._where, "hidden_size", hidden_size)
        divides = size % _check.integer(self._where, "heads", heads) == 0
        _check.expect(divides, self._where, f"heads that divide hidden_size {size}", heads)
        vars(self)["heads"] = int(heads)

    def reset_parameters(self) -> None:
        """Initializes weights and biases uniformly in ±1/sqrt(H), the cell's parameters with their
        initial values."""
        bound = 1 / math.sqrt(self.hidden_size)
        dtype = next(self.parameters()).dtype
        largest = torch.finfo(dtype).max
        for name, initial in {**self._HEADER.states, **self._INITIAL}.items():
            if isinstance(initial, (int, float)) and largest < abs(initial) < math.inf:
                expected = f"an initial value of {name} in the range of {_check.dtype(dtype)}"
                _check.expect(False, self._where, expected, repr(initial))
        names = getattr(self, "_names", self._parameter_names)
        firsts = names[:: len(self._parameter_names)]
        stems = {name: stem for first in firsts for stem, name in self._learned(first).items()}
        with torch.no_grad():
            # Registered parameters only: parametrizations compute attributes from them.
            for path, parameter in self.named_parameters():
                stem = next((stems[name] for name in path.split(".") if name in stems), "")
                if stem in self._INITIAL:
                    self._fill(stem, parameter)
                else:
                    parameter.uniform_(-bound, bound)

    def _fill(self, stem: str, parameter: Tensor) -> None:
        """Fills a cell parameter with its initial values."""
        initial = self._INITIAL[stem]
        if isinstance(initial, Pickled):
            initial = initial.loaded()
        if not callable(initial):
            if math.isnan(initial):
                warnings.warn(
                    f"lltm::{self._where}: parameter {stem} is NaN because its initializer function"
                    " was not saved with the cell; load a state_dict, or pass the function:"
                    f" lltm.Cell(text, {{{stem!r}: function}})",
                    stacklevel=5 if isinstance(self, Layer) else 4,
                )
            parameter.fill_(initial)
            return
        parameter.fill_(math.nan)
        before = _version(parameter)
        made = initial(parameter)
        if isinstance(made, Tensor):  # often the parameter itself, filled in place
            name = f"the result of the initializer of {stem}"
            _check.shape(self._where, name, made, tuple(parameter.shape))
            parameter.copy_(made)
        elif _version(parameter) == before and parameter.isnan().any():
            expected = f"a function that fills or returns {stem}"
            _check.expect(False, self._where, expected, f"{initial!r}, which does neither")

    def _first_states(self, like: Tensor, batch: int) -> Any:
        module: Any = self
        shape = module._state_shape(batch)
        others = (like.new_full(shape, initial) for initial in self._HEADER.states.values())
        return self._returned([like.new_zeros(shape), *others])

    def _get_name(self) -> str:  # the class name must be an identifier for TorchScript
        name, cell = type(self).__name__, self._HEADER.name
        return f"{cell}.{name[len(cell) + 1 :]}" if name.startswith(f"{cell}_") else name

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "__reduce__" in vars(type(self)):  # a class of the cell, which its pickles contain
            return super().__reduce_ex__(protocol)
        module: Any = self
        return copyreg.__newobj__, (type(self),), module.__getstate__()  # type: ignore[attr-defined]

    # Copies have the same class, which keeps initializers that pickle would lose.

    def __copy__(self) -> Any:
        module: Any = self
        made: Any = self.__new__(type(self))
        made.__setstate__(module.__getstate__())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = self.__new__(type(self))
        # Other __getstate__ methods unpack weights, or reject parametrizations.
        vars(made).update(copy.deepcopy(nn.Module.__getstate__(self), memo))
        return made


def derived_attribute(self: Any, name: str) -> Any:
    """The method __getattr__ of modules with derived parameters."""
    functions = self._DERIVATION.functions
    stem, mark, layer = name.rpartition("_l")
    stem, suffix = (name, "") if name in functions else (stem, mark + layer)
    if stem in functions:
        function, names = functions[stem]
        return function(*(getattr(self, k + suffix) for k in names), self.hidden_size)
    return nn.Module.__getattr__(self, name)


def _version(x: Tensor) -> int:
    """Version counter, which in-place changes increase. Inference tensors have none."""
    return 0 if x.is_inference() else x._version


@documented
class CustomCell(_Custom, Step[Any]):
    """One step of a custom cell, used like torch.nn.LSTMCell. Base of ``cell.Cell``.

    Args: ...
        heads (int): number of heads, as in :class:`CustomLayer`. Default: 1

    Shape: input (B, I) or (I); h and the other states (B, H) or (H).

    Parameters, with G_x gates that depend on x and G_h gates that depend on h::

        weight_ih  (G_x * H, I), or (G_x * H, I - K * H) if K gates read the input
        weight_hh  (G_h * H, H); with heads (heads, G_h * H/heads, H/heads)
        bias_ih    (G_x * H), or None
        bias_hh    (G_h * H), or None

    These are uniform in ±1/sqrt(H). Gates without biases have no rows in bias_ih and bias_hh. The
    cell's parameters have shape (H), or (1) with :func:`lltm.scalar`, and their initial values.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        heads: int = 1,
    ) -> None:
        self._set_heads(hidden_size, heads)
        super().__init__(input_size, hidden_size, bias, device, dtype)


# Names that parameters of a cell cannot have: attributes of a single-step module, also in
# TorchScript, and stems of the names of tensors in all modules and state_dicts.
NAMES_IN_MODULES = {
    *(*dir(CustomCell), *vars(nn.Module()), *Recurrent.__annotations__),
    *("forward_in_python", *Recurrent._parameter_names, *LLTM._parameter_names),
    *(*Prepacked._INT8, Prepacked._PACKED),
}


@documented
class CustomLayer(_Custom, Layer[Any]):
    """A multi-layer custom recurrent network, base of ``cell.Layer``.

    It is used like torch.nn.LSTM or, if h is the only state, like torch.nn.GRU.

    Args: ...
        recurrent_dropout (float): dropout probability for the h that the next step reads, in
            training. All steps of a call use the same mask. Values that products multiply are not
            masked. Default: 0
        heads (int): number of heads, a divisor of H. The recurrent weights of a head connect only
            its own H/heads hidden units, which are consecutive. Fastest if H/heads is a multiple of
            32. Default: 1

    Shape: ...
        - state, h and the other states: each tensor (L*D, B, H), or (L*D, H) for unbatched input
        - output: shape and form of the input, with D*H features. D is 2 if bidirectional, else 1.
          For a cell with ``outputs``, a tuple of these

    Parameters of layer k (suffix ``_reverse``: second direction), with G_x gates that depend on x
    and G_h gates that depend on h::

        weight_ih_l{k}  (G_x * H, I); for k > 0, I is D*H; if K gates read the input, (G_x * H,
                        I - K * H), and there is a single layer
        weight_hh_l{k}  (G_h * H, H); with heads (heads, G_h * H/heads, H/heads)
        bias_ih_l{k}    (G_x * H)
        bias_hh_l{k}    (G_h * H)

    These are uniform in ±1/sqrt(H). Gates without biases have no rows in bias_ih and bias_hh. The
    cell's parameters, such as ``scale_l{k}``, have shape (H), or (1) with :func:`lltm.scalar`, and
    their initial values.
    """

    _PACKED: type[CustomPrepacked]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
        heads: int = 1,
    ) -> None:
        expected = "num_layers to be 1 for a cell with gates that read the input"
        right = num_layers == 1 or not self._HEADER.gates_input
        _check.expect(right, self._where, expected, num_layers)
        self._set_heads(hidden_size, heads)
        self._make(locals())

    def prepack(self, weights: torch.dtype | None = None) -> CustomPrepacked:
        """Returns an inference-only copy of this layer with prepacked weights.

        Args:
            weights (torch.dtype): None, or torch.qint8 to quantize the weights to 8 bits, and input
                and h at run time. This needs a quarter of the float32 memory and is faster, with
                small errors. Only for bounded cells, on the CPU, not for float64. Default: None
        """
        return self._PACKED(self, weights)


class CustomPrepacked(_Custom, Prepacked, Layer[Any]):
    """Inference-only layer of a custom cell, with prepacked weights and derived parameters."""

    _registered_of = Layer._registered_of
