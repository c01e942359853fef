"""Recurrent modules with the interface of torch.nn: LSTM, GRU, RNN and LLTM.

`Step` and `Layer` implement the modules of every cell, including custom cells. A subclass names
its cell, its states and its equivalents in torch.nn and ONNX. `lltm`, `lltm.replace_` and
torch.onnx.export need no other registration.

Symbols: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
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
    IN_TRAINING,
    Recurrent,
    calls_kernels,
    documented,
    in_older_onnx_export,
    layer_of,
    names_of,
    operator,
    options_of,
    step_of,
    torch_form,
)
from .integrations import script

__all__ = ["GRU", "LLTM", "LSTM", "RNN", "GRUCell", "LLTMCell", "LSTMCell", "RNNCell"]
__all__ += ["PrepackedGRU", "PrepackedLLTM", "PrepackedLSTM", "PrepackedRNN"]

State = TypeVar("State")  # type of hx: a tensor, or a tuple of tensors
Pair = tuple[Tensor, Tensor]

# ---- one step ---------------------------------------------------------------------


class Step(Recurrent, Generic[State]):
    """Single-step module of a cell.

    Args:
        input_size (int): input features, I
        hidden_size (int): hidden units, H
        bias (bool): if False, the cell has no biases. Default: True
        device (torch.device): parameter device. Default: PyTorch's default device
        dtype (torch.dtype): parameter dtype. Default: PyTorch's default dtype
    """

    _OPTIONS = options_of("layer_step")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        Recurrent.__init__(self)
        self.input_size = _check.integer(self._where, "input_size", input_size)
        self.hidden_size = _check.integer(self._where, "hidden_size", hidden_size)
        with_bias = _check.flag(self._where, "bias", bias)
        if "bias" not in self._parameter_names:
            vars(self)["bias"] = with_bias
        self._register(self._parameter_names, self.input_size, with_bias, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """Computes one step.

        Args:
            input: (B, I), or (I) without a batch
            hx: initial state: (h, c) for LSTM and LLTM, h for GRU and RNN, ``(h, *states)`` for a
                custom cell. Each tensor is (B, H) or (H). If None, h and c are zero and custom
                states have their initial values. Default: None

        Returns:
            The next state, in the form of hx.
        """
        if calls_kernels():
            states = hx if len(self._STATES) > 1 or hx is None else (hx,)
            result: Any = _C.layer_step(self, input, states, self._parameter_names, self._OPTIONS)
            if result is not None:
                return result  # type: ignore[no-any-return]
        if in_older_onnx_export():
            return torch_form(self)(input, hx)  # type: ignore[no-any-return]
        run = operator("layer_step", self._parameter_names, self._OPTIONS)
        return step_of(self, input, hx, run)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        bias = ", bias=False" if None in self._parameters.values() else ""
        heads = f", heads={self.heads}" if getattr(self, "heads", 1) > 1 else ""
        return f"{self.input_size}, {self.hidden_size}{bias}{heads}"

    def __prepare_scriptable__(self) -> nn.Module:
        """Returns the module that torch.jit.script compiles instead of this one."""
        if type(self).forward is not Step.forward:  # already scriptable, or overridden
            return self
        return script.cell(self)


# ---- layers -----------------------------------------------------------------------


# Every layer's arguments, with their checks.
_CHECKS: dict[str, Any] = {
    "input_size": _check.integer,
    "hidden_size": _check.integer,
    "num_layers": partial(_check.integer, largest=_check.MOST_LAYERS),
    "bias": _check.flag,
    "batch_first": _check.flag,
    "dropout": _check.probability,
    "bidirectional": _check.flag,
    "checkpoint_steps": _check.checkpoint_steps,
    "recurrent_dropout": _check.probability,
}


class Layer(Recurrent, Generic[State]):
    """Multi-layer module of a cell, over sequences; also its prepacked form.

    Args:
        input_size (int): input features, I
        hidden_size (int): hidden units, H
        num_layers (int): stacked layers, L; each reads the layer before it. Default: 1
        bias (bool): if False, the layer has no biases. Default: True
        batch_first (bool): if True, batched input and output are (B, T, ...), not (T, B, ...). No
            effect on states, unbatched input and packed sequences. Default: False
        dropout (float): dropout probability between layers, in training. Default: 0
        bidirectional (bool): if True, adds a second direction, from the last step to the first. Its
            output is concatenated to the first direction's. Default: False
        device (torch.device): parameter device. Default: PyTorch's default device
        dtype (torch.dtype): parameter dtype. Default: PyTorch's default dtype
        checkpoint_steps (int): activation checkpointing for long sequences. If n > 0, forward saves
            every n-th state instead of all activations, and backward recomputes them. Default: 0
        recurrent_dropout (float): dropout probability for the h that the next step reads, in
            training. A call uses the same mask in all steps. Default: 0

    Shape:
        - input: (T, B, I) for T steps and batch size B, (B, T, I) with batch_first, (T, I) for an
          unbatched sequence, or a PackedSequence
        - state, h_0 and h_n: (L*D, B, H), or (L*D, H) for unbatched input
        - output: shape and form of the input, with D*H features. D is 2 if bidirectional, else 1
    """

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    _FIXED = frozenset(["heads", "mode", "nonlinearity", "proj_size"])

    # Read by code written for torch.nn.LSTM.
    proj_size = 0
    mode: str

    # By cell name: the ONNX operator, the indices of our gates in ONNX order, and attributes.
    _ONNX: ClassVar[Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Any]]]] = {}

    # Defaults for prepacked layers.
    checkpoint_steps: int = 0
    recurrent_dropout: float = 0.0

    # Parameter names by layer and direction, in the order of h_0. Biases may be None.
    _names: Sequence[str]

    _OPTIONS = options_of("layer")

    _prepacked = False  # True if the weights are packed

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
        self._make(locals())

    def _make(self, given: Mapping[str, Any], proj_size: int = 0) -> None:
        """Constructs the layer from the arguments of __init__."""
        options = {name: check(self._where, name, given[name]) for name, check in _CHECKS.items()}
        ours = {name: options.pop(name) for name in (*IN_TRAINING, "checkpoint_steps")}
        if (dropout := ours["dropout"]) > 0 and options["num_layers"] == 1:
            warnings.warn(  # as torch.nn does, but for the caller's line
                "dropout option adds dropout after all but last recurrent layer, so non-zero"
                f" dropout expects num_layers greater than 1, but got {dropout=} and num_layers=1",
                stacklevel=3,
            )
        of_parameters = {name: given[name] for name in ("device", "dtype")}
        if isinstance(self, nn.RNNBase):  # creates the parameters itself
            nn.RNNBase.__init__(self, self.mode, **options, proj_size=proj_size, **of_parameters)
        else:
            Recurrent.__init__(self)
            vars(self).update(options, proj_size=proj_size)
            self._names = names_of(self._parameter_names, self.num_layers, self.bidirectional)
            for k in range(self._state_shape(0)[0]):
                columns = self._columns_of_input(k)
                self._register(self._names_of(k), columns, self.bias, **of_parameters)
            self.reset_parameters()
        vars(self).update(ours)

    @overload
    def forward(
        self, input: Tensor, hx: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None, reset: Tensor | None = None
    ) -> tuple[PackedSequence, State]: ...

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Runs the layer over a batch of sequences.

        Args:
            input: (T, B, I), (B, T, I) with batch_first, (T, I) for an unbatched sequence, or a
                PackedSequence, sorted or not
            hx: initial state: (h_0, c_0) for LSTM and LLTM, h_0 for GRU and RNN,
                ``(h_0, *states)`` for a custom cell. Each tensor is (L*D, B, H), or (L*D, H) for
                unbatched input. If None, h_0 and c_0 are zero and custom states have their initial
                values. Default: None
            reset: boolean mask with the batch shape of the input: (T, B), (B, T) with batch_first,
                (T), or the length of PackedSequence.data. Where true, the state of that sequence is
                reset before the time step, in every layer and direction: to zero, or to the initial
                values of custom states. Gradients do not flow through a reset. Default: None

        Returns:
            (output, state): output has the form of the input, with D*H features (D*P with
            proj_size). state has the form of hx and holds the states after the last step of each
            sequence. If T = 0, output is empty and state is the initial state. For a custom cell
            with ``outputs``, output is a tuple.
        """
        if calls_kernels():
            states = hx if len(self._STATES) > 1 or hx is None else (hx,)
            result: Any = _C.layer(self, input, states, self._names, self._OPTIONS, reset)
            if result is not None and self._OUTPUTS:
                output, after = result
                return self._results(output, [after] if isinstance(after, Tensor) else after)
            if result is not None:
                return result  # type: ignore[no-any-return]
        if in_older_onnx_export():
            return torch_form(self, reset)(input, hx)  # type: ignore[no-any-return]
        run = operator("layer", self._names, self._OPTIONS)
        return layer_of(self, input, hx, reset, run)  # type: ignore[no-any-return]

    def forward_packed(self, input: PackedSequence, hx: Any = None, reset: Any = None) -> Any:
        """Calls forward. TorchScript needs a separate method for PackedSequence input."""
        return self(input, hx, reset)

    def __prepare_scriptable__(self) -> nn.Module:
        """Returns the module that torch.jit.script compiles instead of this one."""
        if type(self).forward is not Layer.forward:  # already scriptable, or overridden
            return self
        return script.prepacked(self) if self._prepacked else script.layer(self)

    def __getstate__(self) -> Any:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_compiled_call_impl", None)  # calls this module; RNNBase would copy it
        return state

    def _inherits_forward(self) -> bool:
        forward = getattr(self, "forward_in_python", self.forward)
        return getattr(forward, "__func__", None) is Layer.forward

    @property
    def _dropout_now(self) -> float:
        # Does not read `training` without dropout.
        applies = self.num_layers > 1 and self.dropout != 0 and self.training
        return self.dropout if applies else 0.0

    @property
    def _recurrent_dropout_now(self) -> float:
        applies = self.recurrent_dropout != 0 and self.training
        return self.recurrent_dropout if applies else 0.0

    def _columns_of_input(self, k: int) -> int:
        """Returns direction k's number of input features, in the order of h_0."""
        directions = 2 if self.bidirectional else 1
        return self.input_size if k < directions else directions * self._size_of_h

    @property
    def _size_of_h(self) -> int:
        return self.proj_size or self.hidden_size

    def _names_of(self, k: int) -> Sequence[str]:
        """Returns direction k's parameter names."""
        each = len(self._names) // self._state_shape(0)[0]
        return self._names[k * each : (k + 1) * each]

    def _registered_of(self, k: int) -> Sequence[str]:
        """Returns the names of direction k's parameters in the module."""
        return self._names_of(k)

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """Parameters by layer and direction, such as [[weight_ih_l0, weight_hh_l0, ...], ...]."""
        by_direction = map(self._registered_of, range(self._state_shape(0)[0]))
        return [
            [parameter for name in names if (parameter := getattr(self, name)) is not None]
            for names in by_direction
        ]

    @property
    def _flat_weights(self) -> list[nn.Parameter | None]:
        names: Any = self._flat_weights_names
        return [getattr(self, name, None) for name in names]

    @_flat_weights.setter
    def _flat_weights(self, _: Any) -> None:
        """Keeps no copies: deepcopy does not support tensors that parametrizations compute."""

    def _state_shape(self, batch: int) -> tuple[int, int, int]:
        return self.num_layers * (2 if self.bidirectional else 1), batch, self.hidden_size

    def _first_states(self, like: Tensor, batch: int) -> Any:
        zeros = like.new_zeros(self._state_shape(batch))
        return self._returned([zeros[..., : self._size_of_h], zeros])

    # Other methods of torch.nn.LSTM, for code that calls them. `input` is batched, or the data of a
    # PackedSequence if batch_sizes is given.

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Raises ArgumentError if the input has a wrong shape."""
        packed = batch_sizes is not None
        if input.dim() != (2 if packed else 3) or input.shape[-1] != self.input_size:
            size = self.input_size
            batched = f"(B, T, {size})" if self.batch_first else f"(T, B, {size})"
            expected = f"packed shape (N, {size})" if packed else f"shape {batched} or (T, {size})"
            raise ArgumentError(
                f"lltm::{self._where}: expected input of {expected}, got {tuple(input.shape)}"
            )

    get_expected_hidden_size: Any = nn.LSTM.get_expected_hidden_size
    get_expected_cell_size: Any = nn.LSTM.get_expected_cell_size

    def check_hidden_size(
        self,
        hx: Tensor,
        expected_hidden_size: tuple[int, int, int],
        msg: str = "expected a state of shape {}, got {}",
    ) -> None:
        """Raises ArgumentError if a state has another shape."""
        if hx.shape != expected_hidden_size:
            raise ArgumentError(
                f"lltm::{self._where}: {msg.format(expected_hidden_size, tuple(hx.shape))}"
            )

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        """Raises ArgumentError if the input or a state has a wrong shape."""
        self.check_input(input, batch_sizes)
        size = self.get_expected_hidden_size
        for name, state in zip(self._STATES, self._states_of(hidden), strict=False):
            _check.shape(self._where, name, state, size(input, batch_sizes))
            size = self.get_expected_cell_size

    def permute_hidden(self, hx: Any, permutation: Tensor | None) -> Any:
        """Permutes the batch dimension of the states, if a permutation is given."""
        if permutation is None:
            return hx
        if isinstance(hx, Tensor):
            return hx.index_select(1, permutation)
        return tuple(state.index_select(1, permutation) for state in hx)

    def flatten_parameters(self) -> None:
        """Does nothing. For code written for torch.nn.LSTM."""

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
            ("heads", 1),
            ("nonlinearity", "tanh"),
        ):
            if getattr(self, name, default) != default:
                text += f", {name}={getattr(self, name)}"
        return text


@documented
class _LayerOfPair(Layer[Pair]):
    """Layer with the states h and c, and torch.nn.LSTM's constructor.

    Args: ...
        proj_size (int): must be 0. Accepted because torch.nn.LSTM has it. Default: 0

    Shape: ...
        - state, (h_0, c_0) and (h_n, c_n): each tensor (L*D, B, H), or (L*D, H) for unbatched input
    """

    _STATES = ("h_0", "c_0")

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
        projection = self._check_projection(hidden_size, proj_size, recurrent_dropout)
        self._make(locals(), projection)

    def _check_projection(self, hidden_size: int, proj_size: int, recurrent_dropout: float) -> int:
        """Returns the projection size if the layer supports it."""
        where = self._where
        right = _check.any_integer(where, "proj_size", proj_size) == 0
        got = f"{proj_size}: an {where} has no projection"
        _check.expect(right, where, "proj_size to be 0", got)
        return 0


# ---- the LLTM ---------------------------------------------------------------------


class _Concatenated(Recurrent):
    """Base of the LLTM's modules, with a matrix [W_hh, W_ih] and one bias."""

    _CELL = "lltm"
    _parameter_names = ("weights", "bias")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Biases saved as (1, 3H), the shape in PyTorch's extension tutorial, are flattened.
        for name, parameter in self._parameters.items():
            bias = state_dict.get(prefix + name)
            expected = None if parameter is None or parameter.dim() > 1 else (1, *parameter.shape)
            if isinstance(bias, Tensor) and bias.shape == expected:
                state_dict[prefix + name] = bias.flatten()
        super()._load_from_state_dict(state_dict, prefix, *args)


@documented
class LLTMCell(_Concatenated, Step[Pair]):
    """One step of the Long-Long-Term-Memory unit, an LSTM without a forget gate.

    Computes the next state from the input x and the state h, c::

        i = sigmoid(W_i [h, x] + b_i)  input gate
        o = sigmoid(W_o [h, x] + b_o)  output gate
        g = elu(W_g [h, x] + b_g)      candidate
        c' = c + i * g
        h' = o * tanh(c')

    Args: ...

    Shape: input (B, I) or (I); h, c, h' and c' (B, H) or (H).

    Parameters, uniform in ±1/sqrt(H)::

        weights  (3H, H+I): stacked W_i, W_o, W_g; the first H columns multiply h
        bias     (3H): b_i, b_o, b_g; None with bias=False

    Example::

        cell = lltm.LLTMCell(32, 128)
        h, c = cell(torch.randn(16, 32))
        h, c = cell(torch.randn(16, 32), (h, c))
    """

    weights: nn.Parameter
    bias: nn.Parameter | None

    _STATES, _where = ("h", "c"), "LLTMCell"


@documented
class LLTM(_Concatenated, _LayerOfPair):
    """A multi-layer LLTM (an LSTM without a forget gate), used like torch.nn.LSTM.

    Each layer and direction computes at every time step, from its input x and state h, c::

        i = sigmoid(W_i [h, x] + b_i)  input gate
        o = sigmoid(W_o [h, x] + b_o)  output gate
        g = elu(W_g [h, x] + b_g)      candidate
        c' = c + i * g
        h' = o * tanh(c')

    Args: ...

    Shape: ...

    Parameters of layer k (suffix ``_reverse``: second direction), uniform in ±1/sqrt(H)::

        weights_l{k}  (3H, H+I): stacked W_i, W_o, W_g; first H columns for h. For k > 0, I is D*H
        bias_l{k}     (3H): b_i, b_o, b_g, with bias=True

    Example::

        layer = lltm.LLTM(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 32) for n in (35, 20, 7)])
        output, (h_n, c_n) = layer(packed)  # output is a PackedSequence
    """

    _where = mode = "LLTM"

    # Private attributes of torch.nn.LSTM that existing code reads.

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for name in self._names if getattr(self, name) is not None]

    @property
    def _all_weights(self) -> list[list[str]]:
        names = self._flat_weights_names
        each = len(names) // self._state_shape(0)[0]
        return [names[k : k + each] for k in range(0, len(names), each)]

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLLTM:
        """Returns a copy with prepacked weights, as :meth:`LSTM.prepack` does."""
        return PrepackedLLTM(self, weights)


class PrepackedLLTM(Prepacked, Layer[Pair]):
    """Inference-only LLTM with prepacked weights, like :class:`PrepackedLSTM`."""

    _STATES = ("h_0", "c_0")
    _where = mode = "LLTM"
    _MATRICES = ("weights",)


# ---- the cells of torch.nn ----------------------------------------------------------

# These layers derive from torch.nn.RNNBase, which existing code tests with isinstance. Subclasses
# of torch.nn.LSTM or GRU would not compile with fullgraph=True, so lltm.replace_ makes them only
# with keep_class=True. RNNBase stores the parameter names.
_NAMES_OF_TORCH: Any = property(lambda self: self._flat_weights_names)


@documented
class LSTM(_LayerOfPair, nn.RNNBase):
    """A multi-layer LSTM, compatible with torch.nn.LSTM (arguments, state_dict, results).

    Each layer and direction computes at every time step, from its input x and state h, c::

        i = sigmoid(W_ii x + b_ii + W_hi h + b_hi)  input gate
        f = sigmoid(W_if x + b_if + W_hf h + b_hf)  forget gate
        g = tanh(W_ig x + b_ig + W_hg h + b_hg)     candidate
        o = sigmoid(W_io x + b_io + W_ho h + b_ho)  output gate
        c' = f * c + i * g
        h' = o * tanh(c')                           with proj_size: weight_hr (o * tanh(c'))

    Args: ...
        proj_size (int): if P > 0, projects h to P < H features: h and the output have P features
            instead of H. Cannot be combined with recurrent_dropout. Default: 0

    Shape: ...
        - state, (h_0, c_0) and (h_n, c_n): each tensor (L*D, B, H), or (L*D, H) for unbatched
          input. With proj_size, h_0 and h_n have P features
        - output: shape and form of the input, with D*H features, or D*P with proj_size. D is 2 if
          bidirectional, else 1

    Parameters of layer k (suffix ``_reverse``: second direction), uniform in ±1/sqrt(H)::

        weight_ih_l{k}  (4H, I): stacked W_ii, W_if, W_ig, W_io. For k > 0, I is D*H,
                        or D*P with proj_size
        weight_hh_l{k}  (4H, H): stacked W_hi, W_hf, W_hg, W_ho; (4H, P) with proj_size
        bias_ih_l{k}, bias_hh_l{k}  (4H), with bias=True
        weight_hr_l{k}  (P, H), only with proj_size

    Example::

        layer = lltm.LSTM(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 32) for n in (35, 20, 7)])
        output, (h_n, c_n) = layer(packed)  # output is a PackedSequence
    """

    _CELL = "lstm"
    _where = mode = "LSTM"
    _TORCH = nn.LSTM
    _ONNX: ClassVar = {"lstm": ("LSTM", (0, 3, 1, 2), {})}  # input, output, forget, candidate
    _names = _NAMES_OF_TORCH

    def _check_projection(self, hidden_size: int, proj_size: int, recurrent_dropout: float) -> int:
        projection = _check.any_integer("LSTM", "proj_size", proj_size)
        right = 0 <= projection < _check.integer("LSTM", "hidden_size", hidden_size)
        _check.expect(right, "LSTM", "proj_size to be in [0, hidden_size)", proj_size)
        right = projection == 0 or recurrent_dropout == 0
        expected = "recurrent_dropout to be 0 with proj_size"
        _check.expect(right, "LSTM", expected, recurrent_dropout)
        return projection

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLSTM:
        """Returns an inference-only copy of this layer with prepacked weights.

        Args:
            weights (torch.dtype): None, or torch.qint8 to quantize the weights to 8 bits, and input
                and h at run time. This needs a quarter of the float32 memory and is faster, with
                small errors. Only on the CPU, not for float64. Default: None
        """
        return PrepackedLSTM(self, weights)


@documented
class LSTMCell(Step[Pair], nn.RNNCellBase):
    """One step of an LSTM, compatible with torch.nn.LSTMCell (arguments, state_dict, results).

    Computes the next state from the input x and the state h, c::

        i = sigmoid(W_ii x + b_ii + W_hi h + b_hi)  input gate
        f = sigmoid(W_if x + b_if + W_hf h + b_hf)  forget gate
        g = tanh(W_ig x + b_ig + W_hg h + b_hg)     candidate
        o = sigmoid(W_io x + b_io + W_ho h + b_ho)  output gate
        c' = f * c + i * g
        h' = o * tanh(c')

    Args: ...

    Shape: input (B, I) or (I); h, c, h' and c' (B, H) or (H).

    Parameters, uniform in ±1/sqrt(H)::

        weight_ih  (4H, I): stacked W_ii, W_if, W_ig, W_io
        weight_hh  (4H, H): stacked W_hi, W_hf, W_hg, W_ho
        bias_ih, bias_hh  (4H), or None with bias=False

    Example::

        cell = lltm.LSTMCell(32, 128)
        h, c = cell(torch.randn(16, 32))
        h, c = cell(torch.randn(16, 32), (h, c))
    """

    _CELL, _STATES, _where = "lstm", ("h", "c"), "LSTMCell"
    _TORCH = nn.LSTMCell


class PrepackedLSTM(Prepacked, Layer[Pair]):
    """Inference-only LSTM with prepacked weights, returned by :meth:`LSTM.prepack`.

    It computes like the layer in evaluation mode, but does not pack weights in every call. It has
    no derivatives, cannot be changed or converted, and does not follow later changes of the layer.
    Autocast has no effect: input and states need the layer's dtype. Its weights are buffers. Its
    state_dict equals the layer's, but int8 weights are saved as quantized rows and scales. Loading
    packs the weights for the CPU in use. ``torch.load`` needs ``weights_only=False``.

    Args:
        layer (lltm.LSTM): layer to copy
        weights (torch.dtype): None, or torch.qint8 for int8 weights. Default: None

    Example::

        packed = lltm.LSTM(32, 128).prepack()
        state = None
        for chunk in torch.randn(10, 5, 16, 32):
            output, state = packed(chunk, state)
    """

    _STATES = ("h_0", "c_0")
    _where = mode = "LSTM"


@documented
class GRU(Layer[Tensor], nn.RNNBase):
    """A multi-layer GRU, compatible with torch.nn.GRU (arguments, state_dict, results).

    Each layer and direction computes at every time step, from its input x and state h::

        r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)     reset gate
        z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)     update gate
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))  candidate
        h' = (1 - z) * n + z * h

    Args: ...

    Shape: ...

    Parameters of layer k (suffix ``_reverse``: second direction), uniform in ±1/sqrt(H)::

        weight_ih_l{k}  (3H, I): stacked W_ir, W_iz, W_in. For k > 0, I is D*H
        weight_hh_l{k}  (3H, H): stacked W_hr, W_hz, W_hn
        bias_ih_l{k}, bias_hh_l{k}  (3H), with bias=True

    Example::

        layer = lltm.GRU(32, 128, num_layers=2)
        output, h_n = layer(torch.randn(100, 16, 32))
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 32) for n in (35, 20, 7)])
        output, h_n = layer(packed)  # output is a PackedSequence
    """

    _CELL, _STATES = "gru", ("h_0",)
    _where = mode = "GRU"
    _TORCH = nn.GRU
    # update, reset, candidate; the reset gate is applied after the GEMM
    _ONNX: ClassVar = {"gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1})}
    _names = _NAMES_OF_TORCH

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedGRU:
        """Returns a copy with prepacked weights, as :meth:`LSTM.prepack` does."""
        return PrepackedGRU(self, weights)


@documented
class GRUCell(Step[Tensor], nn.RNNCellBase):
    """One step of a GRU, compatible with torch.nn.GRUCell (arguments, state_dict, results).

    Computes the next state from the input x and the state h::

        r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)     reset gate
        z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)     update gate
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))  candidate
        h' = (1 - z) * n + z * h

    Args: ...

    Shape: input (B, I) or (I); h and h' (B, H) or (H).

    Parameters, uniform in ±1/sqrt(H)::

        weight_ih  (3H, I): stacked W_ir, W_iz, W_in
        weight_hh  (3H, H): stacked W_hr, W_hz, W_hn
        bias_ih, bias_hh  (3H), or None with bias=False
    """

    _CELL, _STATES, _where = "gru", ("h",), "GRUCell"
    _TORCH = nn.GRUCell


class PrepackedGRU(Prepacked, Layer[Tensor]):
    """Inference-only GRU with prepacked weights, like :class:`PrepackedLSTM`."""

    _STATES = ("h_0",)
    _where = mode = "GRU"


@documented
class RNN(Layer[Tensor], nn.RNNBase):
    """A multi-layer Elman RNN, compatible with torch.nn.RNN (arguments, state_dict, results).

    Each layer and direction computes at every time step, from its input x and state h::

        h' = tanh(W_ih x + b_ih + W_hh h + b_hh)  or relu, by nonlinearity

    Args: ...
        nonlinearity (str): "tanh" or "relu". Default: "tanh"

    Shape: ...

    Parameters of layer k (suffix ``_reverse``: second direction), uniform in ±1/sqrt(H)::

        weight_ih_l{k}  (H, I); for k > 0, I is D*H
        weight_hh_l{k}  (H, H)
        bias_ih_l{k}, bias_hh_l{k}  (H), with bias=True

    Example::

        layer = lltm.RNN(32, 128, num_layers=2, nonlinearity="relu")
        output, h_n = layer(torch.randn(100, 16, 32))
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 32) for n in (35, 20, 7)])
        output, h_n = layer(packed)  # output is a PackedSequence
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
        self._make(locals())

    @property
    def _CELL(self) -> str:  # type: ignore[override]
        return self.mode.lower()

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedRNN:
        """Returns a copy with prepacked weights, as :meth:`LSTM.prepack` does. int8 needs tanh."""
        return PrepackedRNN(self, weights)


@documented
class RNNCell(Step[Tensor], nn.RNNCellBase):
    """One step of an Elman RNN, compatible with torch.nn.RNNCell (arguments, state_dict, results).

    Computes the next state from the input x and the state h::

        h' = tanh(W_ih x + b_ih + W_hh h + b_hh)  or relu, by nonlinearity

    Args: ...
        nonlinearity (str): "tanh" or "relu". Default: "tanh"

    Shape: input (B, I) or (I); h and h' (B, H) or (H).

    Parameters, uniform in ±1/sqrt(H)::

        weight_ih  (H, I)
        weight_hh  (H, H)
        bias_ih, bias_hh  (H), or None with bias=False
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
    expected = "nonlinearity to be 'tanh' or 'relu'"
    _check.expect(given in ("tanh", "relu"), where, expected, repr(given))
    return given


class PrepackedRNN(Prepacked, Layer[Tensor]):
    """Inference-only RNN with prepacked weights, like :class:`PrepackedLSTM`."""

    _STATES = ("h_0",)
    _where = mode = "RNN"
