"""Layers that several processes, or several threads of a process, call concurrently."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import torch

from .cases import Case
from .implementations import Layer, Make
from .report import Row, time_text
from .timing import Sampler, Settings, measure

LATE = ", 99th percentile"
TIMEOUT = 60.0  # of waiting for the others, in seconds, if one has failed


def call(
    make: Make, case: Case, callers: int, seconds: float, threads: int, ready: Any
) -> list[list[float]]:
    """Calls a layer in this process, and returns the seconds of each call, by caller.

    Args:
        callers: threads that call the layer
        threads: OpenMP threads of each caller
        ready: barrier of all processes
    """
    torch.set_num_threads(threads)
    layer = Layer(make, case)
    start = threading.Barrier(callers, ready.wait, TIMEOUT)

    def caller(_: int) -> list[float]:
        times = []
        with torch.set_grad_enabled(case.training):
            for _ in range(3):
                layer.run()
            start.wait()
            end = (begin := time.perf_counter()) + seconds
            while begin < end:
                layer.run()
                times.append(-begin + (begin := time.perf_counter()))
        return times

    if callers == 1:  # in the main thread, because a second team of threads changes the spinning
        return [caller(0)]
    with ThreadPoolExecutor(callers) as pool:
        return [*pool.map(caller, range(callers))]


def compare(
    cases: Mapping[Case, Mapping[str, Make]], processes: int, callers: int, settings: Settings
) -> Iterator[Row]:
    """Measures cases with a number of processes, each with a number of callers.

    A time is the time between two calls of all callers. A turn lasts `settings.seconds`.
    """
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(processes) as pool:
        ready = manager.Barrier(processes, timeout=TIMEOUT)

        def sampler(make: Make, case: Case) -> Sampler:
            def sample(_: int) -> dict[str, float]:
                task = (make, case, callers, settings.seconds, torch.get_num_threads(), ready)
                every = [*chain(*pool.starmap(call, processes * [task], chunksize=1))]
                rate = sum(len(times) / sum(times) for times in every)
                calls = sorted(chain(*every))
                return {"": 1 / rate, LATE: calls[99 * len(calls) // 100]}

            return sample

        for case, makes in cases.items():
            builds = {name: partial(sampler, make, case) for name, make in makes.items()}
            title = f"{case}, processes: {processes}, callers: {callers}"
            yield measure(title, builds, settings)


def lines(row: Row) -> Iterator[str]:
    """Yields the calls per second of all callers, the 99th percentile of a call, the speedups."""
    names = [name for name in row.seconds if not name.endswith(LATE)]
    yield f"\n{row.title}"
    yield f"  {'':20}{'calls/s':>10}{'99 %':>12}  speedup of {names[0]}"
    for name in names:
        rate = 1 / statistics.median(row.seconds[name])
        late = time_text(statistics.median(row.seconds[name + LATE]))
        yield f"  {name:20}{rate:>10.0f}{late:>12}{row.speedup(name):>8.2f}"
    for name, reason in row.skipped.items():
        yield f"  {name:20}   not measured: {reason}"
