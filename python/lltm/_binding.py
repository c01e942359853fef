"""The functions of lltm._C by way of torch.ops, where the package holds no lltm._C for this Python.

A wheel serves every Python; its lltm._C, as any pybind11 module, serves the one that it was built
with, and takes docstrings and ArgumentError from here. What is not the same: torch.ops.lltm, called
directly, raises a plain ValueError for a wrong shape or value. Modules and functions raise
lltm.ArgumentError as always. The TypeError of forward() and backward() names the argument that is
no tensor, where pybind11's lists all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ArgumentError",
    "backward",
    "build_info",
    "cpu_kernels",
    "cuda_persistent",
    "forward",
    "set_cuda_persistent",
    "version",
]

_ops: Any = torch.ops.lltm


class ArgumentError(ValueError, RuntimeError):
    """A wrong shape or value of an argument.

    A ValueError, which it is, and a RuntimeError too, because torch.nn's layers and PyTorch's
    operators raise that: code that handles theirs handles this one.
    """


ArgumentError.__module__ = "lltm"


def _call(name: str, **arguments: Any) -> list[Tensor]:
    for key, value in arguments.items():
        if not isinstance(value, Tensor) and (value is not None or key != "bias"):
            got = type(value).__name__
            raise TypeError(f"lltm::{name}: expected {key} to be a tensor, got {got}")
    try:
        return list(getattr(_ops, f"_pair_{name}")(**arguments))
    except ValueError as error:
        raise ArgumentError(*error.args) from None


def version() -> str:
    """Version of liblltm, "major.minor.patch"."""
    return str(_ops._version())


def build_info() -> str:
    """How liblltm was built, one "name: value" a line."""
    return str(_ops._build_info())


def cpu_kernels() -> str:
    """The CPU kernels in use: "DEFAULT", "AVX2", "AVX512" or "AMX"; "NEON" on ARM."""
    return str(_ops._cpu_kernels())


def cuda_persistent() -> bool:
    """Whether sequences on a GPU may run by persistent kernels."""
    return bool(_ops._cuda_persistent())


def set_cuda_persistent(enabled: bool) -> None:
    """Sets it, for the whole process."""
    if not isinstance(enabled, bool):
        raise TypeError(f"expected enabled to be a bool, got {type(enabled).__name__}")
    _ops._set_cuda_persistent(enabled)


def forward(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> list[Tensor]:
    """One step by plain ATen operations, on any device, with everything backward() needs.

    Args:
        input: (B, I)
        weights: (3H, H+I); rows by gate: input, output, candidate
        bias: (3H) or None
        old_h: (B, H)
        old_cell: (B, H)

    Returns:
        [new_h, new_cell, input_gate, output_gate, candidate_cell, X, gate_weights]:
        the states and the activated gates (B, H), X = cat([old_h, input]) (B, H+I) and the gates
        before activation, gate_weights = X weights^T + bias (B, 3H).

    lltm.functional.cell computes the same states with fused kernels.
    """
    return _call("forward", input=input, weights=weights, bias=bias, old_h=old_h, old_cell=old_cell)


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
    """The gradients of one step, from what forward() returned.

    Args:
        grad_h: (B, H), gradient of new_h
        grad_cell: (B, H), gradient of new_cell
        new_cell, input_gate, output_gate, candidate_cell: (B, H)
        X: (B, H+I)
        gate_weights: (B, 3H)
        weights: (3H, H+I)

    Returns:
        [d_old_h, d_input, d_weights, d_bias, d_old_cell], each shaped as what it is the gradient
        of.
    """
    return _call(
        "backward",
        grad_h=grad_h,
        grad_cell=grad_cell,
        new_cell=new_cell,
        input_gate=input_gate,
        output_gate=output_gate,
        candidate_cell=candidate_cell,
        X=X,
        gate_weights=gate_weights,
        weights=weights,
    )


def layer(*arguments: Any) -> None:
    """None: the caller calls torch.ops."""


layer_step = layer
