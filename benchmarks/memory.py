"""Measures the memory of training; as a program, with and without activation checkpoints.

python benchmarks/memory.py --checkpoint-steps 64
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lltm import modules
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.contenders import OURS, Layer, Make
from lltm.benchmark.timing import Settings, layer_timer, measure

CHECKPOINTED = "lltm, checkpointed"
PEAK = "--peak"  # runs print_peak_memory in a new process
LONG_SHAPES: tuple[Shape, ...] = ((4000, 16, 32, 128), (2000, 64, 128, 256))


def checkpointed(checkpoint_steps: int) -> Make:
    return partial(modules.LLTM, checkpoint_steps=checkpoint_steps)


def saved_for_backward(make: Make, case: Case) -> float:
    """Returns the memory that forward saves, in H elements per step and sequence.

    Arguments and parameters do not count.
    """
    layer = Layer(make, case)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.forward()
    for tensor in (layer.input, *layer.state, *layer.module.parameters()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    *leading, _, hidden = case.shape
    elements = sum(storage.nbytes() for storage in saved.values()) / layer.input.element_size()
    return elements / torch.Size(leading).numel() / hidden


def peak_memory(case: Case, checkpoint_steps: int = 0) -> int:
    """Returns the bytes that training needs in addition to arguments and parameters.

    Runs in a new process.
    """
    dtype = str(case.dtype).removeprefix("torch.")
    result = subprocess.run(
        [sys.executable, __file__, PEAK, str(checkpoint_steps), dtype, *map(str, case.shape)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return int(result.stdout)


def print_peak_memory(checkpoint_steps: str, dtype: str, *shape: str) -> None:
    case = Case(tuple(map(int, shape)), getattr(torch, dtype), training=True)
    make = checkpointed(int(checkpoint_steps)) if int(checkpoint_steps) else modules.LLTM
    # Load libraries and start threads.
    Layer(make, replace(case, shape=(2, *case.shape[1:]))).run()
    layer = Layer(make, case)
    Path("/proc/self/clear_refs").write_bytes(b"5")  # resets the peak
    before = _memory("VmRSS")
    layer.run()
    print(_memory("VmHWM") - before)


def _knows_peaks() -> bool:
    """True on Linux, which reports a process's peak memory."""
    return Path("/proc/self/clear_refs").exists()


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def checkpointing(case: Case, checkpoint_steps: int, settings: Settings) -> Iterator[str]:
    makes = {CHECKPOINTED: checkpointed(checkpoint_steps), OURS: modules.LLTM}
    builds = {name: partial(layer_timer, make, case) for name, make in makes.items()}
    yield from measure(f"checkpoint_steps={checkpoint_steps}: {case}", builds, settings).lines()
    yield "  memory saved for backward, elements per time step and sequence, and peak memory"
    for (name, make), steps in zip(makes.items(), (checkpoint_steps, 0), strict=True):
        line = f"  {name:20}{saved_for_backward(make, case):8.2f} H"
        if _knows_peaks():
            line += f"{peak_memory(case, steps) / 2**20:9.0f} MiB"
        yield line


def main() -> None:
    made = argparse.ArgumentParser(description="Training with and without checkpoints.")
    made.add_argument("--checkpoint-steps", type=int, required=True, metavar="N")
    made.add_argument("--rounds", type=int, default=15)
    options = made.parse_args()
    settings = Settings(rounds=options.rounds, seconds=0.05, compile=False)
    for shape in LONG_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(shape, dtype, training=True)
            print("\n".join(checkpointing(case, options.checkpoint_steps, settings)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [PEAK]:
        print_peak_memory(*sys.argv[2:])
    else:
        main()
