"""Members of lltm._C, and its replacement.

A wheel supports every Python version, but its lltm._C only the version that compiled it. lltm._C
has the members of this module. It replaces only forward() and backward(), whose calls are faster
there, layer() and layer_step(). Differences of the replacement: direct calls of torch.ops.lltm
raise a plain ValueError for a wrong shape or value (modules and functions still raise
lltm.ArgumentError). TypeErrors of forward() and backward() name only the wrong argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ArgumentError", "backward", "build_info", "cpu_kernels", "cuda_float32"]
__all__ += ["cuda_persistent", "forward", "set_cuda_float32", "set_cuda_persistent", "version"]

_ops: Any = torch.ops.lltm


class ArgumentError(ValueError, RuntimeError):
    """Raised for a wrong shape or value of an argument.

    It is a ValueError. It is also a RuntimeError, so that code that handles errors of PyTorch's
    layers and operators handles it, too.
    """


ArgumentError.__module__ = "lltm"


def _call(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    try:
        result: list[Tensor] = getattr(_ops, f"_pair_{name}").default(*arguments.values())
    except ValueError as error:
        raise ArgumentError(*error.args) from None
    except (TypeError, RuntimeError):
        for key, value in arguments.items():
            if not isinstance(value, Tensor) and (value is not None or key != "bias"):
                got = type(value).__name__
                message = f"lltm::{name}: expected {key} to be a tensor, got {got}"
                raise TypeError(message) from None
        raise
    return result


def _untraced(op: Any, *arguments: bool | str | None) -> Any:
    """Calls an operator without tensors, which torch.jit.trace cannot record."""
    jit: Any = torch._C
    state = jit._get_tracing_state()
    jit._set_tracing_state(None)
    try:
        return op(*arguments)
    finally:
        jit._set_tracing_state(state)


def version() -> str:
    """Returns the version of liblltm, "major.minor.patch"."""
    return str(_untraced(_ops._version))


def build_info() -> str:
    """Returns the build configuration of liblltm as lines "name: value"."""
    return str(_untraced(_ops._build_info))


def cpu_kernels() -> str:
    """Returns the CPU kernels in use: "DEFAULT", "AVX2", "AVX512", "AMX" or (on ARM) "NEON"."""
    return str(_untraced(_ops._cpu_kernels))


def cuda_persistent() -> bool:
    """Returns True if sequences on a GPU may use persistent kernels."""
    return bool(_untraced(_ops._cuda_persistent))


def set_cuda_persistent(enabled: bool) -> None:
    """Sets whether sequences on a GPU may use persistent kernels, for the whole process."""
    if not isinstance(enabled, bool):
        raise TypeError(f"expected enabled to be a bool, got {type(enabled).__name__}")
    _untraced(_ops._set_cuda_persistent, enabled)


def cuda_float32() -> str | None:
    """Returns how float32 sequences on a GPU multiply matrices; None: as PyTorch's matmul."""
    precision: str | None = _untraced(_ops._cuda_float32)
    return precision


def set_cuda_float32(precision: str | None) -> None:
    """Sets how float32 sequences on a GPU multiply matrices, for the whole process."""
    if not isinstance(precision, str | None):
        raise TypeError(f"expected float32 to be a str or None, got {type(precision).__name__}")
    _untraced(_ops._set_cuda_float32, precision)


def forward(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> list[Tensor]:
    """One LLTM step in ATen operations, on any device. Also returns the inputs for backward().

    lltm.functional.step computes the same states with fused kernels.

    Args:
        input: (B, I)
        weights: (3H, H+I), with the rows of input gate, output gate and candidate
        bias: (3H) or None
        old_h: h, (B, H)
        old_cell: c, (B, H)

    Returns:
        [new_h, new_cell, input_gate, output_gate, candidate_cell, X, gate_weights]: the next
        states and the activated gates (B, H), X = cat([old_h, input]) (B, H+I), and the
        pre-activations gate_weights = X weights^T + bias (B, 3H).
    """
    return _call("forward", locals())


def backward(
    grad_h: Tensor,
    grad_cell: Tensor,
    new_cell: Tensor,
    input_gate: Tensor,
    output_gate: Tensor,
    candidate_cell: Tensor,
    X: Tensor,
    gate_weights: Tensor,
    weights: Tensor,
) -> list[Tensor]:
    """Computes the gradients of an LLTM step from the results of forward().

    Args:
        grad_h: gradient of new_h, (B, H)
        grad_cell: gradient of new_cell, (B, H)
        new_cell: from forward(), (B, H)
        input_gate: from forward(), (B, H)
        output_gate: from forward(), (B, H)
        candidate_cell: from forward(), (B, H)
        X: from forward(), (B, H+I)
        gate_weights: from forward(), (B, 3H)
        weights: as for forward(), (3H, H+I)

    Returns:
        [d_old_h, d_input, d_weights, d_bias, d_old_cell], each with the shape of its argument.
    """
    return _call("backward", locals())


def layer(*arguments: Any) -> None:
    """Returns None; the caller then calls torch.ops."""


layer_step = layer
