"""How DTensor shards the operators: over the batch, without communication.

Everything else is replicated, so only gradients of weights and biases have to be added up, and
only when their sum is needed. A packed sequence, whose rows lie in the order of its steps,
runs replicated.

torch.distributed.tensor takes most of a second to import, so nothing here does before there is
a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The dimension that is the batch, of tensors that an operator takes or returns, by the names of its
# schema; that of the others is None. What is saved for backward is either activations, the rows of
# every step, (T * B, A * H): of each process those of its own batch, which put together would be in
# another order than on one process, but nobody does that. Or it is checkpoints, (T / n, B, H).
BATCH_DIMS_OF_STEP: dict[str, int] = dict.fromkeys(
    ("input", "h", "c", "activations", "h_next", "c_next", "grad_h", "grad_c"), 0
)
BATCH_DIMS_OF_SEQUENCE: dict[str, int] = {
    **dict.fromkeys(("input", "reset", "output", "grad_output"), 1),
    **dict.fromkeys(("h_0", "c_0", "h_n", "c_n", "grad_h_n", "grad_c_n", "saved"), 0),
    "recurrent_mask": 0,
}
# By operator: the batch dimensions, and the names of the results. A gradient is named after its
# argument.
GRADIENTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
OPERATORS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "step": (BATCH_DIMS_OF_STEP, ("h_next", "c_next")),
    "step_forward": (BATCH_DIMS_OF_STEP, ("h_next", "c_next", "activations")),
    "step_backward": (BATCH_DIMS_OF_STEP, ("input", "h", "c", *GRADIENTS)),
    "sequence": (BATCH_DIMS_OF_SEQUENCE, ("output", "h_n", "c_n")),
    "sequence_forward": (BATCH_DIMS_OF_SEQUENCE, ("output", "h_n", "c_n", "saved")),
    "sequence_backward": (BATCH_DIMS_OF_SEQUENCE, ("input", "h_0", "c_0", *GRADIENTS)),
}

_registered = False


def prepare(input: Tensor) -> None:
    """Of an input that is no plain tensor: registers the shardings for the first DTensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if not _registered and dtensor is not None and isinstance(input, dtensor.DTensor):
        _register()


def _register() -> None:
    global _registered
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for name, (batch_dims, results) in OPERATORS.items():
        op = getattr(torch.ops.lltm, name).default
        names = [argument.name for argument in op._schema.arguments]
        mask = names.index("output_mask") if "output_mask" in names else None

        def shardings(
            *args: Any,
            batch_dims: dict[str, int] = batch_dims,
            results: tuple[str, ...] = results,
            names: list[str] = names,
            mask: int | None = mask,
            **kwargs: Any,
        ) -> Sequence[tuple[list[Any], list[Any]]]:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # An argument has a placement if it is a DTensor.
            tensors = [name for name, value in given.items() if hasattr(value, "placements")]
            # A result that is not wanted is none, and PyTorch 2.11 wants to be told.
            wanted = [True] * len(results) if mask is None else args[mask]
            dims = batch_dims
            if given.get("checkpoint_steps"):
                dims = {**dims, "saved": 1}

            def placed(as_sharded: bool) -> tuple[list[Any], list[Any]]:
                def of_argument(name: str) -> Any:
                    return Shard(dims[name]) if as_sharded and name in dims else Replicate()

                def of_result(name: str) -> Any:
                    # The gradients of what every process has are summed over its own batch.
                    summed = as_sharded and name not in dims
                    return Partial() if summed else of_argument(name)

                return (
                    [of_result(n) if w else None for n, w in zip(results, wanted, strict=True)],
                    [of_argument(name) for name in tensors],
                )

            # The rows of a packed sequence lie in the order of its steps.
            packed = given.get("batch_sizes") is not None
            return [placed(False)] if packed else [placed(False), placed(True)]

        register_sharding(op)(shardings)
        if mask is not None:
            # Which results there are depends on the mask, and what was saved on checkpoint_steps:
            # what was worked out for one of these is not to be taken for another.
            decides = [k for k, n in enumerate(names) if n in ("checkpoint_steps", "output_mask")]
            info = RuntimeSchemaInfo(static_argnum=decides[0], needs_pytree=True)
            DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info
    _registered = True
