"""Measures the speedup of lltm over other implementations on this CPU (a GPU
with --device cuda), and draws a picture. A shape is B,I,H for one step and
T,B,I,H for a sequence; training is forward and backward. LSTM and GRU are
compared with torch.nn, the LLTM with torch.nn's LSTM, its PyTorch reference and
the tutorial's C++.

    python -m lltm.benchmark --quick
    python -m lltm.benchmark --cell gru --shapes 200,8,64,256 --dtype float32
    python -m lltm.benchmark --model module:function   your model
    python -m lltm.benchmark --tutorial   the table of PyTorch's tutorial

module:function returns a model and its input, or a tuple of inputs. The model is
timed as it is and after lltm.replace_.

In each round every implementation has a turn of a few dozen milliseconds, so a
change in the CPU's speed affects all of them. A turn begins after the threads of
the previous turn have gone to sleep, with a call that is not timed. A time is
the median over the rounds, with its quartiles. A speedup is the median of the
speedups in all rounds. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .cases import GATES, QUICK_SHAPES, SHAPES, TUTORIAL_SHAPE, Case, Shape
from .contenders import COMPILED_STEPS, OURS, PUBLISHED, STEPS, contenders
from .report import Row, compare_with, draw, environment, quartiles, samples, tables
from .timing import Settings, layer_timer, measure, parts_timer
from .user_model import compare_model, function


def compare(case: Case, settings: Settings) -> Row:
    makes = contenders(case, settings.compile)
    builds = {name: partial(layer_timer, make, case) for name, make in makes.items()}
    return measure(str(case), builds, settings, {OURS: case.flops})


def tutorial(settings: Settings) -> list[Row]:
    """Prints the tutorial's table, with times measured here and the published times."""
    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        case = Case(TUTORIAL_SHAPE, training=True, device=device)
        makes = STEPS | COMPILED_STEPS
        builds = {name: partial(parts_timer, make, case) for name, make in makes.items()}
        row = measure(f"{case}, {device}", builds, settings)
        rows.append(row)

        def figures(seconds: Sequence[float]) -> str:
            low, median, high = (1e6 * value for value in quartiles(seconds))
            return f"{median:8.1f}{f'{low:.1f}-{high:.1f}':>13}"

        published = PUBLISHED[device]
        print(f"\nB=16, I=32, H=128 on {device}: microseconds, median and quartiles\n")
        print(f"  {'':25}{'forward':>8}{'':13}{'backward':>8}{'':13}  published")
        for name in [*makes, *(published.keys() - makes.keys())]:
            line = f"  {name:25}"
            if name in row.skipped:
                line += f" not measured: {row.skipped[name]}"
            elif name in makes:
                parts = (row.seconds[f"{name}, {part}"] for part in ("forward", "backward"))
                line += "".join(map(figures, parts))
            else:
                line += " " * 42
            if name in published:
                forward, backward = published[name]
                line += f"{forward:>5}{backward:>5}"
            print(line)
    return rows


def shape(text: str) -> Shape:
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) not in (3, 4) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected B,I,H or T,B,I,H, got {text}")
    return sizes


def written(text: str) -> Path:
    """Checks that a file can be written, and makes its folder."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def earlier(text: str) -> Path:
    try:
        samples(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f"{text} is not a file written by --json") from None
    return Path(text)


def parser(
    prog: str, description: str | None, known: Iterable[str] = GATES
) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks of layers share.

    Args:
        known: names of the cells
    """
    made = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = made.add_argument
    known = [*known]
    cells = f"of {', '.join(known)}; default: all"
    names = ("float32", "bfloat16", "float16", "float64")
    option("--cell", nargs="+", choices=known, default=known, metavar="CELL", help=cells)
    option("--shapes", nargs="+", type=shape, metavar="SHAPE", help="only these shapes")
    dtypes = "of " + ", ".join(names) + "; default: the first two"
    option("--dtype", nargs="+", choices=names, metavar="DTYPE", default=names[:2], help=dtypes)
    option("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    option("--threads", type=int, metavar="N", help="default: torch.get_num_threads()")
    option("--rounds", type=int, metavar="N", help="default: 15")
    option("--quick", action="store_true", help="small shapes and few rounds")
    option("--compile", action="store_true", help="torch.compile too; takes minutes to compile")
    option("--json", type=written, metavar="FILE", help="write every sample")
    option("--compare", type=earlier, metavar="FILE", help="file of --json of an earlier run")
    option("--plot", type=written, metavar="FILE", default="lltm-benchmark.png", help="the picture")
    return made


def begin(options: argparse.Namespace, draws: bool = True) -> Settings:
    """Also prints versions and CPU, and reports a missing Matplotlib."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU found")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print("\n".join(f"{name}: {value}" for name, value in environment().items()))
    if draws and find_spec("matplotlib") is None:
        print("no plot: it needs matplotlib (pip install matplotlib)")
    return Settings(
        rounds=options.rounds or (3 if options.quick else 15),
        seconds=0.005 if options.quick else 0.05,
        compile=options.compile,
    )


def cases(options: argparse.Namespace, **form: Any) -> list[Case]:
    """Returns all combinations of the options, with further arguments of the cases."""
    return [
        Case(shape, getattr(torch, dtype), training, options.device, cell, **form)
        for cell in options.cell
        for shape in options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
        for dtype in options.dtype
        for training in (False, True)
    ]


def finish(
    options: argparse.Namespace,
    results: Mapping[str, object],
    rows: Sequence[Row],
    pictured: Sequence[Row],
) -> None:
    if options.compare is not None:
        print("\n".join(compare_with(options.compare, rows)))
    if options.json is not None:
        head = json.dumps({"environment": environment(), **results}, indent=1).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
        options.json.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        print(f"\nEvery sample: {options.json}")
    if pictured and find_spec("matplotlib") is not None:
        draw(pictured, options.plot)
        print(f"Picture: {options.plot}")


def main() -> None:
    made = parser("python -m lltm.benchmark", __doc__)
    made.add_argument("--tutorial", action="store_true", help="only the tutorial's table")
    made.add_argument(
        "--model", type=function, metavar="MODULE:FUNCTION", help="only this model, see above"
    )
    options = made.parse_args()
    no_cases = options.tutorial or options.model is not None
    settings = begin(options, draws=not no_cases)
    rows = tutorial(settings) if options.tutorial else []
    if options.model is not None:
        rows += compare_model(options.model, settings)
    measured = {}
    for case in () if no_cases else cases(options):
        measured[case] = compare(case, settings)
        print("\n".join(measured[case].lines()), flush=True)
    if measured:
        print("\nTimes as fast as torch.nn (training, inference); LLTM compared with nn.LSTM:")
        print("\n".join(tables(measured)))
    pictured = list(measured.values())
    finish(options, {"settings": asdict(settings)}, rows or pictured, pictured)


if __name__ == "__main__":
    main()
