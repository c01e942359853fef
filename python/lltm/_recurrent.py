"""What the modules of every cell share: how they are called, their prepacked form.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _check
from ._C import ArgumentError
from .integrations import fx, sharding


class Recurrent(nn.Module):
    """A module of a cell: what its class says of the cell, its states, its parameters."""

    _CELL: str  # the operators' name of the cell
    _where: str  # how its errors begin
    # The states that the user passes and gets: a tuple, or of a cell with h alone one tensor.
    _STATES: tuple[str, ...]
    # The parameters of one direction; in layers these are stems of names (names_of).
    _parameter_names: tuple[str, ...] = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    _TORCH: type[nn.Module] | None = None  # torch.nn's class, in whose place lltm.replace_ puts it

    input_size: int
    hidden_size: int

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

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """Of the parameters of a direction that reads so many features."""
        hidden = self.hidden_size
        x_blocks, h_blocks, *_ = torch.ops.lltm._cell(self._CELL)
        x, h = ((1 + max(blocks)) * hidden for blocks in (x_blocks, h_blocks))
        of_gates = {
            "weights": (x, hidden + columns),  # joined, as the LLTM has them
            "bias": (x,),
            "weight_ih": (x, columns),
            "weight_hh": (h, hidden),
            "bias_ih": (x,),
            "bias_hh": (h,),
        }
        return {name: of_gates.get(name, (hidden,)) for name in self._parameter_names}

    def _register(
        self, names: Sequence[str], columns: int, bias: bool, device: Any, dtype: Any
    ) -> None:
        """Makes the parameters of a direction, of these names; biases that are not wanted None."""
        for name, (stem, shape) in zip(names, self._shapes(columns).items(), strict=True):
            value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            absent = stem in ("bias", "bias_ih", "bias_hh") and not bias
            self.register_parameter(name, None if absent else value)

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class Prepacked(Recurrent):
    """A layer whose weights were laid out once; PrepackedLLTM and so on."""

    # What the names of its buffers begin with: not those of a layer's parameters, which these
    # can't stand in for.
    WEIGHTS = "packed_weights"
    _BIASES: tuple[str, ...]
    _PROJECTION = "packed_weight_hr"
    _prepacked = True
    _quantised: bool  # to 8 bits

    # Of Layer (modules.py), which follows this among the bases of a class.
    num_layers: int
    bidirectional: bool
    proj_size: int
    _names: Sequence[str]
    _state_shape: Callable[[int], tuple[int, int, int]]
    _columns_of_input: Callable[[int], int]

    dtype: torch.dtype
    _FIRST_OF_LAYER: str  # the first key of the state_dict of the layer that it comes from

    def __init__(self, layer: Any, weights: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
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


def calls_kernels() -> bool:
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


def step_of(module: Any, input: Tensor, hx: Any, run: Callable[..., Any]) -> Any:
    """What forward of a cell returns; `run` takes the module, the input and the states."""
    where = module._where
    if fx.is_tracing():
        hx = fx.states(where, hx, len(module._STATES))
    _check.tensor(where, "input", input)
    _check.not_nested(where, input)
    return module._returned(run(module, input, module._states_of(hx)))


def layer_of(module: Any, input: Any, hx: Any, reset: Any, run: Callable[..., Any]) -> Any:
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
