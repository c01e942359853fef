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

# By operator: the dimension that is the batch, of every tensor among the arguments and of every
# result. None where the batch has no part in it; SUM where it was summed over.
SUM = "sum"
Dims = tuple[int | str | None, ...]
BATCH_DIMS: dict[str, tuple[Dims, Dims]] = {
    # input, h, c, weights, bias -> h', c'
    "cell": ((0, 0, 0, None, None), (0, 0)),
    "cell_forward": ((0, 0, 0, None, None), (0, 0, 0)),
    # grad_h, grad_c, input, h, weights, activations -> gradients
    "cell_backward": ((0, 0, 0, 0, None, 0), (0, 0, 0, SUM, SUM)),
    # input, h_0, c_0, weights, bias -> output, h_n, c_n
    "sequence": ((1, 0, 0, None, None), (1, 0, 0)),
    # The activations hold the rows of every step, (T * B, 4H): of each process, those of its own
    # batch. Put together they would be in another order than on one process, but nobody does that.
    "sequence_forward": ((1, 0, 0, None, None), (1, 0, 0, 0)),
    # grad_output, grad_h_n, grad_c_n, input, h_0, weights, output, activations -> gradients
    "sequence_backward": ((1, 0, 0, 1, 0, None, 1, 0), (1, 0, 0, SUM, SUM)),
    "sequence_checkpointed": ((1, 0, 0, None, None), (1, 0, 0)),
    "sequence_checkpointed_forward": ((1, 0, 0, None, None), (1, 0, 0, 1)),
    # grad_output, grad_h_n, grad_c_n, input, h_0, c_0, weights, bias, output, checkpoints
    # -> gradients
    "sequence_checkpointed_backward": (
        (1, 0, 0, 1, 0, 0, None, None, 1, 1),
        (1, 0, 0, SUM, SUM),
    ),
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

    def placements(dims: Dims) -> list[Any]:
        return [
            Replicate() if dim is None else Shard(dim) if isinstance(dim, int) else Partial()
            for dim in dims
        ]

    for name, (argument_dims, result_dims) in BATCH_DIMS.items():
        op = getattr(torch.ops.lltm, name).default
        masks = [k for k, a in enumerate(op._schema.arguments) if a.name == "output_mask"]

        def shardings(
            *args: Any,
            masks: list[int] = masks,
            argument_dims: Dims = argument_dims,
            result_dims: Dims = result_dims,
            **kwargs: Any,
        ) -> Sequence[tuple[list[Any], list[Any]]]:
            tensors = args[: len(argument_dims)]
            given = [tensor is not None for tensor in tensors]
            rest = [*args[len(argument_dims) :], *kwargs.values()]
            # An argument has a placement if it is a DTensor: of the rest only batch_sizes can be.
            packed = sum(hasattr(value, "placements") for value in rest)
            choices: list[tuple[Dims, Dims]] = [
                ((None,) * len(argument_dims), (None,) * len(result_dims))
            ]
            if not packed:
                choices.append((argument_dims, result_dims))
            # A result that is not wanted is none, and PyTorch 2.11 wants to be told.
            wanted = args[masks[0]] if masks else [True] * len(result_dims)
            return [
                (
                    [p if w else None for p, w in zip(placements(results), wanted, strict=True)],
                    placements(tuple(d for d, g in zip(arguments, given, strict=False) if g))
                    + [Replicate()] * packed,
                )
                for arguments, results in choices
            ]

        register_sharding(op)(shardings)
        if masks:
            # Which results there are depends on the mask, so what was worked out for one mask is
            # not to be taken for another.
            info = RuntimeSchemaInfo(static_argnum=masks[0], needs_pytree=True)
            DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info
    _registered = True
