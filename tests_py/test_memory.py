"""Calls with ever new sizes: nothing may be kept of them."""

from __future__ import annotations

import support

PROGRAM = """
import random, sys
import torch, lltm

torch.set_num_threads(2)
random.seed(0)

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def train(output, *leaves):
    torch.autograd.grad(output.float().sum(), leaves)

def call(dtype, steps, batch, inputs, hidden):
    x = torch.randn(steps, batch, inputs, dtype=dtype)
    layer = lltm.LLTM(inputs, hidden, dtype=dtype)
    cell = lltm.LLTMCell(inputs, hidden, dtype=dtype)
    with torch.no_grad():
        layer(x[:, :2])
        cell(x[0])
    x.requires_grad_()
    train(layer(x)[0], x, *layer.parameters())
    train(cell(x[0])[0], x, *cell.parameters())

def some_sizes(dtype, count):
    for _ in range(count):
        sizes = random.randint(3, 80), random.randint(1, 64), random.randint(1, 64)
        call(dtype, 2, *sizes)

for name in sys.argv[1:]:
    dtype = getattr(torch, name)
    call(dtype, 3, 90, 70, 70)  # larger than all that follow
    some_sizes(dtype, 30)
    before = rss()
    some_sizes(dtype, 150)
    print(name, (rss() - before) // 1024)
"""


# oneDNN, which compiled a kernel for every set of sizes, kept 20 to 50 KiB of a call.
def test_new_sizes_do_not_keep_memory() -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in support.DTYPES]
    run = support.run_python("-c", PROGRAM, *names)
    assert run.returncode == 0, run.stderr
    kept = {name: int(kib) for name, kib in map(str.split, run.stdout.splitlines())}
    assert kept.keys() == set(names)
    assert max(kept.values()) < 3 * 1024, f"KiB that are kept of 150 sizes: {kept}"
