"""Draws the README's chart from a file of `python -m lltm.benchmark`.

    python benchmarks/chart.py benchmarks/results/RUN/layers.json --out docs/speed.png

Each bar is the speedup of lltm's layer over torch.nn's layer in float32: the median over the rounds
of torch.nn's time divided by lltm's time.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from lltm.benchmark.report import samples, speedup_text

# Gray and the cells' colors are legible on white and on dark pages, and for color-blind readers.
INK = "#7a7a7a"
COLORS = {"GRU": "#0072b2", "LSTM": "#d55e00"}
KINDS = ("training", "inference")
SHAPES = ["T=100 B=16 I=32 H=128", "T=100 B=64 I=128 H=256", "T=100 B=1 I=128 H=256"]
SHAPES += ["T=50 B=128 I=512 H=512"]

# By title and implementation: the seconds of each round.
Run = dict[str, dict[str, list[float]]]


def speedups(run: Run, cell: str, kind: str) -> list[float]:
    found = []
    for shape in SHAPES:
        seconds = run[f"{cell} sequence, {kind}, {shape}, float32"]
        pairs = zip(seconds["lltm"], seconds[f"nn.{cell}"], strict=True)
        found.append(statistics.median(theirs / ours for ours, theirs in pairs))
    return found


def draw(run: Run, path: Path) -> None:
    """Draws without a background, as .svg or .png."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inked, INK)
    style |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    thickness = 0.8 / len(COLORS)
    most = max(max(speedups(run, cell, kind)) for cell in COLORS for kind in KINDS)
    with matplotlib.rc_context(style | {"legend.frameon": False}):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")  # a phone scales it by 0.85
        both = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, kind in zip(both, KINDS, strict=True):
            for k, (cell, color) in enumerate(COLORS.items()):
                values = speedups(run, cell, kind)
                places = [n + thickness * (k - 0.5) for n in range(len(SHAPES))]
                bars = axes.barh(places, values, 0.85 * thickness, color=color, label=cell)
                texts = [f"{speedup_text(value)}×" for value in values]
                axes.bar_label(bars, texts, padding=3, fontsize=8)
            axes.axvline(1, color=INK, linewidth=1)
            axes.set_title(kind, fontsize=10)
            axes.tick_params(axis="y", length=0)
        both[0].set_xlim(0, 1.25 * most)
        both[0].set_xticks([1, 5, 10], ["1\ntorch.nn", "5", "10"])
        both[0].set_ylim(len(SHAPES) - 0.5, -0.5)
        halves = (shape.split(" ") for shape in SHAPES)
        names = [f"{' '.join(half[:2])}\n{' '.join(half[2:])}" for half in halves]
        both[0].set_yticks(range(len(SHAPES)), names, fontsize=8)
        figure.supxlabel("times as fast as torch.nn (longer is better)", fontsize=9)
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        figure.savefig(path, transparent=True, dpi=200)
    if path.suffix == ".png":  # a palette reduces the file to a third
        from PIL import Image

        Image.open(path).quantize(64).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="layers.json")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg")
    options = parser.parse_args()
    draw(samples(options.run), options.out)


if __name__ == "__main__":
    main()
