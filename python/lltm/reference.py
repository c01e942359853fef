"""The cells in plain PyTorch operations: their definition, for reading.

`cell` and `sequence` have the arguments of lltm.functional's, the classes those of lltm's, and
their state_dict. The tests compare with them and the benchmarks measure against them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check, _recurrent, modules
from ._C import ArgumentError

__all__ = ["GRU", "LLTM", "LSTM", "GRUCell", "LLTMCell", "LSTMCell", "cell", "sequence"]

# From x, h, c and the parameters to h' and c'. `read` is h as the GEMM reads it: with recurrent
# dropout something else. The GRU has no c; its steps pass on what they get.
Equations = Callable[..., tuple[Tensor, Any]]

# ---- the equations ----------------------------------------------------------------


def _lltm(
    x: Tensor, h: Tensor, read: Tensor, c: Tensor, weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    z_i, z_o, z_g = F.linear(torch.cat([read, x], dim=1), weights, bias).chunk(3, dim=1)
    c = c + torch.sigmoid(z_i) * F.elu(z_g)
    return torch.sigmoid(z_o) * torch.tanh(c), c


def _lstm(
    x: Tensor,
    h: Tensor,
    read: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight_ih, bias_ih) + F.linear(read, weight_hh, bias_hh)
    z_i, z_f, z_g, z_o = z.chunk(4, dim=1)
    c = torch.sigmoid(z_f) * c + torch.sigmoid(z_i) * torch.tanh(z_g)
    return torch.sigmoid(z_o) * torch.tanh(c), c


def _gru(
    x: Tensor,
    h: Tensor,
    read: Tensor,
    c: None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, None]:
    x_r, x_u, x_n = F.linear(x, weight_ih, bias_ih).chunk(3, dim=1)
    h_r, h_u, h_n = F.linear(read, weight_hh, bias_hh).chunk(3, dim=1)
    r, u = torch.sigmoid(x_r + h_r), torch.sigmoid(x_u + h_u)
    n = torch.tanh(x_n + r * h_n)
    return (1 - u) * n + u * h, None


_EQUATIONS: dict[str, Equations] = {"lltm": _lltm, "lstm": _lstm, "gru": _gru}


def _steps(
    equations: Equations,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    parameters: Sequence[Tensor | None],
    batch_sizes: Tensor | None,
    reverse: bool,
    reset: Tensor | None,
    recurrent_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A loop over the steps of one layer and direction; returns output, h_n and c_n."""
    _check_reset(reset, input)
    steps = input.unbind(0) if batch_sizes is None else input.split(batch_sizes.tolist())
    resets: Sequence[Tensor | None] = [None] * max(1, len(steps))
    if reset is not None and len(steps) > 0:
        resets = reset.split([x.shape[0] for x in steps]) if reset.dim() == 1 else reset.unbind(0)
    # Without steps, one of no rows: so the results depend on every argument, as those of
    # torch.nn.functional.linear do without rows.
    steps = steps or (input.reshape(0, input.shape[-1]),)
    outputs: list[Tensor] = []
    for x, anew in zip(*(reversed(s) if reverse else s for s in (steps, resets)), strict=True):
        # The first rows of the batch take this step. The others have ended or, in reverse, not
        # begun, and keep their state.
        rows = x.shape[0]
        step_h, step_c = h[:rows], None if c is None else c[:rows]
        if anew is not None:
            step_h = step_h.masked_fill(anew.unsqueeze(1), 0)
            step_c = None if step_c is None else step_c.masked_fill(anew.unsqueeze(1), 0)
        read = step_h if recurrent_mask is None else step_h * recurrent_mask[:rows]
        h_next, c_next = equations(x, step_h, read, step_c, *parameters)
        outputs.append(h_next)
        if rows < h.shape[0]:
            h_next = torch.cat([h_next, h[rows:]])
            c_next = None if c is None else torch.cat([c_next, c[rows:]])
        h, c = h_next, c_next
    if reverse:
        outputs.reverse()
    return torch.cat(outputs).view(*input.shape[:-1], h.shape[1]), h, c


# ---- the functions of the LLTM ------------------------------------------------------


def cell(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step; see :func:`lltm.functional.cell`."""
    h, c = state
    return _lltm(input, h, h, c, weights, bias)


def sequence(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    checkpoint_steps: int = 0,
    reset: Tensor | None = None,
    recurrent_mask: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A loop over steps; see :func:`lltm.functional.sequence`.

    checkpoint_steps changes what is saved and not what is computed: here nothing.
    """
    output, h, c = _steps(
        _lltm, input, *state, (weights, bias), batch_sizes, reverse, reset, recurrent_mask
    )
    assert c is not None
    return output, (h, c)


# ---- the modules --------------------------------------------------------------------


class _Cell:
    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        return _recurrent.step_of(self, input, hx, _step)

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script(type(self).__name__)


class _Layer:
    def forward(self: Any, input: Any, hx: Any = None, reset: Tensor | None = None) -> Any:
        return _recurrent.layer_of(self, input, hx, reset, _layer)

    def prepack(self, weights: torch.dtype | None = None) -> NoReturn:
        name = type(self).__name__
        raise NotImplementedError(
            f"lltm::reference.{name}: plain operations have no prepacked form"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_script(type(self).__name__)


class LLTMCell(_Cell, modules.LLTMCell):
    """lltm.LLTMCell by :func:`cell`."""


class LSTMCell(_Cell, modules.LSTMCell):
    """lltm.LSTMCell in plain operations."""


class GRUCell(_Cell, modules.GRUCell):
    """lltm.GRUCell in plain operations."""


class LLTM(_Layer, modules.LLTM):
    """lltm.LLTM by :func:`sequence`."""


class LSTM(_Layer, modules.LSTM):
    """lltm.LSTM as a loop over steps."""


class GRU(_Layer, modules.GRU):
    """lltm.GRU as a loop over steps."""


def _step(module: Any, input: Tensor, states: list[Tensor]) -> list[Tensor]:
    """forward of a cell, of tensors."""
    where = module._where
    parameters = [getattr(module, name) for name in module._parameter_names]
    _check.of_parameters(where, input, parameters[0])
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
    h, c = (*(state.reshape(-1, module.hidden_size) for state in states), None)[:2]
    equations = _EQUATIONS[module._CELL]
    rows = input.reshape(-1, module.input_size)
    after = equations(rows, h, h, c, *parameters)
    return [state.reshape(shape) for state in after if state is not None]


def _layer(
    module: Any,
    input: Tensor,
    given: list[Tensor],
    batch_sizes: Tensor | None = None,
    sorted_indices: Tensor | None = None,
    unsorted_indices: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """forward of a layer, of tensors or of the parts of a PackedSequence."""
    where = module._where
    _check.of_parameters(where, input, getattr(module, module._names[0]))
    batched = batch_sizes is not None or input.dim() != 2
    if batched or input.shape[1] != module.input_size:
        module.check_input(input, batch_sizes)
    _check_reset(reset, input, where)
    transposed = module.batch_first and batch_sizes is None and batched

    def steps_first(t: Tensor) -> Tensor:
        """As (T, B, ...); packed rows stay (N, ...)."""
        return t.transpose(0, 1) if transposed else t if batched else t.unsqueeze(1)

    x = steps_first(input)
    reset = None if reset is None else steps_first(reset)
    initial = _initial_states(module, x, given, batch_sizes, sorted_indices, batched)
    h_0, c_0 = (*initial, None)[:2]
    h_n: list[Tensor] = []
    c_n: list[Any] = []
    for layer in range(module.num_layers):
        if layer > 0 and module.dropout > 0:
            x = F.dropout(x, module.dropout, module.training)
        outputs: list[Tensor] = []
        for direction in range(2 if module.bidirectional else 1):
            k = len(h_n)
            c = None if c_0 is None else c_0[k]
            output, h, c = _direction(
                module, k, x, h_0[k], c, batch_sizes, reverse=direction == 1, reset=reset
            )
            outputs.append(output)
            h_n.append(h)
            c_n.append(c)
        x = torch.cat(outputs, dim=-1)
    states = [torch.stack(h_n), *([] if c_0 is None else [torch.stack(c_n)])]
    if batched:
        states = [module.permute_hidden(state, unsorted_indices) for state in states]
    else:
        states = [state.squeeze(1) for state in states]
    return x.transpose(0, 1) if transposed else x if batched else x.squeeze(1), states


def _initial_states(
    module: Any,
    x: Tensor,
    states: list[Tensor],
    batch_sizes: Tensor | None,
    sorted_indices: Tensor | None,
    batched: bool,
) -> list[Tensor]:
    """Those that were given, in the order of the rows of x (T, B, I) or (N, I); else zeros."""
    if batch_sizes is None:
        batch = x.shape[1]
    elif sorted_indices is not None:
        batch = len(sorted_indices)
    elif len(batch_sizes) > 0:
        batch = int(batch_sizes[0])
    else:
        batch = states[0].shape[1] if states else 0
    shape_of_c = module._state_shape(batch)
    shapes = [(*shape_of_c[:2], module._size_of_h), shape_of_c][: len(module._STATES)]
    if not states:
        return [x.new_zeros(shape) for shape in shapes]
    for name, state, shape in zip(module._STATES, states, shapes, strict=True):
        _check.shape(module._where, name, state, shape if batched else (shape[0], shape[2]))
    of_batch = states if batched else [state.unsqueeze(1) for state in states]
    return [module.permute_hidden(state, sorted_indices) for state in of_batch]


def _direction(
    module: Any,
    k: int,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k-th direction of the module, counted through its layers; returns output, h_n, c_n."""
    each = len(module._names) // module._state_shape(0)[0]
    parameters = [getattr(module, name) for name in module._names[each * k :][:each]]
    mask = None
    if module.recurrent_dropout > 0 and module.training:
        mask = F.dropout(torch.ones_like(h), module.recurrent_dropout)
    equations = _EQUATIONS[module._CELL]
    if module.proj_size > 0:
        *parameters, weight_hr = parameters
        equations = _projected(equations, weight_hr)
    return _steps(equations, x, h, c, parameters, batch_sizes, reverse, reset, mask)


def _projected(equations: Equations, weight_hr: Tensor) -> Equations:
    """With h projected, as torch.nn.LSTM's proj_size says."""

    def projected(*args: Any) -> tuple[Tensor, Tensor | None]:
        h, c = equations(*args)
        return F.linear(h, weight_hr), c

    return projected


def _check_reset(reset: Tensor | None, input: Tensor, where: str = "sequence") -> None:
    if reset is None:
        return
    _check.shape(where, "reset", reset, input.shape[:-1])
    if reset.dtype != torch.bool:
        raise TypeError(
            f"lltm::sequence: expected reset of dtype bool, got {_check.dtype(reset.dtype)}"
        )


def _refuse_script(name: str) -> NoReturn:
    # What torch.jit.script would compile calls the operators, and is no reference then.
    raise NotImplementedError(
        f"lltm::reference.{name}: torch.jit.script takes lltm.{name}, which loads its state_dict"
    )
