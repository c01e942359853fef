"""What the modules of every cell share: how they are called, their prepacked form.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _C, _check
from ._C import ArgumentError
from .integrations import fx, script, sharding

State = tuple[Tensor, Tensor]


class Recurrent:
    """A module of a cell, of one step or of a layer."""

    _CELL: str  # the operators' name of the cell
    _where: str  # how its errors begin
    # The states that the user passes and gets: a tuple, or of a cell with h alone one tensor.
    _STATES: tuple[str, ...]

    def _in_tuple(self, hx: Any) -> Any:
        return hx if len(self._STATES) > 1 or hx is None else (hx,)

    def _states_of(self, hx: Any) -> list[Tensor]:
        """The states as the operators take them, checked."""
        if hx is None:
            return []
        if len(self._STATES) == 1:
            listed: list[Tensor] = fx.listed(_check.tensor(self._where, self._STATES[0], hx))
            return listed
        return _check.states(self._where, self._STATES, hx, "hx")

    def _returned(self, states: Sequence[Tensor]) -> Any:
        # By index: what torch.fx traces has no length.
        count = len(self._STATES)
        return states[0] if count == 1 else tuple(states[k] for k in range(count))


class Step(Recurrent):
    """One step: LLTMCell, LSTMCell, GRUCell; beside torch.nn.Module among the bases."""

    input_size: int
    hidden_size: int

    # The attributes that the operator `layer_step` takes.
    _parameter_names: tuple[str, ...]
    _OPTIONS = ("input_size", "hidden_size")

    def _run(self, input: Tensor, hx: Any) -> Any:
        """What forward returns."""
        if _calls_kernels():
            states = self._in_tuple(hx)
            result = _C.layer_step(self, input, states, self._parameter_names, self._OPTIONS)
            if result is not None:
                return result
        run = operator("layer_step", self._parameter_names, self._OPTIONS)
        return step_of(self, input, hx, run)

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script, which compiles what this returns."""
        if not _has_our_forward(self):
            return self
        return script.cell(self, self._parameter_names, len(self._STATES))  # type: ignore[arg-type]


class PairStep(Step):
    """Of a cell with h and c."""

    _STATES = ("h", "c")

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            hx: the state (h, c), each (B, H) or (H); zeros if absent

        Returns:
            (h', c'), shaped as the state.
        """
        returned: State = self._run(input, hx)
        return returned


class SingleStep(Step):
    """Of a cell with h alone."""

    _STATES = ("h",)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            hx: the state h, (B, H) or (H); zeros if absent

        Returns:
            h', shaped as the state.
        """
        returned: Tensor = self._run(input, hx)
        return returned


class Layer(Recurrent):
    """Layers over sequences, and their prepacked form: shapes, states, the order of layers."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool

    # Of the parameters by layer and direction, in the order of h_0 and h_n; of those that one may
    # be None.
    _names: Sequence[str]

    # The attributes that the operator `layer` takes after them.
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

    # Of a layer that was pickled before there were such arguments, or is prepacked.
    checkpoint_steps: int = 0
    recurrent_dropout: float = 0.0

    # For code that was written for torch.nn.LSTM and asks.
    proj_size = 0
    mode: str

    # Stems of the parameters that the cell has besides weights and biases.
    _OWN: Sequence[str] = ()

    # Whether weights are packed.
    _prepacked = False

    def _run(self, input: Any, hx: Any, reset: Any) -> Any:
        """What forward returns."""
        if _calls_kernels():
            states = self._in_tuple(hx)
            result = _C.layer(self, input, states, self._names, self._OPTIONS, reset)
            if result is not None:
                return result
        return layer_of(self, input, hx, reset, operator("layer", self._names, self._OPTIONS))

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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not self._prepacked and f"{prefix}{Prepacked.WEIGHTS}_l0" in state_dict:
            *_, error_msgs = args
            error_msgs.append(
                f"lltm::{self._where}: expected the state_dict of a layer, got that of a prepacked"
                f" one: load it into a Prepacked{self._where}"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def forward_packed(self, input: PackedSequence, hx: Any = None, reset: Any = None) -> Any:
        """As forward. TorchScript has this one for a PackedSequence, and forward for a tensor."""
        return self(input, hx, reset)  # type: ignore[operator]

    def flatten_parameters(self) -> None:
        """Does nothing; there because code written for torch.nn.LSTM calls it."""

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script, which compiles what this returns."""
        if not _has_our_forward(self):
            return self
        return script.layer(self, self._names, len(self._STATES))  # type: ignore[arg-type]


class PairLayer(Layer):
    """Of a cell with h and c."""

    _STATES = ("h_0", "c_0")

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
            hx: the state (h_0, c_0), each (L*D, B, H), or (L*D, H) for unbatched input; zeros if
                absent
            reset: bool, (T, B), laid out as the input, of a PackedSequence (N) in the order of its
                rows: where it is true, the state of that row starts anew before the step, in every
                layer and direction, and no gradient goes further back

        Returns:
            (output, (h_n, c_n)): output like the input, with D*H features, with proj_size D*P;
            the states after each row's last step, shaped as h_0 and c_0. T = 0 gives an empty
            output and the initial states.
        """
        returned: tuple[Tensor | PackedSequence, State] = self._run(input, hx, reset)
        return returned


class SingleLayer(Layer):
    """Of a cell with h alone."""

    _STATES = ("h_0",)

    @overload
    def forward(
        self, input: Tensor, hx: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Runs over a sequence.

        Args:
            input: (T, B, I); (B, T, I) with batch_first; (T, I) for one sequence without a
                batch; or a PackedSequence, sorted or not
            hx: the state h_0, (L*D, B, H), or (L*D, H) for unbatched input; zeros if absent
            reset: bool, (T, B), laid out as the input, of a PackedSequence (N) in the order of its
                rows: where it is true, the state of that row starts anew before the step, in every
                layer and direction, and no gradient goes further back

        Returns:
            (output, h_n): output like the input, with D*H features; the state after each row's
            last step, shaped as h_0. T = 0 gives an empty output and the initial state.
        """
        returned: tuple[Tensor | PackedSequence, Tensor] = self._run(input, hx, reset)
        return returned


class OfParameters:
    """A module that makes its parameters here: those of torch.nn's cells torch.nn makes."""

    hidden_size: int

    _BIASES_OF_ALL = ("bias", "bias_ih", "bias_hh")

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """Of the parameters of a direction, which reads so many features, by stem."""
        raise NotImplementedError

    def _draw(self, stem: str, parameter: Tensor) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(parameter, -bound, bound)

    def _register(
        self, names: Sequence[str], columns: int, bias: bool, device: Any, dtype: Any
    ) -> None:
        """Of a direction, by the names of its parameters."""
        for name, (stem, shape) in zip(names, self._shapes(columns).items(), strict=True):
            value = torch.empty(shape, device=device, dtype=dtype)
            absent = stem in self._BIASES_OF_ALL and not bias
            module: Any = self
            module.register_parameter(name, None if absent else nn.Parameter(value))

    def _stems(self) -> dict[str, str]:
        """By the names of the parameters."""
        return {stem: stem for stem in self._shapes(0)}

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        stems = self._stems()
        module: Any = self
        # What is registered: an attribute may be computed from it.
        for path, parameter in module.named_parameters():
            names = (name for name in path.split(".") if name in stems)
            self._draw(stems.get(next(names, ""), ""), parameter)


class MadeStep(OfParameters, Step, nn.Module):
    """One step, with its constructor: LLTMCell and the cells that users have written."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = _check.integer(self._where, "input_size", input_size)
        self.hidden_size = _check.integer(self._where, "hidden_size", hidden_size)
        with_bias = _check.flag(self._where, "bias", bias)
        self._register([*self._shapes(0)], self.input_size, with_bias, device, dtype)
        self.reset_parameters()

    def extra_repr(self) -> str:
        bias = ", bias=False" if None in self._parameters.values() else ""
        return f"{self.input_size}, {self.hidden_size}{bias}"


class MadeLayer(OfParameters, Layer, nn.Module):
    """A layer, with its constructor: LLTM and the cells that users have written."""

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
        super().__init__()
        where = self._where
        self.input_size = _check.integer(where, "input_size", input_size)
        self.hidden_size = _check.integer(where, "hidden_size", hidden_size)
        self.num_layers = _check.integer(where, "num_layers", num_layers, _check.MOST_LAYERS)
        self.bias = _check.flag(where, "bias", bias)
        self.batch_first = _check.flag(where, "batch_first", batch_first)
        self.dropout = _check.probability(where, "dropout", dropout)
        self.bidirectional = _check.flag(where, "bidirectional", bidirectional)
        self.checkpoint_steps = _check.checkpoint_steps(where, checkpoint_steps)
        self.recurrent_dropout = _check.probability(where, "recurrent_dropout", recurrent_dropout)
        if self.dropout > 0 and self.num_layers == 1:
            warnings.warn(
                f"lltm::{where}: dropout is applied between layers, so it does nothing with"
                " num_layers=1",
                stacklevel=2 if type(self).__init__ is MadeLayer.__init__ else 3,
            )
        self._names = names_of(tuple(self._shapes(0)), self.num_layers, self.bidirectional)
        for k, names in enumerate(self._by_direction):
            self._register(names, self._columns_of_input(k), self.bias, device, dtype)
        self.reset_parameters()

    @property
    def _by_direction(self) -> list[Sequence[str]]:
        """The names of the parameters of each layer and direction."""
        each = len(self._shapes(0))
        return [self._names[k : k + each] for k in range(0, len(self._names), each)]

    def _stems(self) -> dict[str, str]:
        directions = len(self._by_direction)
        return dict(zip(self._names, [*self._shapes(0)] * directions, strict=True))

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer and direction: [[weights_l0, bias_l0], ...]."""
        return [
            [parameter for name in names if (parameter := getattr(self, name)) is not None]
            for names in self._by_direction
        ]

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        for name, default in (
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


class Prepacked(Layer, nn.Module):
    """A layer whose weights were laid out once; PrepackedLLTM and so on."""

    # What the names of its buffers begin with: not those of a layer's parameters, which these
    # can't stand in for.
    WEIGHTS = "packed_weights"
    _BIASES: tuple[str, ...]
    _PROJECTION = "packed_weight_hr"
    _prepacked = True
    _quantised: bool  # to 8 bits

    dtype: torch.dtype
    _FIRST_OF_LAYER: str  # the first key of the state_dict of the layer that it comes from

    def __init__(self, layer: Any, weights: torch.dtype | None = None) -> None:
        super().__init__()
        stems = (
            self.WEIGHTS,
            *self._BIASES,
            *(f"packed_{name}" for name in layer._OWN),
            *([self._PROJECTION] if layer.proj_size > 0 else []),
        )
        vars(self).update(
            input_size=layer.input_size,
            hidden_size=layer.hidden_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=0.0,
            bidirectional=layer.bidirectional,
            proj_size=layer.proj_size,
            training=False,
            dtype=getattr(layer, layer._names[0]).dtype,
            _quantised=weights == torch.qint8,
            _names=names_of(stems, layer.num_layers, layer.bidirectional),
        )
        for k, (packed, *others) in enumerate(self._by_direction):
            named = (getattr(layer, name) for name in layer._names_of(k))
            tensors = [tensor.detach() for tensor in named if tensor is not None]
            count = 1 if len(self._BIASES) == 1 else 2
            matrices = tensors[:count]
            no_biases = [] if layer.bias else [None] * len(self._BIASES)
            given: list[Any] = [*no_biases, *tensors[count:]]
            if self.proj_size > 0:
                weight_ih, weight_hh = matrices
                # What the layer multiplies (api/projection.h).
                matrices = [torch.cat([weight_ih, weight_hh], 1), weight_hh @ given[-1]]
            self.register_buffer(packed, _prepack(self._CELL, matrices, weights))
            for name, tensor in zip(others, given, strict=True):
                self.register_buffer(name, None if tensor is None else tensor.clone())

    @property
    def _by_direction(self) -> list[Sequence[str]]:
        """The names of packed weights, biases and projection of each direction."""
        each = len(self._names) // self._state_shape(0)[0]
        return [self._names[k : k + each] for k in range(0, len(self._names), each)]

    def extra_repr(self) -> str:
        shown = ["input_size", "hidden_size", "num_layers", "batch_first", "bidirectional"]
        shown += ["proj_size"] if self.proj_size > 0 else []
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def __setattr__(self, name: str, value: Any) -> None:
        # PyTorch notes things on any module, under names that nobody else uses.
        if name == "_names" or (not name.startswith("_") and name != "training"):
            raise AttributeError(
                f"lltm::{type(self).__name__}: cannot set {name}: a prepacked layer does not"
                " change; change the layer and prepack it again"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"lltm::{type(self).__name__}: cannot delete {name}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Prepacked:
        """Refuses what would convert the biases and leave the packed weights as they are."""
        weights: Any = self._buffers[self._names[0]]
        result = fn(weights.new_empty(0, dtype=self.dtype))
        if result.dtype != self.dtype:
            own, other = _check.dtype(self.dtype), _check.dtype(result.dtype)
            raise TypeError(
                f"lltm::{type(self).__name__}: expected to stay of dtype {own}, got {other}:"
                " convert the layer and prepack it again"
            )
        if result.device != weights.device:
            raise RuntimeError(
                f"lltm::{type(self).__name__}: expected to stay on device {weights.device}, got"
                f" {result.device}: move the layer and prepack it there"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        *_, error_msgs = args
        if f"{prefix}{self._FIRST_OF_LAYER}" in state_dict:
            error_msgs.append(
                f"lltm::{type(self).__name__}: expected the state_dict of a prepacked layer, got"
                f" that of a layer: load it into {_check.with_article(self._where)} and prepack"
                " that"
            )
            return
        for k, names in enumerate(self._by_direction):
            own: Any = self._buffers[names[0]]
            weights, *others = (state_dict.get(prefix + name) for name in names)
            if weights is None:
                continue  # the base class says so
            try:
                self._check_packed(k, weights, others)
            except (TypeError, ValueError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{names[0]}: {error}")
                return
            if local_metadata.get("assign_to_params_buffers", False):
                given = zip(names, (weights, *others), strict=True)
                self._buffers.update((name, t) for name, t in given if t is not None)
            elif weights.shape != own.shape or weights.dtype != own.dtype:
                # Packed on another machine.
                self._buffers[names[0]] = torch.empty_like(weights, device=own.device)
        # What was assigned is there already, and copied onto itself.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _check_packed(self, k: int, weights: Any, others: Sequence[Any]) -> None:
        """Raises what the operator does if these are not packed weights of the k-th direction.

        And if they would change what the layer computes: int8 for the weights' own dtype, or that
        for int8. The layout may differ between machines.
        """
        where = type(self).__name__
        _check.tensor(where, "weights", weights)
        options: Any = {"dtype": self.dtype, "device": weights.device}
        own = [self._buffers[name] for name in self._by_direction[k][1:]]
        given = [b for b, a in zip(others, own, strict=True) if a is not None]
        if None in given:
            return  # the base class says so
        if self.proj_size > 0:
            expected_shape = (self.proj_size, self.hidden_size)
            _check.shape(where, self._PROJECTION, others[-1], expected_shape)
        size = self._columns_of_input(k)
        step = torch.zeros(1, 1, size, **options)
        zeros = [torch.zeros(t.shape, **options) for t in own if t is not None]
        # First beside biases of this layer, so that the weights are what is blamed for theirs.
        for each in (zeros, given):
            sizes = (self.bias, size, self.hidden_size, 1, False, False, 0.0, 0.0, 0, True)
            torch.ops.lltm.layer(self._CELL, step, [], [weights, *each], *sizes)
        expected, got = (
            "int8" if quantised else _check.dtype(self.dtype)
            for quantised in (self._quantised, _is_quantised(weights))
        )
        if got != expected:
            raise ArgumentError(
                f"lltm::{where}: expected weights prepacked in {expected}, got {got}"
            )


def _is_quantised(weights: Tensor) -> bool:
    """Whether weights that the operator takes are prepacked in int8, as their header says."""
    if weights.dtype != torch.uint8:
        return False  # as they are, on a machine without a packed form
    qint8 = 12  # an at::ScalarType, after magic, cell and dtype in the header (packed_weights.h)
    return int.from_bytes(weights[20:24].tolist(), "little") == qint8


fx.make_leaves(Recurrent)


def _has_our_forward(module: Any) -> bool:
    """False if torch.jit.script compiles it already, or it has a forward of the user's own."""
    return type(module).forward.__module__ in (__name__, "lltm.modules", "lltm.custom.modules")


def _calls_kernels() -> bool:
    """Whether a call is neither compiled nor traced."""
    return not (torch.compiler.is_dynamo_compiling() or fx.is_tracing())


def operator(name: str, parameters: Sequence[str], options: Sequence[str]) -> Callable[..., Any]:
    """An operator of modules as a function of the module, the input, its states and the rest.

    `parameters` and `options` are names of the module's attributes.
    """

    def call(
        module: Any, input: Tensor, states: list[Tensor], *rest: Any, **named_rest: Any
    ) -> Any:
        if type(input) is not Tensor:
            sharding.prepare(input)
        named = (getattr(module, name) for name in parameters)
        tensors = [tensor for tensor in named if tensor is not None]
        try:
            return getattr(torch.ops.lltm, name)(
                module._CELL,
                input,
                states,
                tensors,
                *[getattr(module, name) for name in options],
                *rest,
                **named_rest,
            )
        except ValueError as error:
            raise _check.of_operator(error) from None

    return call


def step_of(module: Step, input: Tensor, hx: Any, run: Callable[..., Any]) -> Any:
    """What forward of a cell returns; `run` takes the module, the input and the states."""
    where = module._where
    if fx.is_tracing():
        hx = fx.states(where, hx, len(module._STATES))
    _check.tensor(where, "input", input)
    _check.not_nested(where, input)
    return module._returned(run(module, input, module._states_of(hx)))


def layer_of(module: Layer, input: Any, hx: Any, reset: Any, run: Callable[..., Any]) -> Any:
    """What forward of a layer returns; `run` takes the module, the input and the states.

    Of a PackedSequence it takes batch_sizes, sorted_indices and unsorted_indices too, after
    those, and if there is one the keyword reset. It returns the output and the states.
    """
    where = module._where
    if fx.is_tracing():
        hx = fx.states(where, hx, len(module._STATES))
    rows: Any = input
    parts: list[Any] = []
    if isinstance(input, PackedSequence):
        rows, *parts = input
        _check.tensor(where, "input", rows)
        if hx is None and torch.compiler.is_compiling():
            hx = module._first_states(rows, _packed_batch(where, input))
    elif not isinstance(input, _check.TENSORS):
        raise TypeError(
            f"lltm::{where}: expected input to be a tensor or a PackedSequence,"
            f" got {type(input).__name__}"
        )
    elif _check.is_nested(input):
        raise TypeError(
            f"lltm::{where}: expected input to be a tensor or a PackedSequence, got a nested"
            " tensor; make one of it with torch.nn.utils.rnn.pack_sequence(input.unbind(),"
            " enforce_sorted=False)"
        )
    _check.optional_tensor(where, "reset", reset)
    last = {} if reset is None else {"reset": reset}
    output, states = run(module, rows, module._states_of(hx), *parts, **last)
    state = module._returned(states)
    return PackedSequence(output, *parts) if parts else output, state


def names_of(stems: Sequence[str], num_layers: int, bidirectional: bool) -> tuple[str, ...]:
    """The names of parameters by layer and direction, in the order of h_0 and h_n."""
    return tuple(
        f"{stem}_l{layer}{suffix}"
        for layer in range(num_layers)
        for suffix in (("", "_reverse") if bidirectional else ("",))
        for stem in stems
    )


def _prepack(cell: str, matrices: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Of joined weights or of weight_ih and weight_hh."""
    _check.optional_dtype("prepack", "dtype", dtype)
    try:
        packed: Tensor = torch.ops.lltm.prepack(cell, *matrices, dtype=dtype)
    except ValueError as error:
        raise _check.of_operator(error) from None
    return packed


def _packed_batch(where: str, packed: PackedSequence) -> int:
    """The batch size, in a graph that is being traced.

    From a shape where one has it: a value out of batch_sizes is a size that nothing can be compared
    with.
    """
    if packed.sorted_indices is not None:
        return packed.sorted_indices.shape[0]
    if packed.batch_sizes.dtype != torch.int64:
        raise TypeError(
            f"lltm::{where}: expected batch_sizes of dtype int64, got"
            f" {_check.dtype(packed.batch_sizes.dtype)}; torch.export can't trace"
            " pack_padded_sequence: pack outside and pass data and batch_sizes"
        )
    if packed.batch_sizes.shape[0] == 0:
        return 0
    batch: int = packed.batch_sizes[0].item()  # type: ignore[assignment]
    return batch
