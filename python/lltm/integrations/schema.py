"""Operator arguments by name, from the operators' schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch._ops import OpOverload

Op = OpOverload[..., Any]

# Batch dimensions of arguments and results, by schema name. Tensors without an entry have none.
# `saved` holds activations (T * B, A * H), or with checkpoint_steps states (T / n, B, H). Each
# process has the activations of its own batch. Their concatenation would have another order than
# on a single process, but is never used.
BATCH_DIMS_OF_STEP: dict[str, int] = dict.fromkeys(
    ("input", "h", "c", "activations", "h_next", "c_next", "grad_h", "grad_c"), 0
)
BATCH_DIMS_OF_SEQUENCE: dict[str, int] = {
    **dict.fromkeys(("input", "reset", "output", "grad_output"), 1),
    **dict.fromkeys(("h_0", "c_0", "h_n", "c_n", "grad_h_n", "grad_c_n", "saved"), 0),
    "recurrent_mask": 0,
}


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
