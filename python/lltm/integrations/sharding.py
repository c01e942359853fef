"""DTensor sharding of the operators: over the batch, without communication.

Everything else is replicated. Only gradients of weights and biases must be summed, when their sum
is needed. Packed sequences run replicated, because their data is ordered by step.

Importing torch.distributed.tensor takes most of a second, so it is imported only after the first
DTensor exists.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .schema import BATCH_DIMS_OF_SEQUENCE, BATCH_DIMS_OF_STEP, named

# By operator: batch dimensions, and names of the results. A gradient has its argument's name.
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
    """Registers the shardings if the input is the first DTensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if not _registered and dtensor is not None and isinstance(input, dtensor.DTensor):
        _register()


def _with_mesh(strategy: Callable[[Any], Any], schema: Any) -> Any:
    """Calls a sharding strategy with the mesh of the tensors.

    Up to 2.12, PyTorch reads the mesh from the first argument, which is the cell's name here.
    """
    tensors = dataclasses.replace(schema, args_schema=schema.args_strategy)
    schema.get_mesh_from_args = tensors.get_mesh_from_args
    return strategy(schema)


def _register() -> None:
    global _registered
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    for name, (batch_dims, results) in OPERATORS.items():
        op = getattr(torch.ops.lltm, name).default
        names = [argument.name for argument in op._schema.arguments]

        def shardings(
            *args: Any,
            batch_dims: dict[str, int] = batch_dims,
            results: tuple[str, ...] = results,
            op: Any = op,
            **kwargs: Any,
        ) -> Sequence[tuple[list[Any], list[Any]]]:
            given = named(op, args, kwargs)
            # An argument has a placement if it is a DTensor.
            tensors = [name for name, value in given.items() if hasattr(value, "placements")]
            # Results that are not required have no placement; PyTorch 2.11 must be told.
            wanted = given.get("output_mask", [True] * len(results))
            dims = batch_dims
            if given.get("checkpoint_steps"):
                dims = {**dims, "saved": 1}

            def placed(as_sharded: bool) -> tuple[list[Any], list[Any]]:
                def of_argument(name: str) -> Any:
                    return Shard(dims[name]) if as_sharded and name in dims else Replicate()

                def of_result(name: str) -> Any:
                    # Gradients of replicated arguments are partial sums over the local batch.
                    summed = as_sharded and name not in dims
                    return Partial() if summed else of_argument(name)

                return (
                    [of_result(n) if w else None for n, w in zip(results, wanted, strict=True)],
                    [of_argument(name) for name in tensors],
                )

            # Packed data is ordered by step, so it cannot be sharded over the batch.
            packed = given.get("batch_sizes") is not None
            return [placed(False)] if packed else [placed(False), placed(True)]

        register_sharding(op)(shardings)
        if torch.__version__ < "2.13":
            strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
            strategies[op] = functools.partial(_with_mesh, strategies[op])
        if "output_mask" in names:
            # Results depend on the mask, and `saved` on checkpoint_steps. DTensor's cache must
            # distinguish calls by these arguments.
            decides = [k for k, n in enumerate(names) if n in ("checkpoint_steps", "output_mask")]
            info = RuntimeSchemaInfo(static_argnum=decides[0], needs_pytree=True)
            DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info
    _registered = True
