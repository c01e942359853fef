"""Plots and table, computed only from the stored results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import REPLACED, Description, Results

# Colors for color-blind readers (Okabe and Ito), and a gray that is legible on light and dark
# pages, because the plots have no background.
INK = "#7a7a7a"
COLORS = {"LLTM": "#0072b2", "LSTM": "#d55e00", "GRU": "#009e73"}


def write(results: Results, folder: Path) -> None:
    for name in results.seconds_per_update:
        plot(results, name, folder / name)
    (folder / "summary.md").write_text(table(results))


def plot(results: Results, name: str, path: Path) -> None:
    """Plots the test metric against updates and against seconds, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colours: Any = dict.fromkeys((*inked, "grid.color"), INK)
    matplotlib.rcParams.update(colours)
    matplotlib.rcParams["legend.framealpha"] = 0
    from matplotlib import pyplot
    from PIL import Image

    task = results.tasks[name]
    late = []  # values after the first tenth of the updates
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for model in results.models(name):
        layer, _, variant = model.partition(",")
        color = COLORS[layer.partition(".")[2]]
        runs = results.reported(name, model)
        longest = max((run.evaluations for run in runs), key=len)
        updates = [evaluation.update for evaluation in longest]
        values = [results.test_values(name, model, update) for update in updates]
        seconds = [update * results.seconds_per_update[name][model] for update in updates]
        late += [v for at, v in zip(updates, values, strict=True) if at >= updates[-1] / 10]
        line = "--" if variant else "-." if layer in REPLACED else "-"
        style = {"color": color, "linestyle": line}
        for axes, x in zip(panels, (updates, seconds), strict=True):
            axes.plot(x, list(map(statistics.median, values)), label=model, **style)
            axes.fill_between(
                x, list(map(min, values)), list(map(max, values)),
                color=color, alpha=0.15, linewidth=0,
            )  # fmt: skip
    equal = results.equal_seconds(name)
    panels[0].set(xlabel="updates", ylabel=f"{task.metric} (test)")
    panels[1].set(xlabel="seconds of training")
    # A slower model's curve continues beyond the edge.
    panels[1].set_xlim(0, 2.5 * equal)
    panels[1].axvline(equal, color=INK, linewidth=0.8, linestyle=":")
    for axes in panels:
        if task.log_scale:
            axes.set_yscale("log")
        for value in task.levels.values():
            axes.axhline(value, color=INK, linewidth=0.8)
        axes.set_xlim(left=0)
        if not task.log_scale:  # else the first updates would take most of the height
            low, high = min(map(min, late)), max(map(max, late))
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        axes.grid(alpha=0.3)
    for level, value in task.levels.items():
        panels[1].annotate(
            level, (1, value), xycoords=("axes fraction", "data"), ha="right", va="top",
            color=INK, fontsize=8, xytext=(-3, -1), textcoords="offset points",
            annotation_clip=True,
        )  # fmt: skip
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path.with_suffix(".png"), dpi=90, transparent=True)
    pyplot.close(figure)
    # A palette reduces the file to a fourth.
    Image.open(path.with_suffix(".png")).quantize(64).save(path.with_suffix(".png"), optimize=True)


def table(results: Results) -> str:
    """The best medians are bold."""
    columns = ["", "hidden size", "parameters", "learning rate", "ms per update"]
    columns += ["after all updates", "after equal seconds"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in results.seconds_per_update:
        task = results.tasks[name]
        equal = results.equal_seconds(name)
        levels = ", ".join(f"{level}: {number(value)}" for level, value in task.levels.items())
        lines.append(
            f"| **{task.title}**, {task.metric} ({levels}) "
            f"| | | | | {task.updates} updates | {equal:.0f} s |"
        )
        models = results.models(name)
        seconds = results.seconds_per_update[name]
        at_end = figures(task, [results.test_values(name, model) for model in models])
        at_equal = figures(
            task, [results.test_values(name, model, equal / seconds[model]) for model in models]
        )
        for model, after_updates, after_seconds in zip(models, at_end, at_equal, strict=True):
            run = results.reported(name, model)[0]
            lines.append(
                f"| {model} | {run.hidden_size} | {run.parameters:,} | {run.spec.learning_rate:g} "
                f"| {seconds[model] * 1e3:.1f} | {after_updates} | {after_seconds} |"
            )
    return "\n".join(lines) + "\n"


def figures(task: Description, columns: Sequence[Sequence[float]]) -> list[str]:
    """Median and range over the seeds, for each model."""
    best = (max if task.higher_is_better else min)(columns, key=statistics.median)
    texts = []
    for values in columns:
        median, low, high = (number(f(values)) for f in (statistics.median, min, max))
        mark = "**" if values is best else ""
        texts.append(f"{mark}{median}{mark} ({low} to {high})")
    return texts


def number(value: float) -> str:
    """Three digits, including trailing zeros."""
    return f"{value:#.3g}".rstrip(".")
