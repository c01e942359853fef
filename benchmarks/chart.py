"""Draws the README's chart and prints its table, from a run of `make bench`.

    python benchmarks/chart.py benchmarks/results/RUN/layers.json docs/speed.svg

Each bar is a layer's time in units of torch.nn.LSTM's, in the same run: shorter is faster.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

SHAPES = ["T=100 B=16 I=32 H=128", "T=100 B=64 I=128 H=256", "T=100 B=1 I=128 H=256"]
SHAPES += ["T=50 B=128 I=512 H=512"]
# Name in the run, name in the chart, colour (safe for the colour-blind).
LAYERS = [
    ("lltm", "lltm", "#0072b2"),
    ("nn.LSTM", "torch.nn.LSTM", "#999999"),
    ("nn.GRU", "torch.nn.GRU", "#cccccc"),
    ("plain PyTorch", "LLTM in plain PyTorch", "#e69f00"),
]
LARGEST = 4  # longer bars are cut off, and say how long they are


def seconds(rows: dict[str, Any], title: str, name: str) -> float:
    return statistics.median(rows[title]["seconds"][name])


def ratio(rows: dict[str, Any], title: str, name: str) -> float:
    """The median of the rounds' ratios to nn.LSTM."""
    pair = zip(rows[title]["seconds"][name], rows[title]["seconds"]["nn.LSTM"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pair)


def draw(rows: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("training", "inference"), strict=True):
        for place, shape in enumerate(reversed(SHAPES)):
            for layer, (name, label, colour) in enumerate(LAYERS):
                value = ratio(rows, f"sequence, {kind}, {shape}, float32", name)
                y = place + 0.3 - 0.2 * layer
                axis.barh(
                    *(y, min(value, LARGEST), 0.18),
                    color=colour,
                    label=label if place == 0 else None,
                )
                text = f"{value:.2f}" if value < 1 else f"{value:.1f}"
                axis.text(min(value, LARGEST) + 0.05, y, text, va="center", fontsize=7)
        axis.set_title(kind, fontsize=10)
        axis.set_xlim(0, LARGEST + 0.4)
        axis.set_xlabel("time in units of torch.nn.LSTM's", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(SHAPES)), reversed(SHAPES), fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(LAYERS), frameon=False, fontsize=9
    )
    plt.rcParams["svg.hashsalt"] = "lltm"  # the same figures give the same file
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def table(rows: dict[str, Any]) -> str:
    lines = [
        (
            "| T, B, I, H | training | of nn.LSTM | inference | of nn.LSTM |"
            " training, bfloat16 | inference, bfloat16 |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        cells = [", ".join(re.findall(r"\d+", shape))]
        for kind in ("training", "inference"):
            title = f"sequence, {kind}, {shape}, float32"
            cells += [f"{1e3 * seconds(rows, title, 'lltm'):.3g} ms"]
            cells += [f"{ratio(rows, title, 'lltm'):.2f}"]
        for kind in ("training", "inference"):
            cells += [f"{ratio(rows, f'sequence, {kind}, {shape}, bfloat16', 'lltm'):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    source, picture = map(Path, sys.argv[1:])
    rows = {row["title"]: row for row in json.loads(source.read_text())["rows"]}
    draw(rows, picture)
    print(table(rows))


if __name__ == "__main__":
    main()
