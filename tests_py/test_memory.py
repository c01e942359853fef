"""Memory of training, with and without activation checkpoints, and of streams.

Values with checkpoints: tests_cpp/test_cells.cpp, test_properties.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import support
import torch

import lltm
from lltm.benchmark.cases import Case
from lltm.benchmark.memory import peak_memory, saved_for_backward


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_saves_little_more_than_its_output(dtype: torch.dtype, packed: bool) -> None:
    case = Case((64, 16, 8, 32), dtype, training=True, packed=packed)
    rows = sum(case.lengths) / (64 * 16)
    assert saved_for_backward(lltm.LLTM, case) == pytest.approx(5 * rows, abs=0.02)
    checkpointed = partial(lltm.LLTM, checkpoint_steps=8)
    assert saved_for_backward(checkpointed, case) == pytest.approx(rows + 1 / 8, abs=0.02)


def test_neither_forward_nor_backward_stores_the_activations_of_all_steps() -> None:
    """Holds activations of 32 of 1000 steps, 5H values each.

    The other steps need little more than H values.
    """
    case = Case((1000, 16, 8, 128), training=True)
    plain = peak_memory(lltm.LLTM, case)
    assert plain > 1000 * 16 * 4 * 128 * 4
    assert peak_memory(partial(lltm.LLTM, checkpoint_steps=32), case) < plain / 2


# Growth in MiB between two identical parts of the work.
GROWTH = """
import random, sys, torch, lltm
from torch.nn.utils.rnn import pack_sequence

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

random.seed(0)
layer = lltm.LLTM(16, 64)
packed = layer.prepack()
layer_of_batches = lltm.LLTM(16, 64, batch_first=True)
cell = lltm.LLTMCell(16, 64)
state = None

def stream():
    global state
    with torch.no_grad():
        for form in (layer, packed):
            _, state = form(torch.randn(random.randint(1, 40), 2, 16), state)

def lengths():
    rows = [torch.randn(random.randint(1, 30), 16) for _ in range(random.randint(1, 80))]
    output, _ = layer(pack_sequence(rows, enforce_sorted=False))
    output.data.sum().backward()

def slices():
    # Steps of buffers of every length: each has rows so many elements apart.
    x = torch.randn(8, random.randint(2, 2000), 16)
    with torch.no_grad():
        layer_of_batches(x[:, 1:2], None)
    sum(cell(x[:, 1])).sum().backward()

def part(work, times):
    for _ in range(times):
        work()
    return resident()

for work, times in ((stream, 300), (lengths, 90), (slices, 90)):
    print(work.__name__, part(work, times) * -1 + part(work, times))
"""


def test_memory_stays_constant() -> None:
    run = support.run_python("-c", GROWTH)
    growth = {work: float(mib) for work, mib in map(str.split, run.stdout.splitlines())}
    # One kernel per batch size would take at least 30 MiB.
    assert growth.keys() == {"stream", "lengths", "slices"}
    assert max(growth.values()) < 10, growth
