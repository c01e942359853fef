"""Export of the operators by torch.onnx.export.

A float32 LSTM, GRU or RNN sequence becomes the ONNX operator of that name, which runtimes
optimize. Everything else is decomposed (decompositions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from .. import modules
from .decompositions import ours
from .schema import is_step, options, with_arguments

# ONNX operators by cell, from the classes that have them (Layer._ONNX).
_OPERATORS = {
    cell: operator
    for cls in vars(modules).values()
    for cell, operator in getattr(cls, "_ONNX", {}).items()
}
# Arguments of a sequence that these operators have or do not need. Any other one must be None.
_ARGUMENTS = {"cell", "input", "h_0", "c_0", "weight_ih", "weight_hh", "bias_ih", "bias_hh"}
_ARGUMENTS |= {"reverse", "checkpoint_steps"}
_OPSET = 14  # the first opset with these operators in this form


@cache  # also after importlib.reload(lltm)
def register() -> None:
    """Registers the decompositions in this file for torch.onnx.export.

    It does not use torch's global decomposition table: with an entry there, Inductor rejects
    calls of the operator (if CI is set in the environment), and fake tensors use the entry instead
    of the operator's Meta kernel, which checks the arguments.
    """
    ops = torch.ops.lltm
    table: dict[Any, Any] = dict(ours())
    sequence = ops.sequence.default
    table[sequence] = partial(with_arguments, sequence, partial(_sequence, table[sequence]))
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


def _sequence(decomposition: Callable[..., Any], a: Any) -> Any:
    if is_step(a):
        return decomposition(**vars(a))
    if a.weight_ih.dtype == torch.uint8:
        raise NotImplementedError(
            "lltm::sequence: only lltm's kernels can read prepacked weights, so they can't be"
            " written in ONNX operators; export the layer itself"
        )
    others = [n for n, value in vars(a).items() if n not in _ARGUMENTS and value is not None]
    if masks := [name.removesuffix("_mask") for name in others if name.endswith("_mask")]:
        (option,) = (o for o in options(torch.ops.lltm.layer.default) if o.startswith(masks[0]))
        raise NotImplementedError(
            f"lltm::sequence: a {masks[0]} mask can't be exported to ONNX, whose tools would fold"
            f" the mask of {option} into a constant; export the layer in eval mode"
        )
    if a.cell not in _OPERATORS or a.weight_hh is None or a.input.dtype != torch.float32 or others:
        return decomposition(**vars(a))
    name, gates, attributes = _OPERATORS[a.cell]
    steps, batch = a.input.shape[:2]
    hidden = a.h_0.shape[1]

    def reordered(rows: Tensor) -> Tensor:
        # Exporters fold slices into constants, but not chunks.
        return torch.cat([rows[g * hidden : (g + 1) * hidden] for g in gates]).unsqueeze(0)

    bias = None
    if a.bias_ih is not None or a.bias_hh is not None:
        zeros = a.weight_hh.new_zeros(a.weight_hh.shape[0])
        both = (reordered(zeros if b is None else b) for b in (a.bias_ih, a.bias_hh))
        bias = torch.cat(list(both), dim=1)
    states = [a.h_0] if a.c_0 is None else [a.h_0, a.c_0]
    # ONNX has a dimension for directions. None: every sequence has full length.
    output, *last = torch.onnx.ops.symbolic_multi_out(
        name,
        [
            a.input,
            reordered(a.weight_ih),
            reordered(a.weight_hh),
            bias,
            None,
            *(state.unsqueeze(0) for state in states),
        ],
        {"hidden_size": hidden, "direction": "reverse" if a.reverse else "forward", **attributes},
        dtypes=[torch.float32] * (1 + len(states)),
        shapes=[(steps, 1, batch, hidden), *[(1, batch, hidden)] * len(states)],
        version=_OPSET,
    )
    h_n, *c_n = [state.squeeze(0) for state in last]
    return output.squeeze(1), h_n, c_n[0] if c_n else h_n.new_empty(0)
