"""Modules in the manner of torch.nn's: the LLTM, and torch's LSTM, GRU and RNN.

`Step` and `Layer` are what the modules of every cell do, those of users' cells too. A class below
them names a cell, its states and its class in torch.nn and ONNX; `lltm`, `lltm.replace_` and
torch.onnx.export learn of the cell from that alone.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _C, _check
from ._C import ArgumentError
from ._prepacked import Prepacked
from ._recurrent import (
    Recurrent,
    calls_kernels,
    layer_of,
    names_of,
    operator,
    step_of,
)
from .integrations import script

__all__ = [
    "GRU",
    "LLTM",
    "LSTM",
    "RNN",
    "GRUCell",
    "LLTMCell",
    "LSTMCell",
    "PrepackedGRU",
    "PrepackedLLTM",
    "PrepackedLSTM",
    "PrepackedRNN",
    "RNNCell",
]

State = TypeVar("State")  # what the user passes and gets
Pair = tuple[Tensor, Tensor]

# ---- one step ---------------------------------------------------------------------


class Step(Recurrent, Generic[State]):
    """One step of a cell."""

    # The attributes that the operator `layer_step` takes besides parameters.
    _OPTIONS = ("input_size", "hidden_size")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # a base of torch.nn would make the parameters of its own cells
        self.input_size = _check.integer(self._where, "input_size", input_size)
        self.hidden_size = _check.integer(self._where, "hidden_size", hidden_size)
        with_bias = _check.flag(self._where, "bias", bias)
        if "bias" not in self._parameter_names:
            vars(self)["bias"] = with_bias
        self._register(self._parameter_names, self.input_size, with_bias, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            hx: the state: (h, c), of a cell with h alone h, of a cell of your own with other
                states ``(h, *states)``; each (B, H) or (H). If absent zeros, and the initial values
                of your cell's states

        Returns:
            The state after the step, in the form of hx.
        """
        if calls_kernels():
            states = hx if len(self._STATES) > 1 or hx is None else (hx,)
            result: Any = _C.layer_step(self, input, states, self._parameter_names, self._OPTIONS)
            if result is not None:
                return result  # type: ignore[no-any-return]
        run = operator("layer_step", self._parameter_names, self._OPTIONS)
        return step_of(self, input, hx, run)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        bias = ", bias=False" if None in self._parameters.values() else ""
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which compiles what this returns."""
        if type(self).forward is not Step.forward:  # compiled already, or the user's own
            return self
        return script.cell(self, self._parameter_names, len(self._STATES))


# ---- layers -----------------------------------------------------------------------

# The arguments that every layer has, in their order, and their checks.
_CHECKS: dict[str, Any] = {
    "input_size": _check.integer,
    "hidden_size": _check.integer,
    "num_layers": partial(_check.integer, largest=_check.MOST_LAYERS),
    "bias": _check.flag,
    "batch_first": _check.flag,
    "dropout": _check.probability,
    "bidirectional": _check.flag,
}


class Layer(Recurrent, Generic[State]):
    """Layers of a cell over sequences, and their prepacked form."""

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    # For code that was written for torch.nn.LSTM and asks.
    proj_size = 0
    mode: str

    # ONNX's operator by the name of the cell, with the order of its gates in numbers of ours and
    # what it has to be told.
    _ONNX: ClassVar[Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Any]]]] = {}

    # Of a layer that was pickled before there were such arguments, or is prepacked.
    checkpoint_steps: int = 0
    recurrent_dropout: float = 0.0

    # The names of the parameters by layer and direction, in the order of h_0 and h_n; a bias may
    # be None.
    _names: Sequence[str]

    # The attributes that the operator `layer` takes after these parameters.
    _OPTIONS = (
        "bias",
        "input_size",
        "hidden_size",
        "num_layers",
        "batch_first",
        "bidirectional",
        "_dropout_now",
        "_recurrent_dropout_now",
        "checkpoint_steps",
        "_prepacked",
    )

    # Whether weights are packed.
    _prepacked = False

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
    ) -> None:
        self._make(
            (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            {"device": device, "dtype": dtype},
            checkpoint_steps,
            recurrent_dropout,
        )

    def _make(
        self,
        given: tuple[Any, ...],
        of_parameters: dict[str, Any],
        checkpoint_steps: int,
        recurrent_dropout: float,
        proj_size: int = 0,
    ) -> None:
        """The constructor; `given` are the arguments of _CHECKS."""
        where = self._where
        named = zip(_CHECKS.items(), given, strict=True)
        options: dict[str, Any] = {k: check(where, k, value) for (k, check), value in named}
        steps = _check.checkpoint_steps(where, checkpoint_steps)
        dropped = _check.probability(where, "recurrent_dropout", recurrent_dropout)
        if isinstance(self, nn.RNNBase):  # makes the parameters of its own cells
            nn.RNNBase.__init__(self, self.mode, **options, proj_size=proj_size, **of_parameters)
        else:
            nn.Module.__init__(self)
            vars(self).update(options)
            if self.dropout > 0 and self.num_layers == 1:
                warnings.warn(
                    f"lltm::{where}: dropout is applied between layers, so it does nothing with"
                    " num_layers=1",
                    stacklevel=3,
                )
            self._names = names_of(self._parameter_names, self.num_layers, self.bidirectional)
            for k in range(self._state_shape(0)[0]):
                columns = self._columns_of_input(k)
                self._register(self._names_of(k), columns, self.bias, **of_parameters)
            self.reset_parameters()
        self.checkpoint_steps = steps
        self.recurrent_dropout = dropped

    @overload
    def forward(
        self, input: Tensor, hx: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None, reset: Tensor | None = None
    ) -> tuple[PackedSequence, State]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, State]:
        """Runs over a sequence.

        Args:
            input: (T, B, I); (B, T, I) with batch_first; (T, I) for one sequence without a
                batch; or a PackedSequence, sorted or not
            hx: the state: (h_0, c_0), of a cell with h alone h_0, of a cell of your own with other
                states ``(h_0, *states)``; each (L*D, B, H), or (L*D, H) for unbatched input. If
                absent zeros, and the initial values of your cell's states
            reset: bool, (T, B), laid out as the input, of a PackedSequence (N) in the order of its
                rows: where it is true, the state of that row starts anew before the step, in every
                layer and direction, and no gradient goes further back

        Returns:
            (output, state): output like the input, with D*H features, with proj_size D*P; the
            states after each row's last step, in the form of hx. T = 0 gives an empty output and
            the initial states.
        """
        if calls_kernels():
            states = hx if len(self._STATES) > 1 or hx is None else (hx,)
            result: Any = _C.layer(self, input, states, self._names, self._OPTIONS, reset)
            if result is not None:
                return result  # type: ignore[no-any-return]
        run = operator("layer", self._names, self._OPTIONS)
        return layer_of(self, input, hx, reset, run)  # type: ignore[no-any-return]

    def forward_packed(self, input: PackedSequence, hx: Any = None, reset: Any = None) -> Any:
        """As forward. TorchScript has this one for a PackedSequence, and forward for a tensor."""
        return self(input, hx, reset)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which compiles what this returns."""
        if type(self).forward is not Layer.forward:  # compiled already, or the user's own
            return self
        return self._scriptable()

    def _scriptable(self) -> nn.Module:
        return script.layer(self, self._names, len(self._STATES))

    @property
    def _dropout_now(self) -> float:
        # `training` is read only where there is dropout.
        applies = self.num_layers > 1 and self.dropout != 0 and self.training
        return self.dropout if applies else 0.0

    @property
    def _recurrent_dropout_now(self) -> float:
        applies = self.recurrent_dropout != 0 and self.training
        return self.recurrent_dropout if applies else 0.0

    def _columns_of_input(self, k: int) -> int:
        """The features that the k-th direction, in the order of h_0 and h_n, reads."""
        directions = 2 if self.bidirectional else 1
        return self.input_size if k < directions else directions * self._size_of_h

    @property
    def _size_of_h(self) -> int:
        return self.proj_size or self.hidden_size

    def _names_of(self, k: int) -> Sequence[str]:
        """Of the parameters of the k-th direction."""
        each = len(self._names) // self._state_shape(0)[0]
        return self._names[k * each : (k + 1) * each]

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer and direction: [[weights_l0, bias_l0], ...]."""
        by_direction = map(self._names_of, range(self._state_shape(0)[0]))
        return [
            [parameter for name in names if (parameter := getattr(self, name)) is not None]
            for names in by_direction
        ]

    def _state_shape(self, batch: int) -> tuple[int, int, int]:
        return self.num_layers * (2 if self.bidirectional else 1), batch, self.hidden_size

    def _first_states(self, like: Tensor, batch: int) -> Any:
        zeros = like.new_zeros(self._state_shape(batch))
        return self._returned([zeros[..., : self._size_of_h], zeros])

    # What torch.nn.LSTM has beside forward, for code that calls it. `input` is batched here, or,
    # with batch_sizes, the rows of a PackedSequence.

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Raises an ArgumentError if the shape is wrong."""
        packed = batch_sizes is not None
        if input.dim() != (2 if packed else 3) or input.shape[-1] != self.input_size:
            size = self.input_size
            batched = f"(B, T, {size})" if self.batch_first else f"(T, B, {size})"
            expected = f"packed rows (N, {size})" if packed else f"shape {batched} or (T, {size})"
            raise ArgumentError(
                f"lltm::{self._where}: expected input of {expected}, got {tuple(input.shape)}"
            )

    def get_expected_hidden_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """The shape of h_0 and h_n for this input."""
        layers, batch, _ = self.get_expected_cell_size(input, batch_sizes)
        return layers, batch, self._size_of_h

    def get_expected_cell_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """The shape of c_0 and c_n for this input: that of h_0, unless h is projected."""
        if batch_sizes is not None:
            return self._state_shape(int(batch_sizes[0]) if len(batch_sizes) > 0 else 0)
        return self._state_shape(input.shape[0 if self.batch_first else 1])

    def check_hidden_size(
        self,
        hx: Tensor,
        expected_hidden_size: tuple[int, int, int],
        msg: str = "expected a state of shape {}, got {}",
    ) -> None:
        """Raises an ArgumentError if the shape of h_0 or c_0 is another."""
        if hx.shape != expected_hidden_size:
            raise ArgumentError(
                f"lltm::{self._where}: {msg.format(expected_hidden_size, tuple(hx.shape))}"
            )

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        """Raises an ArgumentError if a shape is wrong."""
        self.check_input(input, batch_sizes)
        size = self.get_expected_hidden_size
        for name, state in zip(self._STATES, self._states_of(hidden), strict=False):
            _check.shape(self._where, name, state, size(input, batch_sizes))
            size = self.get_expected_cell_size

    def permute_hidden(self, hx: Any, permutation: Tensor | None) -> Any:
        """Puts the rows of the states in another order; without one returns them as they are."""
        if permutation is None:
            return hx
        if isinstance(hx, Tensor):
            return hx.index_select(1, permutation)
        return tuple(state.index_select(1, permutation) for state in hx)

    def flatten_parameters(self) -> None:
        """Does nothing; there because code written for torch.nn.LSTM calls it."""

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        for name, default in (
            ("proj_size", 0),
            ("num_layers", 1),
            ("bias", True),
            ("batch_first", False),
            ("dropout", 0.0),
            ("bidirectional", False),
            ("checkpoint_steps", 0),
            ("recurrent_dropout", 0.0),
        ):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


# ---- the LLTM ---------------------------------------------------------------------


class LLTMCell(Step[Pair]):
    """One step of the Long-Long-Term-Memory unit, an LSTM without a forget gate.

    See :func:`lltm.functional.cell` for the equations.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there is a bias
        device, dtype: of the parameters

    Parameters::

        weights  (3H, H+I)
        bias     (3H), or None

    both drawn from the uniform distribution on ±1/sqrt(H). ``weights[:, :H]`` multiplies h, as
    weight_hh of torch.nn.LSTMCell does, and ``weights[:, H:]`` the input, as weight_ih does; of the
    rows the first H are the input gate, the next the output gate, the last the candidate.

    Example::

        cell = lltm.LLTMCell(32, 128)
        h, c = cell(torch.randn(16, 32))
        h, c = cell(torch.randn(16, 32), (h, c))
    """

    weights: nn.Parameter
    bias: nn.Parameter | None

    _CELL, _STATES, _where = "lltm", ("h", "c"), "LLTMCell"
    _parameter_names = ("weights", "bias")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _flatten_biases(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LLTM(Layer[Pair]):
    """A recurrent layer of LLTM cells over sequences, used like torch.nn.LSTM.

    Args:
        input_size: I
        hidden_size: H
        num_layers: L; each layer runs over the output of the one before
        bias: whether there are biases
        batch_first: batched tensors are (B, T, .) rather than (T, B, .); says nothing about the
            states, and nothing about unbatched and packed input
        dropout: probability of zeroing an element of the output of every layer but the last,
            when training
        bidirectional: a second direction runs from the last step to the first; its output is
            concatenated to the first one's
        proj_size: 0; torch.nn.LSTM has it, an LLTM has no projection
        device, dtype: of the parameters
        checkpoint_steps: for training on long sequences: 0, or how many steps apart each layer
            saves its state, to compute the activations of the steps in between again in backward
            (:func:`lltm.functional.sequence`)
        recurrent_dropout: probability of zeroing an element of h where the next step's GEMM reads
            it, when training: one mask (B, H) for all steps of a call, drawn for each layer and
            direction (Gal and Ghahramani, https://arxiv.org/abs/1512.05287)

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weights_l{k}  (3H, H+I); for k > 0, I is D * H
        bias_l{k}     (3H)

    all drawn from the uniform distribution on ±1/sqrt(H). ``weights_l{k}[:, :H]`` multiplies h, as
    weight_hh_l{k} of torch.nn.LSTM does, and ``weights_l{k}[:, H:]`` the layer's input, as
    weight_ih_l{k} does; of the rows the first H are the input gate, the next the output gate, the
    last the candidate.

    Example::

        layer = lltm.LLTM(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """

    _CELL, _STATES = "lltm", ("h_0", "c_0")
    _where = mode = "LLTM"
    _parameter_names = ("weights", "bias")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        _check.no_projection("LLTM", proj_size)
        self._make(
            (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            {"device": device, "dtype": dtype},
            checkpoint_steps,
            recurrent_dropout,
        )

    # What code for torch.nn.LSTM reads although it is private there.

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for name in self._names if getattr(self, name) is not None]

    @property
    def _flat_weights(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @property
    def _all_weights(self) -> list[list[str]]:
        names = self._flat_weights_names
        each = len(names) // self._state_shape(0)[0]
        return [names[k : k + each] for k in range(0, len(names), each)]

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLLTM:
        """Returns this layer as it is now in a form for inference, the weights packed once.

        Args:
            weights: torch.qint8 quantises the weights to 8 bits, each row by a scale of its own,
                and input and h as the layer runs: a quarter of the size of float32 and faster, at
                the price of small errors (:func:`lltm.functional.prepack`)
        """
        return PrepackedLLTM(self, weights)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _flatten_biases(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _flatten_biases(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Takes biases saved as (1, 3H), as the tutorial's module has them, for ones of (3H)."""
    for name, parameter in module._parameters.items():
        bias = state_dict.get(prefix + name)
        expected = None if parameter is None or parameter.dim() > 1 else (1, *parameter.shape)
        if isinstance(bias, Tensor) and bias.shape == expected:
            state_dict[prefix + name] = bias.flatten()


class PrepackedLLTM(Prepacked, Layer[Pair]):
    """An LLTM layer for inference whose weights were laid out once; see :meth:`LLTM.prepack`.

    It is called like the layer, gives what the layer gives in evaluation mode, and saves what the
    layer does in every call: for short sequences and small batches, such as a stream that comes in
    chunks, that can be most of the time. It is a module, so ``model.rnn = model.rnn.prepack()``
    works, without parameters: its weights are buffers. It cannot be changed, nor converted to
    another dtype or device, and changes of the layer do not reach it; train() and eval() make no
    difference. It has no derivatives, and autocast does nothing to it: input and states are of the
    dtype that the layer had. It can be copied, pickled, and used on another machine
    (``torch.load`` wants ``weights_only=False``, as for any object that is not a tensor). Its
    state_dict is that of the layer, and either loads that of the other; of weights in int8 it has
    their rows and scales. What is packed is made of it on loading, for the machine that loads it.

    Example::

        layer = lltm.LLTM(32, 128).eval()
        packed = layer.prepack()
        state = None
        for chunk in stream:  # each (T, B, 32), of any T
            output, state = packed(chunk, state)
    """

    _STATES = ("h_0", "c_0")
    _where = mode = "LLTM"
    _MATRICES = ("weights",)


# ---- the cells of torch.nn ----------------------------------------------------------

# Layers of these are subclasses of torch.nn.RNNBase, which code for torch.nn's layers asks for: of
# torch.nn.LSTM or GRU they would not compile with fullgraph=True (lltm.replace_ makes such where it
# is asked to). It lists the names of their parameters.
_NAMES_OF_TORCH: Any = property(lambda self: self._flat_weights_names)


class LSTM(Layer[Pair], nn.RNNBase):
    """torch.nn.LSTM: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`LLTM`
        proj_size: 0, or P < H: h is projected to P features. The output and h are then P wide, c
            is H wide; takes no recurrent_dropout
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weight_ih_l{k}  (4H, I); for k > 0, I is D * H
        weight_hh_l{k}  (4H, H)
        bias_ih_l{k}    (4H)
        bias_hh_l{k}    (4H)
        weight_hr_l{k}  (P, H), with proj_size; weight_hh_l{k} is (4H, P) then, and for k > 0 I is
                        D * P

    drawn as torch.nn.LSTM draws them; of the rows the first H are the input gate, the next the
    forget gate, the candidate and the output gate.

    Example::

        layer = lltm.LSTM(32, 128, num_layers=2)
        layer.load_state_dict(torch_lstm.state_dict())
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """

    _CELL, _STATES = "lstm", ("h_0", "c_0")
    _where = mode = "LSTM"
    _TORCH = nn.LSTM
    _ONNX: ClassVar = {"lstm": ("LSTM", (0, 3, 1, 2), {})}  # input, output, forget, candidate
    _names = _NAMES_OF_TORCH

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        projection = _check.any_integer("LSTM", "proj_size", proj_size)
        if not 0 <= projection < _check.integer("LSTM", "hidden_size", hidden_size):
            raise ArgumentError(
                f"lltm::LSTM: expected proj_size to lie in [0, hidden_size), got {proj_size}"
            )
        if projection > 0 and recurrent_dropout != 0:
            raise ArgumentError(
                "lltm::LSTM: expected recurrent_dropout to be 0 with proj_size, got"
                f" {recurrent_dropout}"
            )
        self._make(
            (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            {"device": device, "dtype": dtype},
            checkpoint_steps,
            recurrent_dropout,
            projection,
        )

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLSTM:
        """Returns this layer as it is now in a form for inference; see :meth:`LLTM.prepack`."""
        return PrepackedLSTM(self, weights)


class LSTMCell(Step[Pair], nn.RNNCellBase):
    """torch.nn.LSTMCell: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there are biases
        device, dtype: of the parameters

    Parameters: ``weight_ih`` (4H, I), ``weight_hh`` (4H, H), ``bias_ih`` and ``bias_hh`` (4H) or
    None; the rows as those of :class:`LSTM`.
    """

    _CELL, _STATES, _where = "lstm", ("h", "c"), "LSTMCell"
    _TORCH = nn.LSTMCell


class PrepackedLSTM(Prepacked, Layer[Pair]):
    """An LSTM for inference whose weights were laid out once; as :class:`PrepackedLLTM`."""

    _STATES = ("h_0", "c_0")
    _where = mode = "LSTM"


class GRU(Layer[Tensor], nn.RNNBase):
    """torch.nn.GRU: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`LLTM`
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weight_ih_l{k}  (3H, I); for k > 0, I is D * H
        weight_hh_l{k}  (3H, H)
        bias_ih_l{k}    (3H)
        bias_hh_l{k}    (3H)

    drawn as torch.nn.GRU draws them; of the rows the first H are the reset gate, the next the
    update gate, the last the candidate.

    Example::

        layer = lltm.GRU(32, 128, num_layers=2)
        layer.load_state_dict(torch_gru.state_dict())
        output, h_n = layer(torch.randn(100, 16, 32))
    """

    _CELL, _STATES = "gru", ("h_0",)
    _where = mode = "GRU"
    _TORCH = nn.GRU
    # update, reset, candidate, whose reset gate stands after the GEMM
    _ONNX: ClassVar = {"gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1})}
    _names = _NAMES_OF_TORCH

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedGRU:
        """Returns this layer as it is now in a form for inference; see :meth:`LLTM.prepack`."""
        return PrepackedGRU(self, weights)


class GRUCell(Step[Tensor], nn.RNNCellBase):
    """torch.nn.GRUCell: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there are biases
        device, dtype: of the parameters

    Parameters: ``weight_ih`` (3H, I), ``weight_hh`` (3H, H), ``bias_ih`` and ``bias_hh`` (3H) or
    None; the rows as those of :class:`GRU`.
    """

    _CELL, _STATES, _where = "gru", ("h",), "GRUCell"
    _TORCH = nn.GRUCell


class PrepackedGRU(Prepacked, Layer[Tensor]):
    """A GRU for inference whose weights were laid out once; as :class:`PrepackedLLTM`."""

    _STATES = ("h_0",)
    _where = mode = "GRU"


class RNN(Layer[Tensor], nn.RNNBase):
    """torch.nn.RNN: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        nonlinearity: "tanh" or "relu"
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`LLTM`
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weight_ih_l{k}  (H, I); for k > 0, I is D * H
        weight_hh_l{k}  (H, H)
        bias_ih_l{k}    (H)
        bias_hh_l{k}    (H)

    drawn as torch.nn.RNN draws them.

    Example::

        layer = lltm.RNN(32, 128, num_layers=2, nonlinearity="relu")
        layer.load_state_dict(torch_rnn.state_dict())
        output, h_n = layer(torch.randn(100, 16, 32))
    """

    _STATES = ("h_0",)
    _where = "RNN"
    _TORCH = nn.RNN
    _ONNX: ClassVar = {
        "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
        "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
    }
    _names = _NAMES_OF_TORCH

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        self.nonlinearity = _checked_nonlinearity("RNN", nonlinearity)
        self.mode = f"RNN_{nonlinearity.upper()}"
        self._make(
            (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            {"device": device, "dtype": dtype},
            checkpoint_steps,
            recurrent_dropout,
        )

    @property
    def _CELL(self) -> str:  # type: ignore[override]
        return self.mode.lower()

    def extra_repr(self) -> str:
        relu = ", nonlinearity=relu" if self._CELL == "rnn_relu" else ""
        return super().extra_repr() + relu

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedRNN:
        """Returns this layer as it is now in a form for inference; see :meth:`LLTM.prepack`.

        With torch.qint8 the nonlinearity has to be "tanh".
        """
        return PrepackedRNN(self, weights)


class RNNCell(Step[Tensor], nn.RNNCellBase):
    """torch.nn.RNNCell: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there are biases
        nonlinearity: "tanh" or "relu"
        device, dtype: of the parameters

    Parameters: ``weight_ih`` (H, I), ``weight_hh`` (H, H), ``bias_ih`` and ``bias_hh`` (H) or None.
    """

    _STATES, _where = ("h",), "RNNCell"
    _TORCH = nn.RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = _checked_nonlinearity("RNNCell", nonlinearity)
        super().__init__(input_size, hidden_size, bias, device, dtype)

    @property
    def _CELL(self) -> str:  # type: ignore[override]
        return f"rnn_{self.nonlinearity}"

    def extra_repr(self) -> str:
        relu = ", nonlinearity=relu" if self.nonlinearity == "relu" else ""
        return super().extra_repr() + relu


def _checked_nonlinearity(where: str, given: str) -> str:
    if given not in ("tanh", "relu"):
        raise ArgumentError(
            f"lltm::{where}: expected nonlinearity to be 'tanh' or 'relu', got {given!r}"
        )
    return given


class PrepackedRNN(Prepacked, Layer[Tensor]):
    """An RNN for inference whose weights were laid out once; as :class:`PrepackedLLTM`."""

    _STATES = ("h_0",)
    _where = mode = "RNN"
