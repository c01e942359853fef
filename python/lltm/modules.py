"""Modules in the manner of torch.nn.LSTMCell and torch.nn.LSTM.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _C, _check, _fx, _script, _sharding, functional
from ._C import ArgumentError
from ._cell import GATES

__all__ = ["LLTM", "LLTMCell", "PrepackedLLTM"]

State = tuple[Tensor, Tensor]


class LLTMCell(nn.Module):
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

    input_size: int
    hidden_size: int
    weights: nn.Parameter
    bias: nn.Parameter | None

    _cell = "lltm"
    # The attributes that the operator `layer_step` takes.
    _PARAMETERS = ("weights", "bias")
    _OPTIONS = ("input_size", "hidden_size")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = _check.integer("LLTMCell", "input_size", input_size)
        self.hidden_size = _check.integer("LLTMCell", "hidden_size", hidden_size)
        with_bias = _check.flag("LLTMCell", "bias", bias)
        rows, columns = GATES * self.hidden_size, self.hidden_size + self.input_size
        self.weights = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if with_bias else None,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        _reset(self.parameters(), self.hidden_size)

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            hx: the state (h, c), each (B, H) or (H); zeros if absent

        Returns:
            (h', c'), shaped as the state.
        """
        if _calls_kernels():
            result = _C.layer_step(self, input, hx, self._PARAMETERS, self._OPTIONS)
            if result is not None:
                return result
        returned: State = step_of(
            self, input, hx, _operator("layer_step", self._PARAMETERS, self._OPTIONS)
        )
        return returned

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        _flatten_biases(state_dict, [prefix + "bias"], GATES * self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which compiles what this returns."""
        if type(self).forward is not LLTMCell.forward:
            return self  # compiled already, or a forward of the user's own
        return _script.cell(self, self._PARAMETERS)


class _Layer:
    """What the forms of a layer share: shapes, states, the order of layers and directions."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool

    # Of weights and bias by layer and direction, in the order of h_0 and h_n.
    _names: tuple[str, ...]

    _cell = "lltm"
    # The attributes that the operator `layer` takes after them.
    _OPTIONS = (
        "bias",
        "input_size",
        "hidden_size",
        "num_layers",
        "batch_first",
        "bidirectional",
        "_dropout_now",
        "checkpoint_steps",
        "_prepacked",
    )

    # Of a layer that was pickled before there was such an argument, or is prepacked.
    checkpoint_steps: int = 0

    # For code that was written for torch.nn.LSTM and asks.
    proj_size = 0
    mode = "LLTM"

    # Whether weights are those that functional.prepack returned.
    _prepacked = False

    @overload
    def forward(self, input: Tensor, hx: State | None = None) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: State | None = None
    ) -> tuple[PackedSequence, State]: ...

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Runs over a sequence.

        Args:
            input: (T, B, I); (B, T, I) with batch_first; (T, I) for one sequence without a
                batch; or a PackedSequence, sorted or not
            hx: the state (h_0, c_0), each (L*D, B, H), or (L*D, H) for unbatched input; zeros if
                absent

        Returns:
            (output, (h_n, c_n)): output like the input, with D*H features; the states after
            each row's last step, shaped as h_0 and c_0. T = 0 gives an empty output and the
            initial states.
        """
        if _calls_kernels():
            result = _C.layer(self, input, hx, self._names, self._OPTIONS)
            if result is not None:
                return result
        returned: tuple[Tensor | PackedSequence, State] = layer_of(
            self, input, hx, _operator("layer", self._names, self._OPTIONS)
        )
        return returned

    @property
    def _dropout_now(self) -> float:
        # Without dropout nobody asks whether it trains.
        applies = self.num_layers > 1 and self.dropout > 0 and self.training
        return self.dropout if applies else 0.0

    def _columns_of_input(self, k: int) -> int:
        """The features that the k-th direction, in the order of h_0 and h_n, reads."""
        directions = 2 if self.bidirectional else 1
        return self.input_size if k < directions else directions * self.hidden_size

    def _state_shape(self, batch: int) -> tuple[int, int, int]:
        return self.num_layers * (2 if self.bidirectional else 1), batch, self.hidden_size

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
                f"lltm::LLTM: expected input of {expected}, got {tuple(input.shape)}"
            )

    def get_expected_hidden_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """The shape of h_0 and h_n for this input."""
        if batch_sizes is not None:
            return self._state_shape(int(batch_sizes[0]) if len(batch_sizes) > 0 else 0)
        return self._state_shape(input.shape[0 if self.batch_first else 1])

    def get_expected_cell_size(
        self, input: Tensor, batch_sizes: Tensor | None
    ) -> tuple[int, int, int]:
        """The shape of c_0 and c_n for this input: that of h_0."""
        return self.get_expected_hidden_size(input, batch_sizes)

    def check_hidden_size(
        self,
        hx: Tensor,
        expected_hidden_size: tuple[int, int, int],
        msg: str = "expected a state of shape {}, got {}",
    ) -> None:
        """Raises an ArgumentError if the shape of h_0 or c_0 is another."""
        if hx.shape != expected_hidden_size:
            raise ArgumentError(f"lltm::LLTM: {msg.format(expected_hidden_size, tuple(hx.shape))}")

    def check_forward_args(self, input: Tensor, hidden: State, batch_sizes: Tensor | None) -> None:
        """Raises an ArgumentError if a shape is wrong."""
        self.check_input(input, batch_sizes)
        h_0, c_0 = _check.state("LLTM", ("h_0", "c_0"), hidden, "hidden")
        _check.shape("LLTM", "h_0", h_0, self.get_expected_hidden_size(input, batch_sizes))
        _check.shape("LLTM", "c_0", c_0, self.get_expected_cell_size(input, batch_sizes))

    def permute_hidden(self, hx: State, permutation: Tensor | None) -> State:
        """Puts the rows of both states in another order; without one returns them as they are."""
        if permutation is None:
            return hx
        h, c = hx
        return h.index_select(1, permutation), c.index_select(1, permutation)


class LLTM(_Layer, nn.Module):
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
    ) -> None:
        super().__init__()
        self.input_size = _check.integer("LLTM", "input_size", input_size)
        self.hidden_size = _check.integer("LLTM", "hidden_size", hidden_size)
        self.num_layers = _check.integer("LLTM", "num_layers", num_layers, _check.MOST_LAYERS)
        self.bias = _check.flag("LLTM", "bias", bias)
        self.batch_first = _check.flag("LLTM", "batch_first", batch_first)
        self.dropout = _check.probability("LLTM", "dropout", dropout)
        self.bidirectional = _check.flag("LLTM", "bidirectional", bidirectional)
        _check.no_projection("LLTM", proj_size)
        self.checkpoint_steps = _check.checkpoint_steps("LLTM", checkpoint_steps)
        if self.dropout > 0 and self.num_layers == 1:
            warnings.warn(
                "lltm::LLTM: dropout is applied between layers, so it does nothing with"
                " num_layers=1",
                stacklevel=2,
            )

        self._names = _names("weights", "bias", self.num_layers, self.bidirectional)
        rows = GATES * self.hidden_size
        for k, (weights_name, bias_name) in enumerate(_pairs(self._names)):
            columns = self.hidden_size + self._columns_of_input(k)
            weights = torch.empty(rows, columns, device=device, dtype=dtype)
            self.register_parameter(weights_name, nn.Parameter(weights))
            self.register_parameter(
                bias_name,
                nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if self.bias else None,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        _reset(self.parameters(), self.hidden_size)

    def flatten_parameters(self) -> None:
        """Does nothing; there because code written for torch.nn.LSTM calls it."""

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer and direction: [[weights_l0, bias_l0], ...]."""
        return [[getattr(self, name) for name in names] for names in self._all_weights]

    # What code for torch.nn.LSTM reads although it is private there.

    @property
    def _all_weights(self) -> list[list[str]]:
        return [list(pair) if self.bias else [pair[0]] for pair in _pairs(self._names)]

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for names in self._all_weights for name in names]

    @property
    def _flat_weights(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._flat_weights_names]

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLLTM:
        """Returns this layer as it is now in a form for inference, the weights packed once.

        Args:
            weights: torch.qint8 quantises the weights to 8 bits, each row by a scale of its own,
                and input and h as the layer runs: a quarter of the size of float32 and faster, at
                the price of small errors (:func:`lltm.functional.prepack`)
        """
        return PrepackedLLTM(self, weights)

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        if self.num_layers != 1:
            text += f", num_layers={self.num_layers}"
        if not self.bias:
            text += ", bias=False"
        if self.batch_first:
            text += ", batch_first=True"
        if self.dropout != 0:
            text += f", dropout={self.dropout}"
        if self.bidirectional:
            text += ", bidirectional=True"
        if self.checkpoint_steps != 0:
            text += f", checkpoint_steps={self.checkpoint_steps}"
        return text

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if f"{prefix}{PrepackedLLTM.WEIGHTS}_l0" in state_dict:
            error_msgs.append(
                "lltm::LLTM: expected the state_dict of a layer, got that of a prepacked one: load"
                " it into a PrepackedLLTM"
            )
        biases = [prefix + bias for bias in self._names[1::2]]
        _flatten_biases(state_dict, biases, GATES * self.hidden_size)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which compiles what this returns."""
        if type(self).forward is not _Layer.forward:
            return self  # compiled already, or a forward of the user's own
        return _script.layer(self, self._names)


class PrepackedLLTM(_Layer, nn.Module):
    """An LLTM layer for inference whose weights were laid out once; see :meth:`LLTM.prepack`.

    It is called like the layer, gives what the layer gives in evaluation mode, and saves what the
    layer does in every call: for short sequences and small batches, such as a stream that comes in
    chunks, that can be most of the time. It is a module, so ``model.rnn = model.rnn.prepack()``
    works, without parameters: its weights are buffers. It cannot be changed, nor converted to
    another dtype or device, and changes of the layer do not reach it; train() and eval() make no
    difference. It has no derivatives, and autocast does nothing to it: input and states are of the
    dtype that the layer had. It can be copied, pickled, and used on another machine
    (``torch.load`` wants ``weights_only=False``, as for any object that is not a tensor). Its
    state_dict fits a prepacked layer of the same sizes and dtype, and nothing else.

    Example::

        layer = lltm.LLTM(32, 128).eval()
        packed = layer.prepack()
        state = None
        for chunk in stream:  # each (T, B, 32), of any T
            output, state = packed(chunk, state)
    """

    # What the names of its buffers begin with: not those of a layer's parameters, which these
    # can't stand in for.
    WEIGHTS, BIAS = "packed_weights", "packed_bias"
    _prepacked = True
    _quantised: bool  # to 8 bits

    dtype: torch.dtype

    def __init__(self, layer: LLTM, weights: torch.dtype | None = None) -> None:
        super().__init__()
        names = _names(self.WEIGHTS, self.BIAS, layer.num_layers, layer.bidirectional)
        vars(self).update(
            input_size=layer.input_size,
            hidden_size=layer.hidden_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=0.0,
            bidirectional=layer.bidirectional,
            training=False,
            dtype=getattr(layer, layer._names[0]).dtype,
            _quantised=weights == torch.qint8,
            _names=names,
        )
        for (weights_name, bias_name), of_layer in zip(
            _pairs(names), _pairs(layer._names), strict=True
        ):
            own_weights, bias = (getattr(layer, name) for name in of_layer)
            self.register_buffer(weights_name, functional.prepack(own_weights, weights))
            self.register_buffer(bias_name, None if bias is None else bias.detach().clone())

    def extra_repr(self) -> str:
        shown = ("input_size", "hidden_size", "num_layers", "batch_first", "bidirectional")
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def __setattr__(self, name: str, value: Any) -> None:
        # PyTorch notes things on any module, under names that nobody else uses.
        if name == "_names" or (not name.startswith("_") and name != "training"):
            raise AttributeError(
                f"lltm::PrepackedLLTM: cannot set {name}: a prepacked layer does not change; change"
                " the layer and prepack it again"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"lltm::PrepackedLLTM: cannot delete {name}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrepackedLLTM:
        """Refuses what would convert the biases and leave the packed weights as they are."""
        weights: Any = self._buffers[self._names[0]]
        result = fn(weights.new_empty(0, dtype=self.dtype))
        if result.dtype != self.dtype:
            raise TypeError(
                f"lltm::PrepackedLLTM: expected to stay of dtype {_check.dtype(self.dtype)}, got"
                f" {_check.dtype(result.dtype)}: convert the layer and prepack it again"
            )
        if result.device != weights.device:
            raise RuntimeError(
                f"lltm::PrepackedLLTM: expected to stay on device {weights.device}, got"
                f" {result.device}: move the layer and prepack it there"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if f"{prefix}weights_l0" in state_dict:
            error_msgs.append(
                "lltm::PrepackedLLTM: expected the state_dict of a prepacked layer, got that of a"
                " layer: load it into an LLTM and prepack that"
            )
            return
        for k, names in enumerate(_pairs(self._names)):
            own: Any = self._buffers[names[0]]
            weights, bias = (state_dict.get(prefix + name) for name in names)
            if weights is None:
                continue  # the base class says so
            try:
                self._check_packed(k, weights, bias)
            except (TypeError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{names[0]}: {error}")
                return
            if local_metadata.get("assign_to_params_buffers", False):
                self._buffers.update(zip(names, (weights, bias), strict=True))
            elif weights.shape != own.shape or weights.dtype != own.dtype:
                # Packed on another machine.
                self._buffers[names[0]] = torch.empty_like(weights, device=own.device)
        # What was assigned is there already, and copied onto itself.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _check_packed(self, k: int, weights: Any, bias: Any) -> None:
        """Raises what the operator does if these are not packed weights of the k-th direction.

        And if they would change what the layer computes: int8 for the weights' own dtype, or that
        for int8. How a machine lays out either is its own affair.
        """
        _check.tensor("PrepackedLLTM", "weights", weights)
        options: Any = {"dtype": self.dtype, "device": weights.device}
        state = torch.zeros(1, self.hidden_size, **options)
        step = torch.zeros(1, 1, self._columns_of_input(k), **options)
        functional.sequence_prepacked(step, (state, state), weights, bias)
        expected, got = (
            "int8" if quantised else _check.dtype(self.dtype)
            for quantised in (self._quantised, _is_quantised(weights))
        )
        if got != expected:
            raise ArgumentError(
                f"lltm::PrepackedLLTM: expected weights prepacked in {expected}, got {got}"
            )

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which compiles what this returns."""
        if type(self).forward is not _Layer.forward:
            return self
        return _script.layer(self, self._names)


def _is_quantised(weights: Tensor) -> bool:
    """Whether weights that the operator takes are prepacked in int8, as their header says."""
    if weights.dtype != torch.uint8:
        return False  # as they are, on a machine without a packed form
    qint8 = 12  # an at::ScalarType, after magic, cell and dtype in the header (packed_weights.h)
    return int.from_bytes(weights[20:24].tolist(), "little") == qint8


def _calls_kernels() -> bool:
    """Whether a call is neither compiled nor traced."""
    return not (torch.compiler.is_dynamo_compiling() or _fx.is_tracing())


def _operator(name: str, parameters: Sequence[str], options: Sequence[str]) -> Callable[..., Any]:
    """An operator of modules as a function of the module, the input, two states and the rest."""

    def call(module: nn.Module, input: Tensor, h: Any, c: Any, *rest: Any) -> Any:
        if type(input) is not Tensor:
            _sharding.prepare(input)
        tensors = [getattr(module, name) for name in parameters]
        try:
            return getattr(torch.ops.lltm, name)(
                module._cell,
                input,
                h,
                c,
                [tensor for tensor in tensors if tensor is not None],
                *[getattr(module, name) for name in options],
                *rest,
            )
        except ValueError as error:
            raise _check.of_operator(error) from None

    return call


def step_of(module: LLTMCell, input: Tensor, hx: State | None, run: Callable[..., Any]) -> Any:
    """What forward of a cell returns; `run` takes the module, the input, h and c."""
    if _fx.is_tracing():
        node = _fx.node("LLTMCell", module, input, hx)
        if node is not None:
            return node
    _check.tensor("LLTMCell", "input", input)
    _check.not_nested("LLTMCell", input)
    h, c = (None, None) if hx is None else _check.state("LLTMCell", ("h", "c"), hx, "hx")
    return run(module, input, h, c)


def layer_of(module: _Layer, input: Any, hx: State | None, run: Callable[..., Any]) -> Any:
    """What forward of a layer returns; `run` takes the module, the input, h_0 and c_0.

    Of a PackedSequence it takes batch_sizes, sorted_indices and unsorted_indices too, after
    those. It returns output, h_n and c_n.
    """
    if _fx.is_tracing():
        node = _fx.node("LLTM", module, input, hx)
        if node is not None:
            return node
    rows: Any = input
    parts: list[Any] = []
    if isinstance(input, PackedSequence):
        rows, *parts = input
        _check.tensor("LLTM", "input", rows)
        if hx is None and torch.compiler.is_compiling():
            zeros = rows.new_zeros(module._state_shape(_packed_batch(input)))
            hx = (zeros, zeros)
    elif not isinstance(input, Tensor):
        raise TypeError(
            "lltm::LLTM: expected input to be a tensor or a PackedSequence,"
            f" got {type(input).__name__}"
        )
    elif input.is_nested:
        raise TypeError(
            "lltm::LLTM: expected input to be a tensor or a PackedSequence, got a nested"
            " tensor; make one of it with torch.nn.utils.rnn.pack_sequence(input.unbind(),"
            " enforce_sorted=False)"
        )
    h_0, c_0 = (None, None) if hx is None else _check.state("LLTM", ("h_0", "c_0"), hx, "hx")
    output, h_n, c_n = run(module, rows, h_0, c_0, *parts)
    return PackedSequence(output, *parts) if parts else output, (h_n, c_n)


def _names(weights: str, bias: str, num_layers: int, bidirectional: bool) -> tuple[str, ...]:
    """The names of weights and bias by layer and direction, in the order of h_0 and h_n."""
    return tuple(
        f"{name}_l{layer}{suffix}"
        for layer in range(num_layers)
        for suffix in (("", "_reverse") if bidirectional else ("",))
        for name in (weights, bias)
    )


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(names[::2], names[1::2], strict=True))


def _packed_batch(packed: PackedSequence) -> int:
    """The batch size, in a graph that is being traced.

    From a shape where one has it: a value out of batch_sizes is a size that nothing can be compared
    with.
    """
    if packed.sorted_indices is not None:
        return packed.sorted_indices.shape[0]
    if packed.batch_sizes.dtype != torch.int64:
        raise TypeError(
            "lltm::LLTM: expected batch_sizes of dtype int64, got"
            f" {_check.dtype(packed.batch_sizes.dtype)}; torch.export can't trace"
            " pack_padded_sequence: pack outside and pass data and batch_sizes"
        )
    if packed.batch_sizes.shape[0] == 0:
        return 0
    batch: int = packed.batch_sizes[0].item()  # type: ignore[assignment]
    return batch


def _reset(parameters: Iterable[nn.Parameter], hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for parameter in parameters:
        nn.init.uniform_(parameter, -bound, bound)


def _flatten_biases(state_dict: dict[str, Any], keys: Iterable[str], size: int) -> None:
    """Takes biases saved as (1, 3H), as the tutorial's module has them, for ones of (3H)."""
    for key in keys:
        bias = state_dict.get(key)
        if isinstance(bias, Tensor) and bias.shape == (1, size):
            state_dict[key] = bias.reshape(size)
