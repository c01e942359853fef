"""The operators as functions.

Letters: T steps, B batch size, I input size, H hidden size, N rows of a packed sequence.

The tensors of one call have one device and one dtype (float64, float32, bfloat16 or float16)
and any strides. Wrong shapes and values raise lltm.ArgumentError, which is a ValueError and a
RuntimeError, wrong types and dtypes TypeError, wrong devices and layouts RuntimeError; the text
names the argument, what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check
from .integrations import sharding

__all__ = ["cell", "prepack", "sequence"]


def cell(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step.

    With X = [h, x] and z = X weights^T + bias, split into z_i, z_o, z_g::

        c' = c + sigmoid(z_i) * elu(z_g)
        h' = tanh(c') * sigmoid(z_o)

    Args:
        input: x, (B, I)
        state: (h, c), each (B, H)
        weights: (3H, H+I); the rows are the input gate, the output gate and the candidate, the
            first H columns multiply h, the others x
        bias: (3H), or None

    Returns:
        (h', c'), each (B, H); new contiguous tensors. B = 0 gives empty ones.
    """
    # The dispatcher would answer a wrong type with a RuntimeError.
    _check.tensor("cell", "input", input)
    _check.not_nested("cell", input)
    h, c = _check.states("cell", ("h", "c"), state)
    _check.tensor("cell", "weights", weights)
    _check.optional_tensor("cell", "bias", bias)
    if type(input) is not Tensor:
        sharding.prepare(input)
    try:
        h, c = torch.ops.lltm.step("lltm", input, h, c, weights, None, bias)
    except ValueError as error:
        raise _check.of_operator(error) from None
    return h, c


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
    """A whole sequence: one layer, one direction.

    Args:
        input: (T, B, I), or packed (N, I) when batch_sizes is given
        state: (h_0, c_0), each (B, H)
        weights: (3H, H+I), as for :func:`cell`; or what :func:`prepack` returned for such weights:
            then there are no derivatives and no recurrent_mask, and autocast does nothing
        bias: (3H), or None
        batch_sizes: (T), int64 on the CPU: the rows that reach each step, as in a
            :class:`~torch.nn.utils.rnn.PackedSequence`; none larger than the one before, the
            first equal to B, the sum equal to N
        reverse: run from each row's own last step to its first
        checkpoint_steps: 0, or n for training on long sequences: instead of the activations of
            every step, 4H values a row, it saves c at every n-th step, and backward computes the
            activations again, those of n steps at a time. Results are the same, gradients up to
            rounding too. With about sqrt(T) memory is least. Without gradients it does nothing.
        reset: bool, (T, B), or packed (N) when batch_sizes is given: where it is true, h and c of
            that row are zero before the step, and no gradient goes further back. With reverse too,
            "before" means in the order of execution
        recurrent_mask: (B, H): what h is multiplied by where the product with the weights reads
            it, in every step the same; output and h_n are h without it. For dropout: 0 or
            1 / (1 - p)

    Returns:
        (output, (h_n, c_n)): output (T, B, H) or (N, H) holds h' of every step; h_n and c_n
        (B, H) are the states after each row's last step taken. T = 0 gives an empty output and
        the initial states, whose gradients of weights and bias are zero.
    """
    steps = _check.checkpoint_steps("sequence", checkpoint_steps)
    _check.tensor("sequence", "input", input)
    _check.not_nested("sequence", input)
    h_0, c_0 = _check.states("sequence", ("h_0", "c_0"), state)
    _check.tensor("sequence", "weights", weights)
    _check.optional_tensor("sequence", "bias", bias)
    _check.optional_tensor("sequence", "batch_sizes", batch_sizes)
    _check.boolean("sequence", "reverse", reverse)
    _check.optional_tensor("sequence", "reset", reset)
    _check.optional_tensor("sequence", "recurrent_mask", recurrent_mask)
    if type(input) is not Tensor:
        sharding.prepare(input)
    try:
        output, h_n, c_n = torch.ops.lltm.sequence(
            "lltm",
            input,
            h_0,
            c_0,
            weights,
            bias_ih=bias,
            batch_sizes=batch_sizes,
            reverse=reverse,
            reset=reset,
            checkpoint_steps=steps,
            recurrent_mask=recurrent_mask,
        )
    except ValueError as error:
        raise _check.of_operator(error) from None
    return output, (h_n, c_n)


def prepack(weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Lays out weights once as the kernels of this machine read them.

    For repeated inference with the same weights: :func:`sequence` does that in every call.

    Args:
        weights: (3H, H+I), as for :func:`sequence`; finite, and H and I at most 65536, where they
            are quantised
        dtype: torch.qint8 quantises the weights to 8 bits, each row by a scale of its own; then
            :func:`sequence` quantises input and h as it runs, and sums, states and gates stay
            float32. A quarter of the size of float32 and faster, at the price of small errors. On
            the CPU, not for float64. None: the weights as they are.

    Returns:
        The weights as they are now, in a form for :func:`sequence` only (of another dtype and
        shape). It works on other machines too, but may be slower there.
    """
    _check.tensor("prepack", "weights", weights)
    _check.optional_dtype("prepack", "dtype", dtype)
    try:
        packed: Tensor = torch.ops.lltm.prepack("lltm", weights, dtype=dtype)
    except ValueError as error:
        raise _check.of_operator(error) from None
    return packed
