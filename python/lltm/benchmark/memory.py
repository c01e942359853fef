"""What training takes of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .cases import Case, Shape
from .contenders import CHECKPOINTED, OURS, PLAIN, SEQUENCES, Layer, Make, checkpointed
from .report import Check, Goal

# What goals may be about, beside contenders.
SAVED = "memory saved for backward, elements per step and row, in H"
PEAK_MEMORY = "peak memory, in that of plain PyTorch"


def saved_for_backward(make: Make, case: Case) -> float:
    """Returns what a forward pass saves, per step and row of the batch, in units of H elements.

    Memory of the arguments and of the parameters, which is there anyway, does not count.
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


def peak_memory(name: str, case: Case, checkpoint_steps: int = 0) -> int:
    """Returns the bytes that training takes beyond arguments and parameters; in a new process.

    `checkpoint_steps` is that of lltm's layer.
    """
    dtype = str(case.dtype).removeprefix("torch.")
    code = "import sys; from lltm.benchmark import memory as m; m.print_peak_memory(*sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", code, name, str(checkpoint_steps), dtype, *map(str, case.shape)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return int(result.stdout)


def print_peak_memory(name: str, checkpoint_steps: str, dtype: str, *shape: str) -> None:
    """What :func:`peak_memory` runs."""
    case = Case(tuple(map(int, shape)), getattr(torch, dtype), training=True)
    make = checkpointed(int(checkpoint_steps)) if int(checkpoint_steps) else SEQUENCES[name]
    # Loads libraries and starts threads.
    Layer(make, replace(case, shape=(2, *case.shape[1:]))).run()
    layer = Layer(make, case)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _memory("VmRSS")
    layer.run()
    print(_memory("VmHWM") - before)


def checkpoint_memory(case: Case, checkpoint_steps: int) -> tuple[str, str]:
    """Returns a title, and what a layer takes with and without checkpoints."""
    figures = []
    for name, make, steps in (
        (CHECKPOINTED, checkpointed(checkpoint_steps), checkpoint_steps),
        (OURS, SEQUENCES[OURS], 0),
    ):
        text = f"{name} {saved_for_backward(make, case):.2f} H"
        if _knows_peaks():
            text += f", {peak_memory(OURS, case, steps) / 2**20:.0f} MiB"
        figures.append(text)
    title = f"memory saved for backward, elements per step and row, and peak memory, {case}"
    return title, "; ".join(figures)


def _knows_peaks() -> bool:
    """Whether the system can say how much memory a process has had at most: Linux can."""
    return Path("/proc/self/clear_refs").exists()


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure_memory(
    shape: Shape, dtypes: Sequence[torch.dtype], goal: Goal
) -> Iterator[tuple[str, str, Check | None]]:
    """Yields title, figures and, where there is a goal, the figure beside it."""

    def check(case: Case, about: str, what: str, value: float) -> Check | None:
        limit = goal(case, about)
        return None if limit is None else Check(what, value, limit)

    for dtype in dtypes:
        case = Case(shape, dtype, training=True)
        saved = {name: saved_for_backward(make, case) for name, make in SEQUENCES.items()}
        text = ", ".join(f"{name} {units:.2f} H" for name, units in saved.items())
        title = f"memory saved for backward, elements per step and row, {case}"
        yield title, text, check(case, SAVED, f"{OURS}, in H", saved[OURS])
    if not _knows_peaks():
        return
    case = Case(shape, training=True)
    peaks = {name: peak_memory(name, case) for name in SEQUENCES}
    text = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items())
    ratio = peaks[OURS] / peaks[PLAIN]
    yield f"peak memory, {case}", text, check(case, PEAK_MEMORY, f"{OURS} / {PLAIN}", ratio)
