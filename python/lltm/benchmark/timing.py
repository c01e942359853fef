from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..__main__ import usable_cores
from .cases import Case
from .implementations import Layer, Make
from .report import Row

# Runs its work a number of times and returns the seconds per run, by part of the work.
Sampler = Callable[[int], dict[str, float]]


def synchronize() -> None:
    """Waits for the GPU if this process uses it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(run: Callable[[], object], training: bool = False) -> Sampler:
    def sample(iterations: int) -> dict[str, float]:
        with torch.set_grad_enabled(training):
            synchronize()
            start = time.perf_counter()
            for _ in range(iterations):
                run()
            synchronize()
            return {"": (time.perf_counter() - start) / iterations}

    return sample


def layer_timer(make: Make, case: Case) -> Sampler:
    return timed(Layer(make, case).run, case.training)


def parts_timer(make: Make, case: Case) -> Sampler:
    """Times forward and backward separately, on a GPU with a synchronization after each."""
    layer = Layer(make, case)

    def sample(iterations: int) -> dict[str, float]:
        forward = backward = 0.0
        for _ in range(iterations):
            layer.forget_gradients()
            synchronize()
            start = time.perf_counter()
            results = layer.forward()
            synchronize()
            middle = time.perf_counter()
            layer.backward(results)
            synchronize()
            forward += middle - start
            backward += time.perf_counter() - middle
        return {", forward": forward / iterations, ", backward": backward / iterations}

    return sample


def busy() -> str:
    """Describes a load that exceeds the cores that this process may use."""
    load, cores = os.getloadavg()[0], usable_cores()
    return f"the load is {load:.1f} on {cores} cores" if load > cores else ""


def others_run() -> bool:
    """Returns True if another thread of this process runs or waits for a core (Linux only)."""
    this_thread = threading.get_native_id()
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            state = (task / "stat").read_text(encoding="utf-8").rpartition(") ")[2]
            if state.startswith("R") and int(task.name) != this_thread:
                return True
    return False


def wake(sampler: Sampler) -> None:
    """Waits until the threads of the previous turn stop spinning, then makes one call.

    Waits for at most a second, because with OMP_WAIT_POLICY=active they never stop.
    """
    deadline = time.monotonic() + 1.0
    while others_run() and time.monotonic() < deadline:
        time.sleep(0.001)
    sampler(1)


@dataclass
class Settings:
    rounds: int
    seconds: float  # approximate duration of a turn
    compile: bool
    prepacked: bool = False
    checkpoint_steps: int = 0
    load: str = ""  # a load that exceeds the cores: no verdict


def measure(
    title: str,
    builds: Mapping[str, Callable[[], Sampler]],
    settings: Settings,
    flops: Mapping[str, float] | None = None,
) -> Row:
    """Measures implementations in interleaved rounds, each with a warm-up before its turn.

    An implementation that fails is skipped, with the reason. The first must not fail.

    Args:
        builds: makes the sampler of an implementation, by name
        flops: FLOP per run, by name
    """
    row = Row(title, {}, {}, {}, dict(flops or {}))
    samplers: dict[str, Sampler] = {}
    samples: dict[str, dict[str, list[float]]] = {}  # by implementation and part
    first = next(iter(builds))

    def skip(name: str, error: Exception) -> None:
        if name == first:
            raise error
        row.skipped[name] = reason(error)
        samplers.pop(name, None)
        samples.pop(name, None)
        row.iterations.pop(name, None)

    for name, build in builds.items():
        try:
            sampler = build()
            wake(sampler)
            row.iterations[name] = _iterations(sampler, settings.seconds)
            samplers[name] = sampler
        except Exception as error:  # foreign code raises any type
            skip(name, error)
    for _ in range(settings.rounds):
        for name, sampler in list(samplers.items()):
            try:
                wake(sampler)
                taken = sampler(row.iterations[name])
            except Exception as error:
                skip(name, error)
                continue
            for part, seconds in taken.items():
                samples.setdefault(name, {}).setdefault(part, []).append(seconds)
    for name, parts in samples.items():
        row.seconds |= {name + part: seconds for part, seconds in parts.items()}
    return row


def reason(error: Exception) -> str:
    """The message's first line, or the error's class."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _iterations(sampler: Sampler, seconds: float) -> int:
    """Runs that take `seconds`."""
    iterations = 1
    while True:
        start = time.perf_counter()
        sampler(iterations)
        taken = time.perf_counter() - start
        if taken >= seconds:
            return iterations
        iterations = min(10 * iterations, int(1.1 * iterations * seconds / taken) + 1)
