"""Draws the chart and prints the tables of docs/speed.md, from files of `benchmarks/layers.py`.

    python benchmarks/chart.py benchmarks/results/*/layers.json
    python benchmarks/chart.py benchmarks/results/RUN/layers.json --out docs/speed.svg

A ratio is a layer's time divided by torch.nn's in the same round; below 1 is faster. torch.nn's
layer is the GRU for the GRU, else the LSTM. The last lines give the smallest and the largest ratio
of lltm in all of the tables of a cell.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from lltm.benchmark.report import samples

# What torch.nn has beside a cell.
YARDSTICKS = {"LLTM": "nn.LSTM", "LSTM": "nn.LSTM", "GRU": "nn.GRU"}
# Name in the run, name in the chart, colour (safe for the colour-blind).
LAYERS = [
    ("lltm", "lltm", "#0072b2"),
    ("nn.LSTM", "torch.nn.LSTM", "#999999"),
    ("nn.GRU", "torch.nn.GRU", "#cccccc"),
    ("plain PyTorch", "LLTM in plain PyTorch", "#e69f00"),
]
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
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "lltm"  # the same figures give the same file
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained"
    )
    for axis, kind in zip(axes, KINDS, strict=True):
        for place, shape in enumerate(reversed(SHAPES)):
            drawn = run[title(kind, SHAPES[0], "float32")]
            for layer, (name, label, colour) in enumerate(x for x in LAYERS if x[0] in drawn):
                value = ratio(run, kind, shape, "float32", name)
                y = place + 0.3 - 0.2 * layer
                axis.barh(y, value, 0.18, color=colour, label=label if place == 0 else None)
                text = f"{value:.2f}" if value < 1 else f"{value:.1f}"
                axis.text(value + 0.08, y, text, va="center", fontsize=7)
        axis.margins(x=0.08)
        axis.set_title(kind, fontsize=10)
        axis.set_xlabel("time relative to torch.nn.LSTM (lower is better)", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(SHAPES)), SHAPES[::-1], fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(LAYERS), frameon=False, fontsize=9
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


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
