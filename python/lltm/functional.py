"""The operators as functions, for every cell.

Every function takes a cell: ``"lltm"``, ``"lstm"``, ``"gru"``, ``"rnn_tanh"``, ``"rnn_relu"``, a
custom cell (:class:`lltm.Cell`) or a serialized cell.

Symbols: T steps, B batch size, I input size, H hidden size, N rows of a packed sequence, G gates (4
for the LSTM, 3 for the GRU and the LLTM, 1 for the RNN; in custom cells, the gates of that matrix).

All tensors of a call have one device and one dtype (float64, float32, bfloat16 or float16), and any
strides. Wrong shapes and values raise :class:`lltm.ArgumentError`, which is a ValueError and a
RuntimeError, wrong types and dtypes TypeError, wrong devices and layouts RuntimeError. The message
names the argument, the expected value and the actual one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _check
from ._C import ArgumentError
from .custom.cell import Cell
from .custom.program import Program
from .integrations import sharding

__all__ = ["prepack", "sequence", "step"]

States = Tensor | tuple[Tensor, ...]


def step(
    cell: str | Cell,
    input: Tensor,
    states: States,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Any:
    """One step of a cell.

    Args:
        cell: name of a built-in cell, a custom cell or its text
        input: (B, I)
        states: a tuple of the cell's states, (B, H) each, h first: (h, c) for ``"lstm"`` and
            ``"lltm"``; the tensor h for a cell whose only state is h, such as ``"gru"``
        weight_ih: (G H, I), input weights; without weight_hh the concatenated matrix
            [weight_hh, weight_ih] of shape (G H, H+I), as the LLTM stores it
        weight_hh: (G H, H), recurrent weights. Default: None
        bias_ih: (G H,). A custom cell with parameters requires it, followed by the parameters, (H,)
            each: scalars are expanded, and gates without biases have zeros. Default: None, no bias
        bias_hh: (G H,). Default: None, no bias

    Returns:
        The states after the step, in the form of ``states``; new tensors. B = 0 returns empty ones.

    Example::

        h, c = lltm.functional.step("lstm", x, (h, c), m.weight_ih, m.weight_hh, m.bias_ih)
    """
    optional = {"weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh}
    text, names, h, c = _checked("step", cell, input, states, weight_ih, optional)
    h, c = _check.call(torch.ops.lltm.step, text, input, h, c, weight_ih, *optional.values())
    return _split(names, h, c)


def sequence(
    cell: str | Cell,
    input: Tensor,
    states: States,
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
    """A sequence: one layer, one direction.

    Args:
        cell: name of a built-in cell, a custom cell or its text
        input: (T, B, I), or packed (N, I) with batch_sizes
        states: the initial states, as for :func:`step`
        weight_ih: as for :func:`step`; or prepacked weights (:func:`prepack`), without weight_hh.
            Prepacked weights have no derivatives and support no recurrent_mask; autocast does not
            apply to them
        weight_hh: (G H, H), recurrent weights. Default: None
        bias_ih: as for :func:`step`. Default: None, no bias
        bias_hh: (G H,). Default: None, no bias
        batch_sizes: (T,), int64 on the CPU: the batch size of each step, as in a
            :class:`~torch.nn.utils.rnn.PackedSequence`. It never increases, begins with B and sums
            to N. Default: None, the input is not packed
        reverse: if True, runs from the last step of each sequence to its first. Default: False
        reset: (T, B), or (N,) with batch_sizes, bool. If True, the states of that batch element are
            reset to their initial values before the step, in the order of execution, and no
            gradient flows further back. Default: None
        checkpoint_steps: n > 0 saves the states at every n-th step instead of all activations, and
            backward recomputes n steps at a time. Memory is least for n near sqrt(T). Gradients are
            the same up to rounding; without gradients it has no effect. Default: 0
        recurrent_mask: (B, H), multiplies h in the recurrent matrix multiplication of every step;
            output and the final h are not masked. For dropout with probability p, its values are 0
            and 1 / (1 - p). Default: None

    Returns:
        (output, states): output, (T, B, H) or (N, H), holds h of every step. If a custom cell has n
        outputs in addition to h, it is (T, B, (1 + n) H): h, then these. The states are those
        after the last step of each sequence, in the form of ``states``. T = 0 returns an empty
        output and the initial states, whose gradients of weights and biases are zero.
    """
    _check.boolean("sequence", "reverse", reverse)
    steps = _check.checkpoint_steps("sequence", "checkpoint_steps", checkpoint_steps)
    optional = {"weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh}
    optional |= {"batch_sizes": batch_sizes, "reset": reset, "recurrent_mask": recurrent_mask}
    text, names, h_0, c_0 = _checked("sequence", cell, input, states, weight_ih, optional)
    is_sequence = input.dim() != 2 or batch_sizes is not None  # the operator also runs a step
    _check.expect(is_sequence, "sequence", "input of shape (T, B, I)", tuple(input.shape))
    given = (weight_ih, weight_hh, bias_ih, bias_hh, batch_sizes, reverse, reset, steps)
    output, h_n, c_n = _check.call(
        torch.ops.lltm.sequence, text, input, h_0, c_0, *given, recurrent_mask
    )
    return output, _split(names, h_n, c_n)


def prepack(
    cell: str | Cell,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Packs weights for repeated inference; :func:`sequence` otherwise packs them in every call.

    Args:
        cell: name of a built-in cell, a custom cell or its text
        weight_ih: as for :func:`step`. Quantization requires finite weights, and H and I of at most
            65536
        weight_hh: as for :func:`step`. Default: None
        dtype: torch.qint8 quantizes the weights to 8 bits, with one scale per row; then
            :func:`sequence` quantizes input and h, and sums, states and pre-activations stay
            float32. A quarter of the memory of float32 and faster, with small errors. CPU only, not
            for float64. Default: None, the weights keep their dtype

    Returns:
        A packed copy of the weights, for the argument weight_ih of :func:`sequence` only; its dtype
        and shape are unspecified. It works on other systems too, but may be slower there.
    """
    text, *_ = _cell("prepack", cell)
    _check.tensor("prepack", "weight_ih", weight_ih)
    _check.optional_tensor("prepack", "weight_hh", weight_hh)
    _check.optional_dtype("prepack", "dtype", dtype)
    packed: Tensor = _check.call(torch.ops.lltm.prepack, text, weight_ih, weight_hh, dtype=dtype)
    return packed


def _cell(where: str, cell: Any) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Returns the operators' name of a cell, and the names of its states and parameters."""
    text = cell.text if isinstance(cell, Cell) else cell
    if not isinstance(text, str):
        raise TypeError(
            f"lltm::{where}: expected cell to be a str or an lltm.Cell, got {type(cell).__name__}"
        )
    try:
        return text, *_names(text)
    except ValueError as error:
        raise ArgumentError(str(error).replace("lltm::_cell", f"lltm::{where}", 1)) from None


_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}


def _names(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a cell's states, h first, and parameters. Built-in cells have h, or h and c."""
    if text not in _NAMES:
        _, _, initial, *_ = torch.ops.lltm._cell(text)  # raises an error for unknown cells
        program = Program.read(text) if "\n" in text else None
        states = program.states if program else ["c"] * len(initial)
        _NAMES[text] = ("h", *states), tuple(program.parameters if program else ())
    return _NAMES[text]


# Dynamo calls it while it traces, as torch.compiler.assume_constant_result makes it do.
_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _checked(
    where: str, cell: Any, input: Any, states: Any, weight_ih: Any, optional: dict[str, Any]
) -> tuple[str, tuple[str, ...], Tensor, Tensor | None]:
    """Checks types, for which the dispatcher would raise a RuntimeError. Returns the operators'
    name of the cell, the names of its states, h, and the other states side by side."""
    text, names, parameters = _cell(where, cell)
    _check.tensor(where, "input", input)
    _check.tensor(where, "weight_ih", weight_ih)
    for name, value in optional.items():
        _check.optional_tensor(where, name, value)
    if type(input) is not Tensor:
        sharding.prepare(input)
    if len(names) == 1:
        h, c = _check.tensor(where, "states", states), None
    else:
        of_call = names if where == "step" else tuple(f"{name}_0" for name in names)
        h, c, *more = given = _check.states(where, of_call, states, "states")
        if more:
            _check.alike(where, of_call, given, input)
            with torch.autocast(h.device.type, enabled=False):  # of unlike dtypes it promotes
                c = torch.cat(given[1:], 1)
    if parameters and optional["bias_ih"] is None:
        raise TypeError(
            f"lltm::{where}: expected bias_ih to be a tensor of the biases and the cell's"
            f" parameters {', '.join(parameters)}, got None"
        )
    return text, names, h, c


def _split(names: tuple[str, ...], h: Tensor, c: Tensor) -> Any:
    if len(names) == 1:
        return h
    if len(names) == 2:
        return h, c
    # Copies, because autograd forbids in-place changes of chunks.
    return h, *(state.clone() for state in c.chunk(len(names) - 1, 1))
