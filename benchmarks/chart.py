"""Draws the README's chart from a file of `python -m lltm.benchmark` or `layers.py`.

    python benchmarks/chart.py benchmarks/results/RUN/layers.json --out docs/speed.png

A ratio is a layer's time divided by torch.nn's in the same round; below 1 is faster. torch.nn's
layer is the GRU for the GRU, else the LSTM. The chart shows the ratios in float32: a bar reaches
from 1, which is torch.nn's time, to the ratio, on a logarithmic axis.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

import pictures

from lltm.benchmark.report import samples

# What torch.nn has beside a cell.
YARDSTICKS = {"GRU": "nn.GRU", "LSTM": "nn.LSTM", "LLTM": "nn.LSTM"}
SHAPES = ["T=100 B=16 I=32 H=128", "T=100 B=64 I=128 H=256", "T=100 B=1 I=128 H=256"]
SHAPES += ["T=50 B=128 I=512 H=512"]

# The seconds of each implementation, by round; by title.
Run = dict[str, dict[str, list[float]]]


def title(cell: str, kind: str, shape: str) -> str:
    return f"{cell} sequence, {kind}, {shape}, float32"


def ratios(run: Run, cell: str, kind: str) -> list[float]:
    """To torch.nn's layer: of each shape the median of the rounds."""
    found = []
    for shape in SHAPES:
        seconds = run[title(cell, kind, shape)]
        pairs = zip(seconds["lltm"], seconds[YARDSTICKS[cell]], strict=True)
        found.append(statistics.median(ours / theirs for ours, theirs in pairs))
    return found


def draw(run: Run, path: Path) -> None:
    kinds = ("training", "inference")
    cells = [cell for cell in YARDSTICKS if title(cell, kinds[0], SHAPES[0]) in run]
    thickness = 0.8 / len(cells)
    least = min(min(ratios(run, cell, kind)) for cell in cells for kind in kinds)
    with pictures.page(path, height=1.5 + 0.17 * len(cells) * len(SHAPES)) as figure:
        both = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, kind in zip(both, kinds, strict=True):
            pictures.relative_time(axes, [0.1, 0.2, 0.5, 1])
            for k, cell in enumerate(cells):
                values = ratios(run, cell, kind)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="layers.json")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg")
    options = parser.parse_args()
    draw(samples(options.run), options.out)


if __name__ == "__main__":
    main()
