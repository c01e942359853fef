"""Measures layers on cores that processes or threads share. Each part prints a Markdown table.

    python benchmarks/sharing.py processes --both   1, 2 and 4 processes
    python benchmarks/sharing.py callers            1, 4 and 16 threads of a process call a layer

A field has the calls per second relative to a single process (processes) or to torch.nn (callers),
and the 99th percentile of a call. Fields of these baselines have the calls per second. The
processes inherit GOMP_SPINCOUNT. --both measures in turn without it and with GOMP_SPINCOUNT=1000.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from sweep import PREPACKED, prepacked
from torch import Tensor, nn

from lltm.benchmark.__main__ import written
from lltm.benchmark.cases import Case
from lltm.benchmark.contenders import OURS, Layer, Make, contenders
from lltm.benchmark.report import environment

SPINS, UNSET = "GOMP_SPINCOUNT", "not set"
ROUNDS = 3
THEIRS, MIXED = "torch.nn", "Linear-GRU-Linear"
LSTM, GRU = Case((100, 16, 32, 128), cell="lstm"), Case((60, 33, 100, 200), cell="gru")
SHAPES = ((100, 1, 128, 256), LSTM.shape, (20, 8, 512, 512))
SERVED = ((50, 1, 64, 128), (50, 8, 64, 256), (1, 1, 64, 128))
SHARED = [*(replace(LSTM, shape=shape) for shape in SHAPES), GRU]
SHARED += [replace(case, training=True) for case in (LSTM, GRU, replace(GRU, cell=MIXED))]
# Cases and counts. The cell MIXED is a model.
PARTS: dict[str, tuple[list[Case], tuple[int, ...]]] = {
    "processes": (SHARED, (1, 2, 4)),
    "callers": ([replace(LSTM, shape=shape) for shape in SERVED], (1, 4, 16)),
}
Times = list[list[float]]  # seconds of each call, by thread
CONTEXT = multiprocessing.get_context("spawn")


class Mixed(nn.Module):
    def __init__(self, make: Make, input_size: int, hidden: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(input_size, input_size), nn.Linear(hidden, hidden)
        self.layer = make(input_size, hidden, dtype=dtype)

    def forward(self, input: Tensor, state: Sequence[Tensor]) -> tuple[Tensor]:
        return (self.last(self.layer(self.first(input), state[0])[0]),)


def implementations(case: Case) -> dict[str, Make]:
    if case.cell == MIXED:
        found = implementations(replace(case, cell="gru"))
        return {name: partial(Mixed, make) for name, make in found.items()}
    ours, theirs = contenders(case).values()
    both = {THEIRS: theirs, OURS: ours}
    return both if case.training else both | {PREPACKED: prepacked(case)}


def start(count: int, spins: str) -> Any:
    """Starts processes with a GOMP_SPINCOUNT, which libgomp reads when it is loaded."""
    os.environ.pop(SPINS, None)
    os.environ.update({SPINS: spins} if spins != UNSET else {})
    return CONTEXT.Pool(count)


def calls(case: Case, name: str, callers: int, seconds: float, processes: Any) -> Times:
    """Measures in each of `callers` threads, after all threads of all `processes` are ready."""
    run = Layer(implementations(case)[name], case).run
    threads = threading.Barrier(callers, processes.wait)

    def caller(_: int) -> list[float]:
        times = []
        with torch.set_grad_enabled(case.training):
            for _ in range(3):
                run()
            threads.wait()
            end = (begin := time.perf_counter()) + seconds
            while begin < end:
                run()
                times.append(-begin + (begin := time.perf_counter()))
        return times

    if callers == 1:  # in the main thread, because a second team of threads changes the spinning
        return [caller(0)]
    with ThreadPoolExecutor(callers) as pool:
        return [*pool.map(caller, range(callers))]


def sample(rounds: Sequence[Times]) -> tuple[float, float]:
    """Returns the calls per second and the 99th percentile of their seconds."""
    took = sorted(chain.from_iterable(chain.from_iterable(rounds)))
    rates = (sum(len(times) / sum(times) for times in threads) for threads in rounds)
    return statistics.mean(rates), took[int(0.99 * len(took))]


def table(part: str, states: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    cases, counts = PARTS[part]
    columns = [*product(states, counts)]
    pools = {spins: start(counts[-1] if part == "processes" else 1, spins) for spins in states}
    manager = CONTEXT.Manager()
    heads = (f"{part}: {n}{f', {SPINS}={spins}' * (spins != UNSET)}" for spins, n in columns)
    print(f"\n| | | {' | '.join(heads)} |\n|{'---|' * (2 + len(columns))}")
    for case in cases:
        cell = MIXED if case.cell == MIXED else case.cell.upper()
        title = f"{cell} {'training' if case.training else 'inference'} "
        title += "×".join(map(str, case.shape))
        names = [n for n in implementations(case) if (part, n) != ("processes", PREPACKED)]
        every: dict[Any, list[Times]] = {key: [] for key in product(columns, names)}
        for ((spins, count), name), rounds in ROUNDS * [*every.items()]:
            many = {"processes": 1, "callers": 1, part: count}
            task = (case, name, many["callers"], seconds / ROUNDS)
            tasks = many["processes"] * [(*task, manager.Barrier(many["processes"]))]
            found = pools[spins].starmap(calls, tasks, chunksize=1)
            rounds.append([*chain.from_iterable(found)])
        samples = {key: sample(rounds) for key, rounds in every.items()}
        for name in names:
            cells = []
            for spins, n in columns:
                rate, late = samples[key := ((spins, n), name)]
                base = ((spins, 1), name) if part == "processes" else ((spins, n), THEIRS)
                shown = f"{rate:.0f}/s" if base == key else f"{rate / samples[base][0]:.2f}"
                cells.append(f"{shown} ({1e3 * late:.1f} ms)")
                row = {"title": title, "implementation": name, part: n, SPINS: spins}
                yield row | {"calls per second": rate, "99th percentile, seconds": late}
            print(f"| {title} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    option("--both", action="store_true", help=f"without {SPINS} and with {SPINS}=1000")
    option("--seconds", type=float, default=3.0, help="of a measurement; default: 3")
    option("--quick", action="store_true", help="only the first case and two counts")
    option("--json", type=written, metavar="FILE", help="write the results")
    options = parser.parse_args()
    if options.quick:
        PARTS.update({part: (cases[:1], counts[:2]) for part, (cases, counts) in PARTS.items()})
    states = [UNSET, "1000"] if options.both else [os.environ.get(SPINS, UNSET)]
    print("\n".join(f"{name}: {value}" for name, value in environment().items()), flush=True)
    results = [row for part in options.parts for row in table(part, states, options.seconds)]
    if options.json is not None:
        found = {"environment": environment(), "rows": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
