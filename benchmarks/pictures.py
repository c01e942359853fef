"""How pictures for the pages are drawn: legible on white, on black and on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A grey, and of a cell a colour, whose contrast to both white and a dark page is 3.4 or more; the
# three are safe for the colour-blind.
INK = "#7a7a7a"
COLOURS = {"gru": "#0072b2", "lstm": "#d55e00", "lltm": "#009e73"}
WIDTH = 4.4  # inches: a phone shows it at 0.85 of its size


@contextmanager
def page(path: Path, height: float) -> Iterator[Figure]:
    """Gives a figure to draw into, and writes it, without a background, to .svg or .png."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inked, INK)
    style |= {
        "svg.hashsalt": "lltm",  # the same figures give the same file
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
        if path.suffix == ".png":  # with a palette it has a third of the bytes
            from PIL import Image

            Image.open(path).quantize(64).save(path, optimize=True)


def relative_time(axes: Axes, ticks: Sequence[float]) -> None:
    """Makes a logarithmic axis of times in units of torch.nn's, which is a line at 1."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
