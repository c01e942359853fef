"""Style of the pictures in the documentation: legible on light and dark pages and on phones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Gray and the colors of the cells have a contrast of at least 3.4 on white and on dark pages. The
# three colors are safe for color-blind readers.
INK = "#7a7a7a"
COLOURS = {"gru": "#0072b2", "lstm": "#d55e00", "lltm": "#009e73"}
WIDTH = 4.4  # inches; a phone scales it by 0.85


@contextmanager
def page(path: Path, height: float) -> Iterator[Figure]:
    """Yields a figure, and saves it without a background as .svg or .png."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inked, INK)
    style |= {
        "svg.hashsalt": "lltm",  # makes the file reproducible
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": INK,
        "grid.alpha": 0.4,
        "grid.linewidth": 0.5,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=200, metadata=metadata)
        if path.suffix == ".png":  # a palette reduces the file to a third
            from PIL import Image

            Image.open(path).quantize(64).save(path, optimize=True)


def speedup_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """The axis is logarithmic, with a line at 1, the speed of torch.nn."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
