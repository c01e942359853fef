"""Memory of training, in addition to arguments and parameters."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .cases import Case
from .implementations import Layer, Make

RESET = Path("/proc/self/clear_refs")  # only Linux reports a process's peak memory


def saved_for_backward(make: Make, case: Case) -> float:
    """Returns the memory that forward saves, in H elements per step and sequence."""
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


def peak_memory(make: Make, case: Case) -> int:
    """Returns the bytes that a training step needs in a new process. Linux only."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (make, case, torch.get_num_threads()))


def _peak_memory(make: Make, case: Case, threads: int) -> int:
    torch.set_num_threads(threads)
    # Load libraries and start threads.
    Layer(make, replace(case, shape=(2, *case.shape[1:]))).run()
    layer = Layer(make, case)
    RESET.write_bytes(b"5")  # resets the peak
    before = _status("VmRSS")
    layer.run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def lines(makes: Mapping[str, Make], case: Case) -> Iterator[str]:
    yield "  saved for backward, elements per time step and sequence; peak memory of a step"
    for name, make in makes.items():
        line = f"  {name:20}{saved_for_backward(make, case):8.2f} H"
        if RESET.exists():
            line += f"{peak_memory(make, case) / 2**20:9.0f} MiB"
        yield line
