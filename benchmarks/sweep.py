"""Shapes that nobody chose: layers on a CPU beside torch.nn's and ONNX Runtime's.

    python benchmarks/sweep.py --json build/results/sweep.json

The shapes are drawn at random, each size on a logarithmic scale: T from 1 to 500, B from 1 to 256,
I and H from 1 to 1024, odd ones included. Each is measured for every cell, dtype and direction, by
the method of `python -m lltm.benchmark`. Shapes of more than LARGEST products are drawn again:
their GEMMs are all that counts, and those of a few such shapes would take as long as all others.

Prints the quartiles of the ratios to torch.nn's layer and to ONNX Runtime's, and the ten worst rows
with what the kernels chose (LLTM_SCHEDULE). Below 1 is faster.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pictures
import torch
from goals import ONNX_RUNTIME
from runtimes import runtimes

from lltm.benchmark.__main__ import begin, finish, parser
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.contenders import OURS, contenders
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Settings, layer_timer, measure

LIMITS = (500, 256, 1024, 1024)  # of T, B, I, H
LARGEST = 10**10


def drawn(count: int, seed: int) -> Iterator[Shape]:
    """Yields so many shapes (T, B, I, H)."""
    generator = random.Random(seed)
    while count > 0:
        sizes = (round(math.exp(generator.uniform(0, math.log(most)))) for most in LIMITS)
        shape = tuple(sizes)
        if Case(shape, cell="lstm").flops <= 2 * LARGEST:
            count -= 1
            yield shape


def compare(case: Case, settings: Settings) -> Row:
    theirs = f"nn.{case.yardstick}"
    every = contenders(case) | runtimes(case)
    makes = {n: m for n, m in every.items() if n in (OURS, theirs) or n.startswith(ONNX_RUNTIME)}
    return measure(
        str(case), {n: partial(layer_timer, m, case) for n, m in makes.items()}, settings
    )


def ratios(measured: Mapping[Case, Row], other: str) -> dict[Case, float]:
    """To the contender whose name begins so, where it was measured."""
    found = (
        (c, row, [n for n in row.seconds if n.startswith(other)]) for c, row in measured.items()
    )
    return {case: row.ratio(names[0]) for case, row, names in found if names}


def distribution(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    ninth = statistics.quantiles(values, n=10, method="inclusive")[-1]
    slower = sum(value > 1.05 for value in values)
    return (
        f"{min(values):.2f} | {low:.2f} | {middle:.2f} | {high:.2f} | {ninth:.2f}"
        f" | {max(values):.2f} | {slower} of {len(values)}"
    )


def table(measured: Mapping[Case, Row]) -> Iterator[str]:
    """Yields the distributions as Markdown."""
    yield "| | least | quartile | median | quartile | 90 % | most | above 1.05 |"
    yield "|---|---|---|---|---|---|---|---|"
    for other in ("nn.", ONNX_RUNTIME):
        found = ratios(measured, other)
        for cell in dict.fromkeys(case.cell for case in found):
            for dtype in dict.fromkeys(case.dtype for case in found):
                for training in (False, True):
                    values = [
                        ratio
                        for c, ratio in found.items()
                        if (c.cell, c.dtype, c.training) == (cell, dtype, training)
                    ]
                    if len(values) < 2:
                        continue
                    kind = "training" if training else "inference"
                    name = f"{cell.upper()}, {str(dtype).removeprefix('torch.')}, {kind}"
                    beside = f" beside {other}" if other == ONNX_RUNTIME else ""
                    yield f"| {name}{beside} | {distribution(values)} |"


def schedule(case: Case) -> list[str]:
    """What the kernels choose; read from the environment once in a process, so in a new one."""
    program = f"""
import torch
from lltm.benchmark.cases import Case
from lltm.benchmark.contenders import OURS, Layer, contenders

case = {case!r}
with torch.set_grad_enabled(case.training):
    Layer(contenders(case)[OURS], case).run()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LLTM_SCHEDULE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line for line in result.stderr.splitlines() if line.startswith("lltm: ")]


def worst(measured: Mapping[Case, Row], count: int = 10) -> Iterator[str]:
    found = ratios(measured, "nn.")
    for case in sorted(found, key=found.__getitem__, reverse=True)[:count]:
        yield f"{found[case]:.2f}  {case}"
        yield from (f"      {line}" for line in schedule(case))


def picture(measured: Mapping[Case, Row], path: Path) -> None:
    """Draws the shares of shapes below a ratio to torch.nn's layer."""
    found = ratios(measured, "nn.")
    kinds = dict.fromkeys((case.cell, case.dtype) for case in found)
    with pictures.page(path, height=5.4) as figure:
        both = figure.subplots(2, 1, sharex=True)
        for axes, training in zip(both, (True, False), strict=True):
            pictures.relative_time(axes, [0.05, 0.1, 0.2, 0.5, 1, 2])
            for cell, dtype in kinds:
                values = sorted(
                    r
                    for c, r in found.items()
                    if (c.cell, c.dtype, c.training) == (cell, dtype, training)
                )
                axes.step(
                    [*values[:1], *values],
                    [100 * n / len(values) for n in range(len(values) + 1)],
                    "-" if dtype == torch.float32 else ":",
                    where="post",
                    color=pictures.COLOURS[cell],
                    label=f"{cell.upper()}, {str(dtype).removeprefix('torch.')}",
                )
            axes.set_ylim(0, 102)
            axes.grid(axis="y")
            axes.set_title("training" if training else "inference", fontsize=10)
            axes.set_ylabel("% of the shapes")
        both[1].set_xlabel("at most this time, in units of torch.nn's layer")
        figure.legend(
            *both[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8
        )


def main() -> None:
    made = parser("python benchmarks/sweep.py", __doc__)
    made.add_argument("--count", type=int, default=60, help="shapes; default: 60")
    made.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the shapes")
    options = made.parse_args()
    options.rounds = options.rounds or 7
    settings = begin(options)
    settings.seconds /= 2
    print(f"--seed {options.seed}")
    measured: dict[Case, Row] = {}
    for shape in options.shapes or drawn(options.count, options.seed):
        for cell in options.cell:
            for name in options.dtype:
                for training in (False, True):
                    case = Case(shape, getattr(torch, name), training, cell=cell)
                    row = measured[case] = compare(case, settings)
                    named = (f"{row.ratio(n):.2f} {n}" for n in list(row.seconds)[1:])
                    print(f"{case}: of {', '.join(named)}", flush=True)
    print("\n".join(["", *table(measured), "", "The ten worst:", *worst(measured)]))
    results = {"settings": asdict(settings), "seed": options.seed}
    finish(options, results, list(measured.values()), ())
    if find_spec("matplotlib") is not None:
        picture(measured, options.plot)
        print(f"Picture: {options.plot}")


if __name__ == "__main__":
    main()
