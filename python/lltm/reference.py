"""Reference implementation: readable definitions of the cells in eager PyTorch operations.

`step` and `sequence` have the arguments of lltm.functional, the classes the arguments and the
state_dict of the lltm classes of the same name. Tests compare lltm with this reference, and
benchmarks measure against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check, _recurrent, modules
from ._C import ArgumentError

__all__ = ["GRU", "LLTM", "LSTM", "RNN", "GRUCell", "LLTMCell", "LSTMCell", "RNNCell"]
__all__ += ["sequence", "step"]

# ---- the equations ----------------------------------------------------------------
#
# Each function computes the next states, h first, from the states and the pre-activations
# W_ih x + b_ih + W_hh h + b_hh. A gate that needs W_ih x and W_hh h separately has two of them.


def _lltm(z: Sequence[Tensor], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    z_i, z_o, z_g = z
    c = c + torch.sigmoid(z_i) * F.elu(z_g)
    return torch.sigmoid(z_o) * torch.tanh(c), c


def _lstm(z: Sequence[Tensor], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    z_i, z_f, z_g, z_o = z
    c = torch.sigmoid(z_f) * c + torch.sigmoid(z_i) * torch.tanh(z_g)
    return torch.sigmoid(z_o) * torch.tanh(c), c


def _gru(z: Sequence[Tensor], h: Tensor) -> tuple[Tensor]:
    z_r, z_u, x_n, h_n = z
    r, u = torch.sigmoid(z_r), torch.sigmoid(z_u)
    n = torch.tanh(x_n + r * h_n)
    return (n + u * (h - n),)  # (1 - u) n + u h


def _rnn_tanh(z: Sequence[Tensor], h: Tensor) -> tuple[Tensor]:
    return (torch.tanh(z[0]),)


def _rnn_relu(z: Sequence[Tensor], h: Tensor) -> tuple[Tensor]:
    return (torch.relu(z[0]),)


class Equations(NamedTuple):
    """Definition of a cell: gates with rows in weight_ih and in weight_hh, and a function.

    The function accepts the gates of weight_ih, then the others of weight_hh and gates_input. A
    gate of products is a function of the value that its recurrent weights multiply.
    """

    gates_x: Sequence[str]
    gates_h: Sequence[str]
    function: Callable[..., Sequence[Tensor]]
    joined: bool = False  # True if the parameters are a matrix [W_hh, W_ih] and one bias
    gates_input: Sequence[str] = ()  # gates that read the last columns of the input, H columns each
    products: Sequence[str] = ()  # gates of weight_hh that multiply another value than h
    no_bias: Sequence[str] = ()  # gates without rows in bias_ih and bias_hh
    outputs: Sequence[int] = (0,)  # indices of the states that a layer returns of each step
    initial: Sequence[float] = (0.0, 0.0)  # initial values of the states, which resets restore


_EQUATIONS = {
    "lltm": Equations("iog", "iog", _lltm, joined=True),
    "lstm": Equations("ifgo", "ifgo", _lstm),
    "gru": Equations(("r", "u", "x_n"), ("r", "u", "h_n"), _gru),
    "rnn_tanh": Equations("z", "z", _rnn_tanh),
    "rnn_relu": Equations("z", "z", _rnn_relu),
}


def _after(
    equations: Equations,
    x: Tensor,
    read: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Any],
) -> Sequence[Tensor]:
    """Computes the next states. `read` is the h that the GEMM reads, possibly with dropout.

    The cell's parameters follow weights and biases, and are passed to the function.
    """
    if equations.joined:
        z = F.linear(torch.cat([read, x], dim=1), *parameters)
        return equations.function(z.chunk(len(equations.gates_x), dim=1), *states)
    weight_ih, weight_hh, *rest = parameters
    gates = _pre_activations(equations, x, read, weight_ih, weight_hh, *rest[:2])
    return equations.function(gates, *states, *rest[2:])


def _pre_activations(
    equations: Equations,
    x: Tensor,
    read: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Sequence[Any]:
    """Computes each gate's pre-activation, or the function that computes it."""
    gates_x, gates_h, _, _, gates_input, products = equations[:6]
    size, count = read.shape[1], len(gates_input)
    x, *from_input = x.split([x.shape[1] - count * size, *[size] * count], dim=1)
    z_x = F.linear(x, weight_ih, bias_ih).chunk(max(1, len(gates_x)), dim=1)
    z_h = F.linear(read, weight_hh, bias_hh).chunk(max(1, len(gates_h)), dim=1)
    z: dict[str, Any] = dict.fromkeys((*gates_x, *gates_h, *gates_input), 0)
    z |= zip((*gates_x, *gates_input), (*z_x[: len(gates_x)], *from_input), strict=True)

    def product(v: Tensor, k: int, others: Any) -> Tensor:
        rows = slice(k * size, (k + 1) * size)
        bias = None if bias_hh is None else bias_hh[rows]
        added: Tensor = others + F.linear(v.expand_as(read), weight_hh[rows], bias)
        return added

    for k, gate in enumerate(gates_h):
        others = z[gate]
        z[gate] = partial(product, k=k, others=others) if gate in products else others + z_h[k]
    return [*z.values()]


def _steps(
    equations: Equations,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    reset: Tensor | None = None,
    recurrent_mask: Tensor | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Loops over the steps of a layer and direction. Returns the output and the last states."""
    _check_reset(reset, input)
    steps = input.unbind(0) if batch_sizes is None else input.split(batch_sizes.tolist())
    resets: Sequence[Tensor | None] = [None] * max(1, len(steps))
    if reset is not None and len(steps) > 0:
        resets = reset.split([x.shape[0] for x in steps]) if reset.dim() == 1 else reset.unbind(0)
    # If T = 0, run a step with batch size 0: then the results depend on every argument, as with
    # torch.nn.functional.linear.
    steps = steps or (input.reshape(0, input.shape[-1]),)
    outputs: list[Tensor] = []
    for x, mask in zip(*(reversed(s) if reverse else s for s in (steps, resets)), strict=True):
        # The other sequences have ended or, in reverse, not begun. They keep their state.
        rows = x.shape[0]
        before = [state[:rows] for state in states]
        if mask is not None:
            pairs = zip(before, equations.initial, strict=False)
            before = [state.masked_fill(mask.unsqueeze(1), first) for state, first in pairs]
        read = before[0] if recurrent_mask is None else before[0] * recurrent_mask[:rows]
        after = _after(equations, x, read, before, parameters)
        outputs.append(torch.cat([after[k] for k in equations.outputs], 1))
        if rows < states[0].shape[0]:
            after = [torch.cat([new, old[rows:]]) for new, old in zip(after, states, strict=True)]
        states = after
    if reverse:
        outputs.reverse()
    return torch.cat(outputs).view(*input.shape[:-1], outputs[0].shape[1]), states


def step(
    cell: str,
    input: Tensor,
    states: Any,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Any:
    """One step of a built-in cell; see :func:`lltm.functional.step`.

    The weights are those of the cell's modules: concatenated for the LLTM, two matrices for others.
    """
    states = (states,) if isinstance(states, Tensor) else states
    parameters = _parameters(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    return _returned(_after(_EQUATIONS[cell], input, states[0], states, parameters))


def sequence(
    cell: str,
    input: Tensor,
    states: Any,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    reset: Tensor | None = None,
    checkpoint_steps: int = 0,
    recurrent_mask: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """A loop over the steps of a built-in cell; see :func:`lltm.functional.sequence`.

    checkpoint_steps has no effect.
    """
    states = (states,) if isinstance(states, Tensor) else states
    parameters = _parameters(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    options = (batch_sizes, reverse, reset, recurrent_mask)
    output, last = _steps(_EQUATIONS[cell], input, states, parameters, *options)
    return output, _returned(last)


def _parameters(cell: str, *parameters: Any) -> Sequence[Any]:
    if cell not in _EQUATIONS:
        known = ", ".join(_EQUATIONS)
        raise ArgumentError(f"lltm::reference: expected cell to be one of {known}, got {cell!r}")
    if not _EQUATIONS[cell].joined:
        return parameters
    weight_ih, weight_hh, *biases = parameters
    weights = weight_ih if weight_hh is None else torch.cat([weight_hh, weight_ih], dim=1)
    biases = [bias for bias in biases if bias is not None]
    return weights, sum(biases) if biases else None


def _returned(states: Sequence[Tensor]) -> Any:
    return tuple(states) if len(states) > 1 else states[0]


class _Reference:
    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script would compile calls of the operators instead of this reference.
        name = type(self).__name__
        raise NotImplementedError(
            f"lltm::reference.{name}: torch.jit.script supports lltm.{name}, which loads the same"
            " state_dict"
        )


class _Cell(_Reference):
    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        return _recurrent.step_of(self, input, hx, _step)


class _Layer(_Reference):
    def forward(self: Any, input: Any, hx: Any = None, reset: Tensor | None = None) -> Any:
        run = partial(_layer, equations=_EQUATIONS[self._CELL], training=self.training)
        return _recurrent.layer_of(self, input, hx, reset, run)

    def prepack(self, weights: torch.dtype | None = None) -> NoReturn:
        name = type(self).__name__
        raise NotImplementedError(f"lltm::reference.{name}: the reference cannot be prepacked")


class LLTMCell(_Cell, modules.LLTMCell): ...


class LSTMCell(_Cell, modules.LSTMCell): ...


class GRUCell(_Cell, modules.GRUCell): ...


class RNNCell(_Cell, modules.RNNCell): ...


class LLTM(_Layer, modules.LLTM): ...


class LSTM(_Layer, modules.LSTM): ...


class GRU(_Layer, modules.GRU): ...


class RNN(_Layer, modules.RNN): ...


for _class in (LLTMCell, LSTMCell, GRUCell, RNNCell, LLTM, LSTM, GRU, RNN):
    _summary = f"lltm.{_class.__name__} in eager PyTorch, with its arguments and parameters."
    _class.__doc__ = f"{_summary}\n\n    {_class.__bases__[1].__doc__}"


def _step(module: Any, input: Tensor, states: list[Tensor]) -> list[Tensor]:
    where = module._where
    parameters = [getattr(module, name) for name in module._parameter_names]
    _check.like(where, "input", input, parameters[0], "parameters")
    if input.dim() not in (1, 2) or input.shape[-1] != module.input_size:
        size = module.input_size
        raise ArgumentError(
            f"lltm::{where}: expected input of shape (B, {size}) or ({size},),"
            f" got {tuple(input.shape)}"
        )
    shape = (*input.shape[:-1], module.hidden_size)
    states = states or [input.new_zeros(shape)] * len(module._STATES)
    for name, state in zip(module._STATES, states, strict=True):
        _check.shape(where, name, state, shape)
    before = [state.reshape(-1, module.hidden_size) for state in states]
    rows = input.reshape(-1, module.input_size)
    after = _after(_EQUATIONS[module._CELL], rows, before[0], before, parameters)
    return [state.reshape(shape) for state in after]


def _without_heads(weight_hh: Tensor) -> Tensor:
    """Returns (G_h H, H), zero between heads, from (heads, G_h H/heads, H/heads)."""
    heads, rows, units = weight_hh.shape
    last = weight_hh.reshape(heads, rows // units, units, units).permute(1, 2, 3, 0)
    return torch.diag_embed(last, 0, 1, 3).reshape(heads * rows, heads * units)


def _all_biases(
    equations: Equations, biases: Sequence[Tensor | None], size: int
) -> list[Tensor | None]:
    """Returns bias_ih and bias_hh with zeros (H) for the gates without biases."""
    made: list[Tensor | None] = []
    for gates, bias in zip((equations.gates_x, equations.gates_h), biases, strict=True):
        count = len({*gates} - {*equations.no_bias})
        if bias is not None and count < len(gates):
            of_gates = iter(bias.split(size))
            zeros = bias.new_zeros(size)
            bias = torch.cat([zeros if g in equations.no_bias else next(of_gates) for g in gates])
        made.append(bias)
    return made


def _direction(
    module: Any,
    equations: Equations,
    x: Tensor,
    states: Sequence[Tensor],
    k: int,
    options: tuple[Tensor | None, bool, Tensor | None],
    training: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Runs the steps of direction k, in the order of h_0."""
    mask = None
    if module.recurrent_dropout > 0 and training:
        mask = F.dropout(torch.ones_like(states[0]), module.recurrent_dropout)
    parameters = [getattr(module, name) for name in module._registered_of(k)]
    if getattr(module, "heads", 1) > 1:
        parameters[1] = _without_heads(parameters[1])
    if equations.no_bias:
        parameters[2:4] = _all_biases(equations, parameters[2:4], module.hidden_size)
    if module.proj_size > 0:
        *parameters, weight_hr = parameters
        equations = _projected(equations, weight_hr)
    return _steps(equations, x, states, parameters, *options, mask)


def _layer(
    module: Any,
    input: Tensor,
    states: list[Tensor],
    batch_sizes: Tensor | None = None,
    sorted_indices: Tensor | None = None,
    unsorted_indices: Tensor | None = None,
    reset: Tensor | None = None,
    *,
    equations: Equations,
    training: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Implements forward of a layer, for a tensor or the parts of a PackedSequence."""
    where = module._where
    _check.like(where, "input", input, getattr(module, module._names[0]), "parameters")
    batched = batch_sizes is not None or input.dim() != 2
    if batched or input.shape[1] != module.input_size:
        module.check_input(input, batch_sizes)
    _check_reset(reset, input, where)
    transposed = module.batch_first and batch_sizes is None and batched

    def steps_first(t: Tensor) -> Tensor:
        """Returns the tensor as (T, B, ...). Packed data stays (N, ...)."""
        return t.transpose(0, 1) if transposed else t if batched else t.unsqueeze(1)

    x = steps_first(input)
    reset = None if reset is None else steps_first(reset)
    initial = _initial_states(module, x, states, batch_sizes, sorted_indices, batched)
    last: list[Sequence[Tensor]] = []
    for layer in range(module.num_layers):
        if layer > 0 and module.dropout > 0:
            x = F.dropout(x, module.dropout, training)
        outputs: list[Sequence[Tensor]] = []
        for direction in range(2 if module.bidirectional else 1):
            before = [state[len(last)] for state in initial]
            options = (batch_sizes, direction == 1, reset)
            output, after = _direction(module, equations, x, before, len(last), options, training)
            outputs.append(output.chunk(len(equations.outputs), -1))
            last.append(after)
        x, *more = [torch.cat(of_all, dim=-1) for of_all in zip(*outputs, strict=True)]
    states = [torch.stack(of_all) for of_all in zip(*last, strict=True)]
    if batched:
        states = [module.permute_hidden(state, unsorted_indices) for state in states]
    else:
        states = [state.squeeze(1) for state in states]
    x, *more = [
        y.transpose(0, 1) if transposed else y if batched else y.squeeze(1) for y in (x, *more)
    ]
    return x, [*states, *more]


def _initial_states(
    module: Any,
    x: Tensor,
    states: list[Tensor],
    batch_sizes: Tensor | None,
    sorted_indices: Tensor | None,
    batched: bool,
) -> list[Tensor]:
    """Returns the given states in the batch order of x, or default initial states."""
    if batch_sizes is None:
        batch = x.shape[1]
    elif sorted_indices is not None:
        batch = len(sorted_indices)
    elif len(batch_sizes) > 0:
        batch = int(batch_sizes[0])
    else:
        batch = states[0].shape[1] if states else 0
    if not states:
        first: list[Tensor] = module._states_of(module._first_states(x, batch))
        return first
    shape_of_c = module._state_shape(batch)
    shapes = [shape_of_c] * len(states)
    shapes[0] = *shape_of_c[:2], module._size_of_h
    for name, state, shape in zip(module._STATES, states, shapes, strict=True):
        _check.shape(module._where, name, state, shape if batched else (shape[0], shape[2]))
    of_batch = states if batched else [state.unsqueeze(1) for state in states]
    return [module.permute_hidden(state, sorted_indices) for state in of_batch]


def _projected(equations: Equations, weight_hr: Tensor) -> Equations:
    """Equations that also project h, for proj_size."""

    def projected(*args: Any) -> tuple[Tensor, ...]:
        h, *others = equations.function(*args)
        return F.linear(h, weight_hr), *others

    return equations._replace(function=projected)


def _check_reset(reset: Tensor | None, input: Tensor, where: str = "sequence") -> None:
    if reset is None:
        return
    _check.shape(where, "reset", reset, input.shape[:-1])
    if reset.dtype != torch.bool:
        raise TypeError(
            f"lltm::{where}: expected reset of dtype bool, got {_check.dtype(reset.dtype)}"
        )
