"""Draws the chart and prints the tables of docs/speed.md, from files of `benchmarks/layers.py`.

    python benchmarks/chart.py benchmarks/results/*/layers.json
    python benchmarks/chart.py benchmarks/results/RUN/layers.json --out docs/speed.png

A ratio is a layer's time divided by torch.nn's in the same round; below 1 is faster. torch.nn's
layer is the GRU for the GRU, else the LSTM. The last lines give the smallest and the largest ratio
of lltm in all of the tables of a cell. The chart shows the ratios in float32: a bar reaches from 1,
which is torch.nn's time, to the ratio, on a logarithmic axis.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import pictures

from lltm.benchmark.report import samples

# What torch.nn has beside a cell.
YARDSTICKS = {"LLTM": "nn.LSTM", "LSTM": "nn.LSTM", "GRU": "nn.GRU"}
# Of the chart and the README; a table shows every shape of its run.
SHAPES = ["T=100 B=16 I=32 H=128", "T=100 B=64 I=128 H=256", "T=100 B=1 I=128 H=256"]
SHAPES += ["T=50 B=128 I=512 H=512"]
KINDS = ("training", "inference")
DTYPES = ("float32", "bfloat16")

# The seconds of each implementation, by round; by title.
Run = dict[str, dict[str, list[float]]]


def shapes(run: Run, cell: str = "LLTM") -> list[str]:
    """The shapes of which a run has what a row of the table shows, in the order of the run."""
    pattern = rf"^{cell} sequence, training, ([^,]+), float32$"
    found = re.findall(pattern, "\n".join(run), re.MULTILINE)
    cells = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
    return [s for s in found if all(title(kind, s, dtype, cell) in run for kind, dtype in cells)]


def title(kind: str, shape: str, dtype: str, cell: str = "LLTM") -> str:
    return f"{cell} sequence, {kind}, {shape}, {dtype}"


def ratio(
    run: Run, kind: str, shape: str, dtype: str, layer: str = "lltm", cell: str = "LLTM"
) -> float:
    """The median of the rounds' ratios to torch.nn's layer."""
    seconds = run[title(kind, shape, dtype, cell)]
    pairs = zip(seconds[layer], seconds[YARDSTICKS[cell]], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def table(run: Run, cell: str = "LLTM") -> str:
    """Times and ratios of float32; of bfloat16 ratios alone."""
    lines = [
        (
            "| T×B×I×H | training, ms | ratio | inference, ms | ratio"
            " | training, bf16 | inference, bf16 |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for shape in shapes(run, cell):
        cells = ["×".join(re.findall(r"\d+", shape))]
        for kind in KINDS:
            seconds = statistics.median(run[title(kind, shape, "float32", cell)]["lltm"])
            cells += [
                f"{1e3 * seconds:.3g}",
                f"{ratio(run, kind, shape, 'float32', cell=cell):.2f}",
            ]
        cells += [f"{ratio(run, kind, shape, 'bfloat16', cell=cell):.2f}" for kind in KINDS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(runs: Iterable[Run], dtype: str, cell: str = "LLTM") -> str:
    """The smallest and the largest ratio in the tables of these runs."""
    values = [
        ratio(run, kind, s, dtype, cell=cell)
        for run in runs
        for s in shapes(run, cell)
        for kind in KINDS
    ]
    return f"{min(values):.2f} to {max(values):.2f}"


def draw(run: Run, path: Path) -> None:
    cells = [cell for cell in ("GRU", "LSTM", "LLTM") if shapes(run, cell)]
    thickness = 0.8 / len(cells)
    least = min(ratio(run, k, s, "float32", cell=c) for k in KINDS for s in SHAPES for c in cells)
    with pictures.page(path, height=1.5 + 0.17 * len(cells) * len(SHAPES)) as figure:
        both = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, kind in zip(both, KINDS, strict=True):
            pictures.relative_time(axes, [0.1, 0.2, 0.5, 1])
            for k, cell in enumerate(cells):
                values = [ratio(run, kind, shape, "float32", cell=cell) for shape in SHAPES]
                places = [n + thickness * (k - (len(cells) - 1) / 2) for n in range(len(SHAPES))]
                axes.barh(
                    places,
                    [value - 1 for value in values],
                    0.85 * thickness,
                    left=1,
                    color=pictures.COLOURS[cell.lower()],
                    label=f"{cell} (nn.LSTM)" if cell == "LLTM" else cell,
                )
                for place, value in zip(places, values, strict=True):
                    axes.annotate(
                        f"{value:.2f}",
                        (min(value, 1), place),
                        xytext=(-2, 0),
                        textcoords="offset points",
                        ha="right",
                        va="center_baseline",
                        fontsize=8,
                    )
            axes.set_title(kind, fontsize=10)
            axes.tick_params(axis="y", length=0)
        both[0].set_xlim(0.5 * least, 1.15)
        both[0].set_ylim(len(SHAPES) - 0.5, -0.5)
        names = ["×".join(re.findall(r"\d+", shape)) for shape in SHAPES]
        both[0].set_yticks(range(len(SHAPES)), names)
        figure.supxlabel(
            "time in units of torch.nn's, log scale: further left is faster", fontsize=9
        )
        figure.legend(
            *both[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="layers.json")
    parser.add_argument("--out", type=Path, help="draw the first run, as .svg or .png")
    arguments = parser.parse_args()
    runs = [samples(path) for path in arguments.runs]
    cells = [cell for cell in YARDSTICKS if any(shapes(run, cell) for run in runs)]
    for path, run in zip(arguments.runs, runs, strict=True):
        for cell in cells:
            print(f"{path}, {cell}\n\n{table(run, cell)}\n")
    for cell in cells:
        for dtype in DTYPES:
            print(f"{cell}, {dtype}: {ratios(runs, dtype, cell)}")
    if arguments.out:
        draw(runs[0], arguments.out)


if __name__ == "__main__":
    main()
