"""The results: printed lines and tables, a picture, a comparison with an earlier run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..__main__ import report
from .cases import Case, Shape

# Gray and the colors are legible on white and on dark pages, and for color-blind readers.
INK = "#7a7a7a"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
KINDS = ("training", "inference")


@dataclass
class Row:
    """The results of one case: implementations measured in the same rounds.

    The first implementation is compared with each of the others.
    """

    title: str
    seconds: dict[str, list[float]]  # by implementation, a value per round
    iterations: dict[str, int]
    skipped: dict[str, str]  # the reason, by implementation
    flops: dict[str, float] = field(default_factory=dict)  # per run, by implementation

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
            if name in self.flops:
                line += f"{self.flops[name] / statistics.median(seconds) / 1e9:>7.1f} GFLOP/s"
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


def over_torch(case: Case, row: Row) -> float | None:
    """Returns the speedup over torch.nn, or None if torch.nn failed."""
    theirs = f"nn.{case.baseline}"
    return row.speedup(theirs) if theirs in row.seconds else None


def tables(measured: Mapping[Case, Row]) -> Iterator[str]:
    """Yields the speedups over torch.nn as Markdown: a table of steps and a table of sequences.

    A field has the speedups of training and inference.
    """

    def field(cell: str, shape: Shape, dtype: torch.dtype) -> str:
        pair = (Case(shape, dtype, training, cell=cell) for training in (True, False))
        speedups = (over_torch(case, measured[case]) for case in pair)
        return ", ".join("-" if each is None else speedup_text(each) for each in speedups)

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


@contextmanager
def panels(height: float, path: Path) -> Iterator[Any]:
    """Two panels, training and inference, with one axis of speedups; without a background. Yields
    the figure, and saves it as .svg or .png."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inked, INK)
    style |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style | {"legend.frameon": False}):
        # Small enough for a phone.
        figure = Figure(figsize=(4.4, height), layout="constrained")
        figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, kind in zip(figure.axes, KINDS, strict=True):
            axes.axvline(1, color=INK, linewidth=1)
            axes.set_title(kind, fontsize=10)
            axes.tick_params(axis="y", length=0)
        yield figure
        most = figure.axes[0].get_xlim()[1]
        figure.axes[0].set_xticks([1, 5, 10], ["1\ntorch.nn", "5", "10"])
        figure.axes[0].set_xlim(0, 1.2 * most)  # with room for the texts
        figure.supxlabel("times as fast as torch.nn (more is better)", fontsize=9)
        figure.savefig(path, transparent=True, dpi=200)


def draw(measured: Mapping[Case, Row], path: Path) -> None:
    """Draws the speedups over torch.nn as bars."""
    cells = dict.fromkeys(case.cell for case in measured)
    places: dict[tuple[Shape, torch.dtype], int] = {}  # from top to bottom
    for case in measured:
        places.setdefault((case.shape, case.dtype), len(places))
    thickness = 0.8 / len(cells)
    with panels(1.4 + 0.2 * len(cells) * len(places), path) as figure:
        for axes, kind in zip(figure.axes, KINDS, strict=True):
            for k, cell in enumerate(cells):
                offset = thickness * (k - (len(cells) - 1) / 2)
                bars = {
                    places[case.shape, case.dtype] + offset: speedup
                    for case, row in measured.items()
                    if case.cell == cell and case.training == (kind == "training")
                    if (speedup := over_torch(case, row)) is not None
                }
                look: Any = {"color": COLORS[k % len(COLORS)], "label": cell.upper()}
                drawn = axes.barh([*bars], [*bars.values()], 0.85 * thickness, **look)
                texts = [f"{speedup_text(speedup)}×" for speedup in bars.values()]
                axes.bar_label(drawn, texts, padding=3, fontsize=8)
        first = figure.axes[0]
        first.set_ylim(len(places) - 0.5, -0.5)
        several = len({dtype for _, dtype in places}) > 1
        names = [shape_text(*place, with_dtype=several) for place in places]
        first.set_yticks([*places.values()], names, fontsize=8)
        figure.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_dots(speedups: Mapping[tuple[str, str, str, str], Sequence[float]], path: Path) -> None:
    """Draws the speedups over torch.nn in float32, a dot per shape, with the median.

    Args:
        speedups: by cell, dtype, kind and baseline
    """
    cells = [cell for cell in ("GRU", "LSTM") if any(cell == name for name, *_ in speedups)]
    with panels(1 + 0.5 * len(cells), path) as figure:
        for axes, kind in zip(figure.axes, KINDS, strict=True):
            for k, cell in enumerate(cells):
                values = sorted(speedups.get((cell, "float32", kind, f"nn.{cell}"), ()))
                if values:
                    # Neighbors on three lines, so that fewer hide each other.
                    heights = [k + 0.16 * (place % 3 - 1) for place in range(len(values))]
                    axes.scatter(values, heights, s=9, alpha=0.6, color=COLORS[k], linewidths=0)
                    median = statistics.median(values)
                    axes.plot([median, median], [k - 0.32, k + 0.32], color=COLORS[k])
                    text = f"median {speedup_text(median)}×"
                    axes.text(median, k - 0.36, text, va="bottom", fontsize=8)
        figure.axes[0].set_ylim(len(cells) - 0.5, -0.65)
        figure.axes[0].set_yticks(range(len(cells)), cells)


def shape_text(shape: Shape, dtype: torch.dtype, with_dtype: bool) -> str:
    """Two lines, such as "T=100 B=16" and "I=32 H=128"."""
    sizes = [f"{letter}={size}" for letter, size in zip("TBIH"[-len(shape) :], shape, strict=True)]
    lines = [" ".join(sizes[:-2]), " ".join(sizes[-2:])]
    if with_dtype:
        lines[0] = f"{str(dtype).removeprefix('torch.')} {lines[0]}"
    return "\n".join(lines)


def samples(path: Path) -> dict[str, dict[str, list[float]]]:
    """Reads a file of --json: seconds of each round, by title and implementation."""
    return {row["title"]: row["seconds"] for row in json.loads(path.read_bytes())["rows"]}


def compare_with(path: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yields times of an earlier run and now."""
    earlier = samples(path)
    common = any(row.title in earlier for row in rows)
    yield f"\ncompared with {path}{'' if common else ': no case in common'}"
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
