"""The command line that all benchmarks of layers share."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from .cases import GATES, QUICK_SHAPES, SHAPES, Case, Shape
from .report import Row, compare_with, environment, samples
from .timing import Settings, busy

Item = TypeVar("Item")
MOST_THREADS = 1024  # more can end the process
FORMS = "B,I,H for one step, T,B,I,H for a sequence"


def shape(text: str) -> Shape:
    """The tables' form TxBxIxH is accepted, too."""
    sizes = re.split("[,x×]", text)
    if len(sizes) not in (3, 4) or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected {FORMS}, got {text}")
    return tuple(map(int, sizes))


def count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def threads(text: str) -> int:
    if count(text) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_THREADS} threads, got {text}")
    return count(text)


def written(text: str) -> Path:
    """Checks that a file can be written, and makes its folder."""
    path = Path(text)
    exists = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not exists:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
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
    option("--shapes", nargs="+", type=shape, metavar="SHAPE", help=f"only these: {FORMS}")
    dtypes = "of " + ", ".join(names) + "; default: the first two"
    option("--dtype", nargs="+", choices=names, metavar="DTYPE", default=names[:2], help=dtypes)
    option("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    option("--threads", type=threads, metavar="N", help="default: torch.get_num_threads()")
    option("--rounds", type=count, metavar="N", help="default: 15")
    option("--quick", action="store_true", help="small shapes and few rounds")
    option("--compile", action="store_true", help="torch.compile too; takes minutes to compile")
    option("--json", type=written, metavar="FILE", help="write every sample")
    option("--compare", type=earlier, metavar="FILE", help="file of --json of an earlier run")
    return made


def begin(options: argparse.Namespace) -> Settings:
    """Also prints versions and CPU, and warns of a load that exceeds the cores."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU found")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print("\n".join(f"{name}: {value}" for name, value in environment().items()))
    if load := busy():
        print(f"Warning: {load}. Run nothing else at the same time.")
    return Settings(
        rounds=options.rounds or (3 if options.quick else 15),
        seconds=0.005 if options.quick else 0.05,
        compile=options.compile,
        load=load,
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


def numbered(cases: Sequence[Item]) -> Iterator[Item]:
    """Yields the cases. Before each, prints its number and the time left to stderr."""
    start = time.monotonic()
    for k, case in enumerate(cases):
        minutes = (time.monotonic() - start) / max(k, 1) * (len(cases) - k) / 60
        left = f", about {minutes:.0f} min left" if k else ""
        print(f"case {k + 1} of {len(cases)}{left}", file=sys.stderr, flush=True)
        yield case


def verdict(settings: Settings) -> bool:
    """Returns True if the times may be summarized. Otherwise prints the reason."""
    if settings.load:
        print(f"\nNo verdict: {settings.load}.")
    return not settings.load


def finish(
    options: argparse.Namespace, settings: Settings, measuring: Iterable[Row], **results: object
) -> None:
    """Measures. Prints the comparison with an earlier run, and writes every sample and further
    results, after Ctrl-C or an error what was measured before it."""
    rows: list[Row] = []
    try:
        for row in measuring:
            rows.append(row)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        write(options, settings, rows, **results)


def write(
    options: argparse.Namespace, settings: Settings, rows: Sequence[Row], **results: object
) -> None:
    if options.compare is not None:
        print("\n".join(compare_with(options.compare, rows)))
    if options.json is not None:
        found = {"environment": environment(), "settings": asdict(settings), **results}
        head = json.dumps(found, indent=1).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
        options.json.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        print(f"\nEvery sample: {options.json}")
