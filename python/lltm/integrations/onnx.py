"""Export of the operators by torch.onnx.export.

A float32 LSTM, GRU or RNN sequence becomes the ONNX operator of that name, which runtimes
optimize. Everything else is decomposed (decompositions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from .. import modules
from .decompositions import ours

# ONNX operators by cell, from the classes that have them (Layer._ONNX).
_OPERATORS = {
    cell: operator
    for cls in vars(modules).values()
    for cell, operator in getattr(cls, "_ONNX", {}).items()
}
_OPSET = 14  # the first opset with these operators in this form


def register() -> None:
    """Registers the decompositions in this file for torch.onnx.export.

    It does not use torch's global decomposition table: with an entry there, Inductor rejects
    calls of the operator (if CI is set in the environment), and fake tensors use the entry instead
    of the operator's Meta kernel, which checks the arguments.
    """
    ops = torch.ops.lltm
    table: dict[Any, Any] = dict(ours())
    table[ops.sequence.default] = partial(_sequence, table[ops.sequence.default])
    for op, decomposition in table.items():
        torch.library.register_torch_dispatch(
            op, ProxyTorchDispatchMode, partial(_trace, decomposition)
        )


def _trace(
    decomposition: Callable[..., Any],
    mode: ProxyTorchDispatchMode,
    op: OpOverload[..., Any],
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Records an operator call in the traced graph. For ONNX, it is decomposed."""
    if not torch.onnx.is_in_onnx_export():
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        result = decomposition(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError(
            f"{op.name()}: a packed sequence can't be written in ONNX operators, since its"
            " batch_sizes are data; export the model with padded input, (T, B, I)"
        )
    return result


def _sequence(
    decomposition: Callable[..., Any],
    cell: str,
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    reset: Tensor | None = None,
    checkpoint_steps: int = 0,
    recurrent_mask: Tensor | None = None,
) -> Any:
    if weight_ih.dtype == torch.uint8:
        raise NotImplementedError(
            "lltm::sequence: only lltm's kernels can read prepacked weights, so they can't be"
            " written in ONNX operators; export the layer itself"
        )
    if recurrent_mask is not None:
        raise NotImplementedError(
            "lltm::sequence: a recurrent mask can't be exported to ONNX, whose tools would fold the"
            " mask of recurrent_dropout into a constant; export the layer in eval mode"
        )
    if (
        cell not in _OPERATORS
        or weight_hh is None
        or batch_sizes is not None
        or reset is not None
        or input.dtype != torch.float32
    ):
        arguments = (input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, batch_sizes)
        return decomposition(cell, *arguments, reverse, reset, checkpoint_steps)
    name, gates, attributes = _OPERATORS[cell]
    steps, batch = input.shape[:2]
    hidden = h_0.shape[1]

    def reordered(rows: Tensor) -> Tensor:
        # Exporters fold slices into constants, but not chunks.
        return torch.cat([rows[g * hidden : (g + 1) * hidden] for g in gates]).unsqueeze(0)

    bias = None
    if bias_ih is not None or bias_hh is not None:
        zeros = weight_hh.new_zeros(weight_hh.shape[0])
        both = (reordered(zeros if b is None else b) for b in (bias_ih, bias_hh))
        bias = torch.cat(list(both), dim=1)
    states = [h_0] if c_0 is None else [h_0, c_0]
    # ONNX has a dimension for directions. None: every sequence has full length.
    output, *last = torch.onnx.ops.symbolic_multi_out(
        name,
        [
            input,
            reordered(weight_ih),
            reordered(weight_hh),
            bias,
            None,
            *(state.unsqueeze(0) for state in states),
        ],
        {
            "hidden_size": hidden,
            "direction": "reverse" if reverse else "forward",
            **attributes,
        },
        dtypes=[torch.float32] * (1 + len(states)),
        shapes=[(steps, 1, batch, hidden), *[(1, batch, hidden)] * len(states)],
        version=_OPSET,
    )
    h_n, *c_n = [state.squeeze(0) for state in last]
    return output.squeeze(1), h_n, c_n[0] if c_n else h_n.new_empty(0)
