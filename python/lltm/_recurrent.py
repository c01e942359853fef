"""Parameters and calls that the modules of all cells share.

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
