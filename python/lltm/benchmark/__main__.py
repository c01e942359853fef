"""Measures the speedup of lltm over other implementations on this CPU (a GPU
with --device cuda), and draws a picture. A shape is B,I,H for one step and
T,B,I,H for a sequence; training is forward and backward. LSTM and GRU are
compared with torch.nn, the LLTM with torch.nn's LSTM, its PyTorch reference and
the tutorial's C++.

    python -m lltm.benchmark --quick
    python -m lltm.benchmark --cell gru --shapes 200,8,64,256 --dtype float32
    python -m lltm.benchmark --model module:function   your model
    python -m lltm.benchmark --tutorial   the table of PyTorch's tutorial
    python -m lltm.benchmark --processes 1 2 4 --dtype float32   on shared cores

module:function returns a model and its input or a tuple of inputs, and may add
a dict of keyword inputs. The model is timed as it is and after lltm.replace_.
With --processes and --callers, a layer is called concurrently by several
processes, or by several threads of a process.

In each round every implementation has a turn of a few dozen milliseconds, so a
change in the CPU's speed affects all of them. A turn begins after the threads of
the previous turn have gone to sleep, with a call that is not timed. A time is
the median over the rounds, with its quartiles. A speedup is the median of the
speedups in all rounds. Run nothing else at the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from . import concurrent, memory
from .cases import TUTORIAL_SHAPE, Case
from .implementations import CHECKPOINTED, OURS, PUBLISHED, Make, implementations
from .options import begin, cases, count, finish, numbered, parser, verdict, written
from .report import Row, draw, quartiles, tables
from .timing import Settings, layer_timer, measure, parts_timer, reason
from .user_model import compare_model, function


def makes_of(case: Case, settings: Settings) -> dict[str, Make]:
    return implementations(case, settings.compile, settings.prepacked, settings.checkpoint_steps)


def compare(case: Case, settings: Settings) -> Row:
    """Prints the times and, with activation checkpoints, the memory."""
    makes = makes_of(case, settings)
    builds = {name: partial(layer_timer, make, case) for name, make in makes.items()}
    row = measure(str(case), builds, settings, {OURS: case.flops})
    print("\n".join(row.lines()), flush=True)
    if CHECKPOINTED in makes:
        print("\n".join(memory.lines(makes, case)), flush=True)
    return row


def layers(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    """Prints rows. Then prints the tables and draws the picture, but not of a busy system."""
    draws = find_spec("matplotlib") is not None
    if not draws:
        print("no plot: it needs matplotlib (pip install matplotlib)")
    measured = {}
    for case in numbered(cases(options)):
        try:
            measured[case] = compare(case, settings)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise SystemExit(f"{case}: {reason(error)}") from None
        yield measured[case]
    if not verdict(settings):
        return
    print("\nTimes as fast as torch.nn (training, inference); LLTM compared with nn.LSTM:")
    print("\n".join(tables(measured)))
    if draws:
        draw(measured, options.plot)
        print(f"\nPicture: {options.plot}")


def concurrent_calls(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    settings = replace(settings, seconds=10 * settings.seconds, rounds=options.rounds or 3)
    found = {
        case: makes_of(case, settings)
        for case in cases(options)
        if not (options.callers and case.training)  # they would share the gradients
    }
    counts = [(n, 1) for n in options.processes] + [(1, n) for n in options.callers]
    for processes, callers in numbered(counts):
        for row in concurrent.compare(found, processes, callers, settings):
            print("\n".join(concurrent.lines(row)), flush=True)
            yield row
    verdict(settings)


def tutorial(settings: Settings) -> Iterator[Row]:
    """Prints the tutorial's table, with times measured here and the published times."""
    print("Measuring; torch.compile and the tutorial's C++ are compiled first, in about 2 minutes")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        case = Case(TUTORIAL_SHAPE, training=True, device=device)
        makes = implementations(case, compile=True)
        builds = {name: partial(parts_timer, make, case) for name, make in makes.items()}
        row = measure(f"{case}, {device}", builds, settings)
        yield row

        def figures(seconds: Sequence[float]) -> str:
            values = (1e6 * value for value in quartiles(seconds))
            low, median, high = (f"{v:.{0 if v > 999 else 1}f}" for v in values)
            return f"{median:>9}{f'{low}-{high}':>14}"

        published = PUBLISHED[device]
        print(f"\nB=16, I=32, H=128 on {device}: microseconds, median and quartiles\n")
        print(f"  {'':25}{'forward':>9}{'':14}{'backward':>9}{'':14} published")
        for name in [*makes, *(published.keys() - makes.keys())]:
            line = f"  {name:25}"
            if name in row.skipped:
                line += f" not measured: {row.skipped[name]}"
            elif name in makes:
                parts = (row.seconds[f"{name}, {part}"] for part in ("forward", "backward"))
                line += "".join(map(figures, parts))
            else:
                line += " " * 46
            if name in published:
                forward, backward = published[name]
                line += f" {forward:>4} {backward:>4}"
            print(line)
    verdict(settings)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("python -m lltm.benchmark", __doc__)
    option = made.add_argument
    option("--prepacked", action="store_true", help="inference with prepacked weights and int8 too")
    help = "training with activation checkpoints every N steps too, and the memory"
    option("--checkpoint-steps", type=count, default=0, metavar="N", help=help)
    option("--plot", type=written, metavar="FILE", default="lltm-benchmark.png", help="the picture")
    option = made.add_mutually_exclusive_group().add_argument
    option("--tutorial", action="store_true", help="only the tutorial's table")
    option("--model", type=function, metavar="MODULE:FUNCTION", help="only this model, see above")
    help = "concurrent calls by N processes"
    option("--processes", type=count, nargs="+", default=(), metavar="N", help=help)
    help = "inference, called by N threads of a process concurrently"
    option("--callers", type=count, nargs="+", default=(), metavar="N", help=help)
    options = made.parse_args(arguments)
    settings = replace(
        begin(options), prepacked=options.prepacked, checkpoint_steps=options.checkpoint_steps
    )
    if options.tutorial:
        rows = tutorial(settings)
    elif options.model is not None:
        rows = compare_model(options.model, settings)
    elif options.processes or options.callers:
        rows = concurrent_calls(options, settings)
    else:
        rows = layers(options, settings)
    finish(options, settings, rows)


if __name__ == "__main__":
    main()
