"""Trains the layer in two processes and compares with one process; used by test_distributed.py:

    python -m torch.distributed.run --standalone --nproc-per-node 2 train.py

Both processes run all checks; any failure ends both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves

import lltm

WORLD = 2
BATCH = 8  # of all processes together
UPDATES = 6


class Model(nn.Module):
    def __init__(self, cell: str) -> None:
        super().__init__()
        layer = getattr(lltm, cell)
        self.layer = layer(3, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = getattr(lltm, f"{cell}Cell")(10, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        h, *_ = tree_leaves(self.cell(output[:, -1]))
        result: Tensor = self.head(h)
        return result


Make = Callable[[], tuple[Model, Tensor, Tensor]]


def make_model(cell: str) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(cell).double()
    return model, torch.randn(BATCH, 7, 3).double(), torch.randn(BATCH, 2).double()


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(WORLD)[dist.get_rank()]


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    parts: int = 1,
    last: Callable[[bool], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[float]:
    """The losses over all processes, by update, of `parts` backward passes each.

    `last(False)` surrounds an update's backward passes other than the last.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(UPDATES):
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for k, (part_x, part_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            with last(k == parts - 1):
                loss = nn.functional.mse_loss(model(part_x), part_y) / parts
                loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total) / WORLD)
    return losses


def same(result: Any, expected: Any) -> None:
    # Only the order of batch sums differs.
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def sharded(model: Model) -> Model:
    for module in (model.layer, model.cell, model):
        fully_shard(module)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().shape[0] < parameter.shape[0]
    return model


def check_training(make: Make, wrap: Callable[[Model], nn.Module], expected: list[float]) -> None:
    """Each update of one and of two backward passes, of which only the last synchronizes."""
    for parts in (1, 2):
        model, x, y = make()
        wrapped: Any = wrap(model)

        @contextlib.contextmanager
        def synchronize(last: bool, wrapped: Any = wrapped) -> Iterator[None]:
            if isinstance(wrapped, FSDPModule):
                wrapped.set_requires_gradient_sync(last)
                yield
            else:
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    yield

        same(train(wrapped, mine(x), mine(y), parts=parts, last=synchronize), expected)


def check_dtensor(make: Make, checkpoint_steps: int) -> None:
    """The input is sharded over the batch: processes exchange no batch elements."""
    mesh: DeviceMesh = init_device_mesh("cpu", (WORLD,))
    model, x, _ = make()
    model.layer.checkpoint_steps = checkpoint_steps
    expected_x = x.clone().requires_grad_()
    expected = model(expected_x)
    _, expected_states = model.layer(x)
    expected.square().sum().backward()

    parallel = copy.deepcopy(model)
    distribute_module(parallel, mesh)
    parallel.zero_grad()

    def frozen() -> None:
        x_only = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        parallel.requires_grad_(False)
        parallel(x_only).square().sum().backward()
        assert isinstance(x_only.grad, DTensor)
        same(x_only.grad.full_tensor(), expected_x.grad)

    # DTensor's caches must not confuse these calls with the calls below.
    frozen()
    parallel.requires_grad_(True)
    sharded_x = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as communication:
        result = parallel(sharded_x)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    _, states = parallel.layer(sharded_x.detach())
    assert result.placements == (Shard(0),)
    assert result.to_local().shape[0] == BATCH // WORLD
    same(result.full_tensor(), expected)
    for state, whole in zip(tree_leaves(states), tree_leaves(expected_states), strict=True):
        same(state.full_tensor(), whole)

    # Backward does not communicate either: sums over the batch remain partial.
    loss = result.square().sum()
    with CommDebugMode() as communication:
        loss.backward()
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert isinstance(sharded_x.grad, DTensor)
    assert sharded_x.grad.placements == (Shard(0),)
    same(sharded_x.grad.full_tensor(), expected_x.grad)
    for parameter, whole in zip(parallel.parameters(), model.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        same(parameter.grad.full_tensor(), whole.grad)

    frozen()

    # Other placements run replicated.
    for placement in (Replicate(), Shard(1), Shard(2)):
        other_x = distribute_tensor(x, mesh, [placement])
        same(parallel(other_x).full_tensor(), expected.detach())
    # Packed sequences run replicated too: batch_sizes is not a DTensor.
    rows = pack_sequence([x[0], x[1, :4], x[2, :2]])
    packed = PackedSequence(distribute_tensor(rows.data, mesh, [Shard(0)]), rows.batch_sizes)
    with implicit_replication():
        output, _ = parallel.layer(packed)
    same(output.data.full_tensor(), model.layer(rows)[0].data.detach())


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    try:
        for cell in ("LLTM", "LSTM", "GRU"):
            make = partial(make_model, cell)
            model, x, y = make()
            expected = train(model, x, y)
            assert expected[-1] < expected[0]
            for wrap in (DistributedDataParallel, sharded):
                check_training(make, wrap, expected)
            for checkpoint_steps in (0, 3):
                check_dtensor(make, checkpoint_steps)
        print("done")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
