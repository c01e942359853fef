"""Operator arguments by name, from the operators' schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload

Op = OpOverload[..., Any]

PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def batch_dim(name: str, dims: int, dtype: torch.dtype) -> int | None:
    """Returns the batch dimension of a tensor argument of sequence, or None.

    The last dimension is features or hidden units, the one before it the batch: (B, H), (T, B, I).
    Only a mask of batch elements, such as reset, has no such last dimension. The output of a step
    is empty, (0,), without a batch dimension.
    """
    if name in (*PARAMETERS, "batch_sizes"):
        return None
    batch = dims - (1 if dtype == torch.bool else 2)
    return batch if batch >= 0 else None


def is_step(a: Any) -> bool:
    """True if a call of sequence is a single step: input (B, I) without batch_sizes."""
    step: bool = a.input.dim() == 2 and a.batch_sizes is None
    return step


def named(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call in order, including defaults."""
    arguments = op._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def with_arguments(op: Op, function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function with a namespace of all arguments of `op`."""
    return function(SimpleNamespace(**named(op, args, kwargs)))


def call(op: Op, given: Any, **more: Any) -> Any:
    """Calls `op` with its arguments in the namespace `given` and in `more`."""
    known = {**vars(given), **more}
    return op(*(known[a.name] for a in op._schema.arguments))


def options(op: Op) -> tuple[str, ...]:
    """Returns the names of a module operator's arguments that are neither cell nor tensors."""
    return tuple(a.name for a in op._schema.arguments[1:] if "Tensor" not in str(a.type))
