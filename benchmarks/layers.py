"""Layers on a CPU beside other implementations, with what the machine allows
and the goals of this project: what `make bench` measures.

    python benchmarks/layers.py --json layers.json

The method is that of `python -m lltm.benchmark`. This adds bounds, other
runtimes, streams, sequences of other lengths, one thread beside all, memory.

The same rounds measure what the CPU can do at most: a large matrix product, and
reading as many bytes as the weights have. The bound of a case is the time of
its FLOP at the rate of the one, or of its passes over the weights at the rate
of the other, whichever is longer. nn.LSTM in ONNX Runtime and in OpenVINO is
compared where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from checks import Check, CheckedRow, check_lines, checked, checks_as_json
from goals import chunk_goal, sequence_goal, step_goal
from machine import (
    PEAK,
    PRODUCT_FLOPS,
    READ,
    Build,
    bounds,
    machine,
    on_threads,
    thread_counts,
    yardsticks,
)
from memory import measure_memory
from runtimes import RUNTIMES
from torch import nn

from lltm import modules
from lltm.benchmark.__main__ import begin, cases, finish, parser
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.contenders import OURS, SEQUENCES, Make, State, contenders
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Sampler, Settings, layer_timer, measure

PREPACKED = "lltm, prepacked"
# Chunks of a stream.
CHUNKS: tuple[Shape, ...] = ((1, 1, 128, 256), (1, 1, 512, 512), (10, 4, 128, 256))

Goal = Callable[[Case, str], float | None]


class Prepacked(nn.Module):
    """The prepacked form of a layer."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = modules.LLTM(input_size, hidden_size, dtype=dtype).prepack()

    def forward(self, input: torch.Tensor, state: State) -> Any:
        return self.packed(input, state)


def compare(case: Case, settings: Settings) -> CheckedRow:
    """Measures every implementation of a case."""
    makes = contenders(case, settings.compile)
    if not (case.is_step or case.training) and case.dtype == torch.float32:
        makes |= RUNTIMES
    goal = step_goal if case.is_step else sequence_goal
    return measure_case(str(case), case, makes, settings, goal)


def measure_case(
    title: str, case: Case, makes: Mapping[str, Make], settings: Settings, goal: Goal
) -> CheckedRow:
    """Measures implementations of a case, and the least time that it can take here."""
    builds: dict[str, Build] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    first = next(iter(makes))
    amounts = {first: case.flops, PEAK: PRODUCT_FLOPS}
    row = checked(measure(title, builds | yardsticks(case), settings, amounts))
    least = bounds(row, case)
    if PEAK in least:  # else nothing is known of the GEMMs
        row.bound = max(least.values(), key=lambda bound: bound.seconds)
    for name in row.seconds:
        limit = goal(case, name)
        if limit is None:
            continue
        if name in least:
            what = f"share of the rate of {name}"
            row.checks.append(Check(what, least[name].share, limit, at_least=True))
        else:
            row.checks.append(Check(f"{first} / {name}", row.ratio(name), limit))
    return row


def scaling(shape: Shape, settings: Settings) -> Iterator[Row]:
    """Measures one thread beside all."""
    for training in (False, True):
        case = Case(shape, training=training)
        builds: dict[str, Build] = {
            f"{name}, {threads}": partial(
                on_threads, count, partial(layer_timer, SEQUENCES[name], case)
            )
            for name in (OURS, "nn.LSTM")
            for threads, count in thread_counts().items()
        }
        yield measure(f"threads: {case}", builds, settings)


def time_per_step(case: Case) -> Sampler:
    sampler = layer_timer(SEQUENCES[OURS], case)
    return lambda iterations: {
        part: seconds / case.steps for part, seconds in sampler(iterations).items()
    }


def lengths(steps: Sequence[int], sizes: Shape, settings: Settings) -> Iterator[Row]:
    """Measures the time of a step in sequences of different lengths."""
    for training in (False, True):
        cases = {f"T={n}": Case((n, *sizes), training=training) for n in steps}
        builds = {name: partial(time_per_step, case) for name, case in cases.items()}
        *_, longest = cases.values()
        yield measure(f"time of a step by length; the longest: {longest}", builds, settings)


def streaming(shapes: Sequence[Shape], settings: Settings) -> Iterator[Row]:
    """Measures chunks of a stream, with weights packed once and packed in every call."""
    makes: dict[str, Make] = {PREPACKED: Prepacked, OURS: modules.LLTM, "nn.LSTM": nn.LSTM}
    for shape in shapes:
        case = Case(shape)
        title = f"chunk of a stream: {case}"
        yield measure_case(title, case, makes | RUNTIMES, settings, chunk_goal)


def beyond_cases(quick: bool, dtypes: Sequence[torch.dtype], settings: Settings) -> Iterator[Row]:
    """Measures what has no case of its own."""
    steps = (10, 100) if quick else (100, 10, 1000, 10000)
    yield from lengths(steps, (16, 32, 64), settings)
    yield from streaming(CHUNKS[:1] if quick else CHUNKS, settings)
    # After the others: to set a number of threads changes what MKL does, for good.
    yield from machine(dtypes, settings)
    yield from scaling((100, *sizes(quick)), settings)


def sizes(quick: bool) -> Shape:
    return (16, 32, 65) if quick else (64, 128, 256)


def main() -> None:
    options = parser("python benchmarks/layers.py", __doc__).parse_args()
    settings = begin(options)
    rows: list[Row] = []
    notes: list[str] = []  # about memory
    checks: list[tuple[str, Check]] = []

    def show(row: Row) -> None:
        rows.append(row)
        if isinstance(row, CheckedRow):
            checks.extend((row.title, check) for check in row.checks)
        print("\n".join(row.lines()), flush=True)

    for case in cases(options):
        show(compare(case, settings))
    pictured = list(rows)
    if options.shapes is None:
        dtypes = [getattr(torch, name) for name in options.dtype]
        for row in beyond_cases(options.quick, dtypes, settings):
            show(row)
        for title, text, check in measure_memory((512, *sizes(options.quick)), dtypes):
            notes.append(f"{title}: {text}")
            checks.append((title, check))
            print(f"\n{title}\n  {text}\n  {check}", flush=True)
    print("\n".join(check_lines(checks)))
    results = {
        "settings": asdict(settings),
        "memory": notes,
        "goals": checks_as_json(checks),
    }
    finish(options, results, rows, pictured, omit=(PEAK, READ))


if __name__ == "__main__":
    main()
