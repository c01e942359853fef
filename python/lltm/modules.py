"""Modules in the manner of torch.nn.LSTMCell and torch.nn.LSTM.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _check, _sharding, functional

__all__ = ["LLTM", "LLTMCell", "PrepackedLLTM"]

State = tuple[Tensor, Tensor]


def _cell(input: Tensor, state: State, weights: Tensor, bias: Tensor | None) -> State:
    if type(input) is not Tensor:
        _sharding.prepare(input)
    h, c = torch.ops.lltm.cell(input, *state, weights, bias)
    return h, c


class LLTMCell(nn.Module):
    """One step of the Long-Long-Term-Memory unit, an LSTM without a forget gate.

    See :func:`lltm.functional.cell` for the equations.

    Args:
        input_size: I
        hidden_size: H
        bias: whether there is a bias
        device, dtype: of the parameters

    Parameters:
        weights: (3H, H+I)
        bias: (3H), or None

    both drawn from the uniform distribution on ±1/sqrt(H).

    Example::

        cell = lltm.LLTMCell(32, 128)
        h, c = cell(torch.randn(16, 32))
        h, c = cell(torch.randn(16, 32), (h, c))
    """

    input_size: int
    hidden_size: int
    weights: nn.Parameter
    bias: nn.Parameter | None

    # What computes the step, of arguments that are tensors; lltm.reference has another.
    _cell = staticmethod(_cell)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = _check.integer("LLTMCell", "input_size", input_size)
        self.hidden_size = _check.integer("LLTMCell", "hidden_size", hidden_size)
        _check.boolean("LLTMCell", "bias", bias)
        rows = 3 * hidden_size
        self.weights = nn.Parameter(
            torch.empty(rows, hidden_size + input_size, device=device, dtype=dtype)
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        _reset(self.parameters(), self.hidden_size)

    def forward(self, input: Tensor, state: State | None = None) -> State:
        """Takes one step.

        Args:
            input: (B, I), or (I) for one row without a batch
            state: (h, c), each (B, H) or (H); zeros if absent

        Returns:
            (h', c'), shaped as the state.
        """
        _check.tensor("LLTMCell", "input", input)
        batched = input.dim() == 2
        if not (batched or input.dim() == 1) or input.shape[-1] != self.input_size:
            size = self.input_size
            raise ValueError(
                f"lltm::LLTMCell: expected input of shape (B, {size}) or ({size},),"
                f" got {tuple(input.shape)}"
            )
        shape = (input.shape[0], self.hidden_size) if batched else (self.hidden_size,)
        if state is None:
            h = c = input.new_zeros(shape)
        else:
            h, c = _check.state("LLTMCell", ("h", "c"), state)
            _check.shape("LLTMCell", "h", h, shape)
            _check.shape("LLTMCell", "c", c, shape)
        if batched:
            return self._cell(input, (h, c), self.weights, self.bias)
        row = (h.unsqueeze(0), c.unsqueeze(0))
        h, c = self._cell(input.unsqueeze(0), row, self.weights, self.bias)
        return h.squeeze(0), c.squeeze(0)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}{bias}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        _flatten_biases(state_dict, [prefix + "bias"], 3 * self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Layer:
    """What the forms of a layer share: shapes, states, the order of layers and directions."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool

    def _run_direction(
        self, k: int, x: Tensor, state: State, batch_sizes: Tensor | None, reverse: bool
    ) -> tuple[Tensor, State]:
        """Runs the k-th direction, in the order of h_0 and h_n, over x, (T, B, .) or (N, .)."""
        raise NotImplementedError

    @overload
    def forward(self, input: Tensor, state: State | None = None) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self, input: PackedSequence, state: State | None = None
    ) -> tuple[PackedSequence, State]: ...

    def forward(
        self, input: Tensor | PackedSequence, state: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Runs over a sequence.

        Args:
            input: (T, B, I); (B, T, I) with batch_first; (T, I) for one sequence without a
                batch; or a PackedSequence, sorted or not
            state: (h_0, c_0), each (L*D, B, H), or (L*D, H) for unbatched input; zeros if absent

        Returns:
            (output, (h_n, c_n)): output like the input, with D*H features; the states after
            each row's last step, shaped as h_0 and c_0. T = 0 gives an empty output and the
            initial states.
        """
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, state)
        if not isinstance(input, Tensor):
            raise TypeError(
                "lltm::LLTM: expected input to be a tensor or a PackedSequence,"
                f" got {type(input).__name__}"
            )
        size = self.input_size
        if input.dim() not in (2, 3) or input.shape[-1] != size:
            batched_shape = f"(B, T, {size})" if self.batch_first else f"(T, B, {size})"
            raise ValueError(
                f"lltm::LLTM: expected input of shape {batched_shape} or (T, {size}),"
                f" got {tuple(input.shape)}"
            )
        batched = input.dim() == 3
        if not batched:
            input = input.unsqueeze(1)
        elif self.batch_first:
            input = input.transpose(0, 1)
        h_0, c_0 = self._initial_state(input, state, input.shape[1], batched)
        output, h_n, c_n = self._run(input, h_0, c_0, None)
        if not batched:
            return output.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        return (output.transpose(0, 1) if self.batch_first else output), (h_n, c_n)

    def _forward_packed(
        self, packed: PackedSequence, state: State | None
    ) -> tuple[PackedSequence, State]:
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        if data.dim() != 2 or data.shape[-1] != self.input_size:
            raise ValueError(
                f"lltm::LLTM: expected input of packed rows (N, {self.input_size}),"
                f" got {tuple(data.shape)}"
            )
        h_0, c_0 = self._initial_state(data, state, _packed_batch(packed, state), batched=True)
        # The states are in the caller's order, the packed rows from longest to shortest.
        if sorted_indices is not None and state is not None:
            h_0, c_0 = h_0.index_select(1, sorted_indices), c_0.index_select(1, sorted_indices)
        output, h_n, c_n = self._run(data, h_0, c_0, batch_sizes)
        if unsorted_indices is not None:
            h_n, c_n = h_n.index_select(1, unsorted_indices), c_n.index_select(1, unsorted_indices)
        output_packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return output_packed, (h_n, c_n)

    def _initial_state(
        self, input: Tensor, state: State | None, batch: int, batched: bool
    ) -> State:
        """Returns (h_0, c_0), each (L*D, B, H), checked."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        if state is None:
            zeros = input.new_zeros(count, batch, self.hidden_size)
            return zeros, zeros
        h_0, c_0 = _check.state("LLTM", ("h_0", "c_0"), state)
        shape = (count, batch, self.hidden_size) if batched else (count, self.hidden_size)
        _check.shape("LLTM", "h_0", h_0, shape)
        _check.shape("LLTM", "c_0", c_0, shape)
        return (h_0, c_0) if batched else (h_0.unsqueeze(1), c_0.unsqueeze(1))

    def _run(
        self, x: Tensor, h_0: Tensor, c_0: Tensor, batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs every layer and direction over x, (T, B, I) or (N, I)."""
        directions = 2 if self.bidirectional else 1
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            outputs: list[Tensor] = []
            for direction in range(directions):
                k = len(hs)
                output, (h, c) = self._run_direction(
                    k, x, (h_0[k], c_0[k]), batch_sizes, reverse=direction == 1
                )
                outputs.append(output)
                hs.append(h)
                cs.append(c)
            x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
        if len(hs) == 1:  # a view instead of a copy
            return x, hs[0].unsqueeze(0), cs[0].unsqueeze(0)
        return x, torch.stack(hs), torch.stack(cs)


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
        device, dtype: of the parameters

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction:
        weights_l{k}: (3H, H+I); for k > 0, I is D * H
        bias_l{k}: (3H)

    all drawn from the uniform distribution on ±1/sqrt(H).

    Example::

        layer = lltm.LLTM(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """

    # What runs one layer in one direction; lltm.reference has another.
    _sequence = staticmethod(functional.sequence)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = _check.integer("LLTM", "input_size", input_size)
        self.hidden_size = _check.integer("LLTM", "hidden_size", hidden_size)
        self.num_layers = _check.integer("LLTM", "num_layers", num_layers)
        self.bias = _check.boolean("LLTM", "bias", bias)
        self.batch_first = _check.boolean("LLTM", "batch_first", batch_first)
        self.dropout = _check.probability("LLTM", "dropout", dropout)
        self.bidirectional = _check.boolean("LLTM", "bidirectional", bidirectional)
        if self.dropout > 0 and num_layers == 1:
            warnings.warn(
                "lltm::LLTM: dropout is applied between layers, so it does nothing with"
                " num_layers=1",
                stacklevel=2,
            )

        rows = 3 * hidden_size
        directions = ("", "_reverse") if bidirectional else ("",)
        # (weights, bias) by layer and direction, in the order of h_0 and h_n.
        self._names: list[tuple[str, str]] = []
        for layer in range(num_layers):
            columns = input_size if layer == 0 else hidden_size * len(directions)
            for suffix in directions:
                names = f"weights_l{layer}{suffix}", f"bias_l{layer}{suffix}"
                self._names.append(names)
                weights = torch.empty(rows, hidden_size + columns, device=device, dtype=dtype)
                self.register_parameter(names[0], nn.Parameter(weights))
                self.register_parameter(
                    names[1],
                    nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None,
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
        return [
            [p for p in (getattr(self, weights), getattr(self, bias)) if p is not None]
            for weights, bias in self._names
        ]

    def _run_direction(
        self, k: int, x: Tensor, state: State, batch_sizes: Tensor | None, reverse: bool
    ) -> tuple[Tensor, State]:
        weights, bias = self._names[k]
        return self._sequence(
            x,
            state,
            getattr(self, weights),
            getattr(self, bias),
            batch_sizes=batch_sizes,
            reverse=reverse,
        )

    def prepack(self) -> PrepackedLLTM:
        """Returns this layer as it is now in a form for inference, the weights packed once."""
        parameters = [
            (getattr(self, weights), getattr(self, bias)) for weights, bias in self._names
        ]
        return PrepackedLLTM(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.batch_first,
            self.bidirectional,
            tuple(
                (functional.prepack(weights), None if bias is None else bias.detach().clone())
                for weights, bias in parameters
            ),
        )

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
        return text

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        biases = [prefix + bias for _, bias in self._names]
        _flatten_biases(state_dict, biases, 3 * self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class PrepackedLLTM(_Layer):
    """An LLTM layer for inference whose weights were laid out once; see :meth:`LLTM.prepack`.

    It is called like the layer, gives what the layer gives in evaluation mode, and saves what the
    layer does in every call: for short sequences and small batches, such as a stream that comes in
    chunks, that can be most of the time. It cannot be changed, and changes of the layer do not
    reach it. It has no derivatives, and autocast does nothing to it: input and states are of the
    dtype that the layer had. It can be copied, pickled, and used on another machine
    (``torch.load`` wants ``weights_only=False``, as for any object that is not a tensor).

    Example::

        layer = lltm.LLTM(32, 128).eval()
        packed = layer.prepack()
        state = None
        for chunk in stream:  # each (T, B, 32), of any T
            output, state = packed(chunk, state)
    """

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    # (weights, bias) by layer and direction, in the order of h_0 and h_n.
    _weights: tuple[tuple[Tensor, Tensor | None], ...] = field(repr=False)

    dropout: float = field(default=0.0, init=False, repr=False)
    training: bool = field(default=False, init=False, repr=False)

    __call__ = _Layer.forward

    def _run_direction(
        self, k: int, x: Tensor, state: State, batch_sizes: Tensor | None, reverse: bool
    ) -> tuple[Tensor, State]:
        weights, bias = self._weights[k]
        return functional.sequence_prepacked(
            x, state, weights, bias, batch_sizes=batch_sizes, reverse=reverse
        )


def _packed_batch(packed: PackedSequence, state: State | None) -> int:
    """The batch size; in a graph that is being traced, from a shape where one has it.

    There, a value out of batch_sizes is a size that nothing can be compared with.
    """
    if torch.compiler.is_compiling():
        if packed.sorted_indices is not None:
            return packed.sorted_indices.shape[0]
        if state is not None:  # the operator compares it with batch_sizes
            return _check.state("LLTM", ("h_0", "c_0"), state)[0].shape[1]
        if packed.batch_sizes.dtype != torch.int64:
            raise TypeError(
                "lltm::LLTM: expected batch_sizes of dtype int64, got"
                f" {str(packed.batch_sizes.dtype).removeprefix('torch.')}; torch.export can't trace"
                " pack_padded_sequence: pack outside and pass data and batch_sizes"
            )
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
