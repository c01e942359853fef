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

from .schema import PARAMETERS, batch_dim, named

# Batch dimensions of each operator's results. Gradients of parameters have none.
# Saved activations are (T * B, A * H). Each process has the activations of its own batch. Their
# concatenation would have another order than on a single process, but is never used.
_SUMS = (None,) * len(PARAMETERS)
_EMPTY = -1  # instead of a dimension: a result that all processes have
OPERATORS: dict[str, tuple[int | None, ...]] = {
    "sequence": (1, 0, 0),  # output, h_n, c_n
    "sequence_forward": (1, 0, 0, 0),  # also saved
    "sequence_backward": (1, 0, 0, *_SUMS),  # input, h_0, c_0
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

    for name, of_results in OPERATORS.items():
        op = getattr(torch.ops.lltm, name).default
        names = [argument.name for argument in op._schema.arguments]

        def shardings(
            *args: Any, results: tuple[int | None, ...] = of_results, op: Any = op, **kwargs: Any
        ) -> Sequence[tuple[list[Any], list[Any]]]:
            given = named(op, args, kwargs)
            if given.get("checkpoint_steps") and op is torch.ops.lltm.sequence_forward.default:
                results = *results[:3], 1  # saved is states (T / n, B, H)
            # Results that are not required have no placement; PyTorch 2.11 must be told.
            wanted = given.get("output_mask", [True] * len(results))
            if given["input"].ndim == 2:  # a step: the input's gradient, or an empty output
                results = 0 if "output_mask" in given else _EMPTY, *results[1:]
            # An argument has a placement if it is a DTensor.
            tensors = {name: x for name, x in given.items() if hasattr(x, "placements")}
            dims = [batch_dim(name, x.ndim, x.tensor_meta.dtype) for name, x in tensors.items()]

            def placed(as_sharded: bool) -> tuple[list[Any], list[Any]]:
                def place(dim: int | None, without_batch: Any) -> Any:
                    if not as_sharded or dim == _EMPTY:
                        return Replicate()
                    return without_batch if dim is None else Shard(dim)

                pairs = zip(results, wanted, strict=True)
                # Gradients of replicated arguments are partial sums over the local batch.
                return (
                    [place(dim, Partial()) if w else None for dim, w in pairs],
                    [place(dim, Replicate()) for dim in dims],
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
