"""The results: printed lines and tables, a picture, a comparison with an earlier run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..__main__ import report
from .cases import Case, Shape
from .contenders import OURS


@dataclass
class Row:
    """The results of one case: implementations measured in the same rounds.

    The first implementation is compared with each of the others.
    """

    title: str
    seconds: dict[str, list[float]]  # by implementation, a value per round
    iterations: dict[str, int]
    skipped: dict[str, str]  # the reason, by implementation
    amounts: dict[str, float] = field(default_factory=dict)  # FLOP or bytes per run
    unit: str = "FLOP"

    def ratio(self, name: str, ours: str | None = None) -> float:
        """Median over the rounds of the time of `ours`, or the first, divided by this time."""
        first = self.seconds[ours or next(iter(self.seconds))]
        return statistics.median(
            ours / theirs for ours, theirs in zip(first, self.seconds[name], strict=True)
        )

    def speedup(self, name: str, ours: str | None = None) -> float:
        """How many times as fast as this implementation `ours`, or the first one, is."""
        return 1 / self.ratio(name, ours)

    def lines(self) -> Iterator[str]:
        first, *_ = self.seconds
        width = max(map(len, (*self.seconds, *self.skipped)))
        yield f"\n{self.title}"
        yield f"  {'':{width}}{'median':>10}{'quartiles':>20}  speedup of {first}"
        for name, seconds in self.seconds.items():
            low, median, high = map(time_text, quartiles(seconds))
            line = f"  {name:{width}}{median:>10}{low:>10}{high:>10}"
            line += f"{'' if name == first else format(self.speedup(name), '.2f'):>8}"
            if name in self.amounts:
                rate = self.amounts[name] / statistics.median(seconds)
                line += f"{rate / 1e9:>7.1f} G{self.unit}/s"
            yield line
        for name, reason in self.skipped.items():
            yield f"  {name:{width}}   not measured: {reason}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def speedup_text(speedup: float) -> str:
    """Two significant digits, such as 0.95, 1.3 and 14."""
    digits = 2 if speedup < 0.995 else 1 if speedup < 9.95 else 0
    return f"{speedup:.{digits}f}"


def time_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def tables(measured: Mapping[Case, Row]) -> Iterator[str]:
    """Yields the speedups over torch.nn as Markdown: a table of steps and a table of sequences.

    A field has the speedups of training and inference. docs/benchmarks.md shows the second table.
    """

    def field(cell: str, shape: Shape, dtype: torch.dtype) -> str:
        speedups = []
        for training in (True, False):
            case = Case(shape, dtype, training, cell=cell)
            theirs, row = f"nn.{case.yardstick}", measured[case]
            found = OURS in row.seconds and theirs in row.seconds
            speedups.append(speedup_text(row.speedup(theirs)) if found else "-")
        return ", ".join(speedups)

    for sizes in ("B×I×H", "T×B×I×H"):
        shapes = dict.fromkeys(c.shape for c in measured if len(c.shape) == len(sizes.split("×")))
        if not shapes:
            continue
        cells = dict.fromkeys(case.cell for case in measured)
        lines = [[sizes, "", *(cell.upper() for cell in cells)]]
        for shape in shapes:
            for dtype in dict.fromkeys(case.dtype for case in measured):
                name = str(dtype).removeprefix("torch.")
                fields = (field(cell, shape, dtype) for cell in cells)
                lines.append(["×".join(map(str, shape)), name, *fields])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        yield ""
        for line in lines:
            yield f"| {' | '.join(f'{text:{n}}' for text, n in zip(line, widths, strict=True))} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the times of the implementations relative to lltm's, a line for each case."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    names = dict.fromkeys(name for row in rows for name in row.seconds)
    works: dict[str, list[Row]] = {}
    for row in rows:
        works.setdefault(", ".join(row.title.split(", ")[:2]), []).append(row)
    sizes = [len(group) for group in works.values()]
    figure = Figure(figsize=(9, 1.5 + 0.6 * len(works) + 0.22 * sum(sizes)), layout="constrained")
    grid = figure.subplots(len(works), 1, sharex=True, squeeze=False, height_ratios=sizes)
    for axes, (work, group) in zip(grid[:, 0], works.items(), strict=True):
        for k, name in enumerate(names):
            shown = [(y, row) for y, row in enumerate(group) if name in row.seconds]
            times = [1 / row.ratio(name) for _, row in shown]
            axes.scatter(times, [y for y, _ in shown], s=22, color=f"C{k}", label=name)
        axes.set_yticks(
            range(len(group)), [row.title.removeprefix(f"{work}, ") for row in group], fontsize=7
        )
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", which="both", linewidth=0.3)
        axes.set_title(work, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("time relative to lltm: how many times as fast lltm is", fontsize=8)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def samples(path: Path) -> dict[str, dict[str, list[float]]]:
    """Reads a file of --json: seconds of each round, by title and implementation."""
    return {row["title"]: row["seconds"] for row in json.loads(path.read_bytes())["rows"]}


def compare_with(path: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yields times of an earlier run and now."""
    earlier = samples(path)
    yield f"\ncompared with {path}"
    for row in rows:
        name, seconds = next(iter(row.seconds.items()))
        before = earlier.get(row.title, {}).get(name)
        if before:
            old, new = statistics.median(before), statistics.median(seconds)
            yield f"  {row.title}"
            yield (
                f"    earlier{time_text(old):>10}   now{time_text(new):>10}"
                f"   speedup{old / new:>6.2f}"
            )


def environment() -> dict[str, str]:
    """Returns the conditions of a run: versions, CPU and threads. `python -m lltm` shows more."""
    lines = (line.partition(": ") for line in report().splitlines())
    found = {name: value for name, _, value in lines}
    wanted = ("lltm", "torch", "compiler", "CPU kernels in use", "CUDA devices", "processor")
    return {name: found[name] for name in wanted} | {"threads": str(torch.get_num_threads())}
