"""Streams: chunks and memory."""

from __future__ import annotations

import support

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
