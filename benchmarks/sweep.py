"""Measures layers at random shapes, with torch.nn's and ONNX Runtime's.

    python benchmarks/sweep.py --json build/results/sweep.json
    python benchmarks/sweep.py --device cuda --cell lstm gru --quick --rounds 3 --seconds 80

Each size is sampled on a logarithmic scale: T from 1 to 500, B from 1 to 256, I and H from 1 to
1024, odd sizes included. On a GPU, I and H are multiples of 8. Each shape is measured for every
cell and dtype, in training and inference, with the method of `python -m lltm.benchmark`. On a CPU,
the first dtype is then measured with one thread, on a GPU the rows are those of bench_cuda.py.
Shapes with more than LARGEST multiply-adds are sampled again, because a few of them would take as
long as all others.

Prints a line of time ratios, lltm to the other implementation, per shape (TxBxIxH) and cell, and
the distributions of the speedups over torch.nn's layer, the LLTM's also over its PyTorch reference,
and of prepacked layers over ONNX Runtime's, which packs its weights in advance too.
`python -m lltm.explain` shows the schedule of a shape.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import product

import bench_cuda
import torch
from torch import nn

from lltm import modules
from lltm.benchmark.__main__ import begin, finish, parser
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.contenders import OURS, PLAIN, Make, contenders
from lltm.benchmark.report import Row, speedup_text
from lltm.benchmark.timing import Settings, layer_timer, measure

PREPACKED = "lltm, prepacked"
ONNX_RUNTIME = "ONNX Runtime"
LIMITS = (500, 256, 1024, 1024)  # T, B, I, H
LARGEST = 10**10


def drawn(count: int, seed: int, multiple: int = 1) -> Iterator[Shape]:
    """Yields shapes whose I and H are multiples of a number."""
    generator = random.Random(seed)
    while count > 0:
        t, b, *sizes = (round(math.exp(generator.uniform(0, math.log(most)))) for most in LIMITS)
        shape = (t, b, *(-(-size // multiple) * multiple for size in sizes))
        if Case(shape, cell="lstm").flops <= 2 * LARGEST:
            count -= 1
            yield shape


def prepacked(case: Case) -> Make:
    def make(input_size: int, hidden_size: int, *, dtype: torch.dtype) -> nn.Module:
        layer: nn.Module = getattr(modules, case.module)(input_size, hidden_size, dtype=dtype)
        packed: nn.Module = layer.prepack()  # type: ignore[operator]
        return packed

    return make


def compare(case: Case, settings: Settings) -> Row:
    if case.device == "cuda":
        return bench_cuda.compare(case, settings, bench_cuda.ENGINES, graphs=False)
    every = contenders(case)
    makes = {name: every[name] for name in (OURS, f"nn.{case.yardstick}", PLAIN) if name in every}
    runs = not case.is_step and not case.training and case.dtype == torch.float32
    if runs and find_spec("onnxruntime") is not None:
        from onnx_runtime import OnnxRuntime

        theirs = partial(OnnxRuntime, getattr(nn, case.yardstick))
        makes |= {PREPACKED: prepacked(case), f"{ONNX_RUNTIME} {case.yardstick}": theirs}
    builds = {name: partial(layer_timer, make, case) for name, make in makes.items()}
    return measure(str(case), builds, settings)


def ours(other: str) -> str:
    """The implementation that is compared with another: ONNX Runtime packs its weights too."""
    return PREPACKED if other.startswith(ONNX_RUNTIME) else OURS


def others(row: Row) -> list[str]:
    return [name for name in row.seconds if name not in (OURS, PREPACKED)]


def distribution(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    tenth = statistics.quantiles(values, n=10, method="inclusive")[0]
    shown = map(speedup_text, (min(values), tenth, low, middle, high))
    return f"{' | '.join(shown)} | {sum(value < 1 / 1.05 for value in values)}/{len(values)}"


def table(found: Mapping[tuple[str, str, str, str], Sequence[float]]) -> Iterator[str]:
    """Yields the distributions as Markdown.

    Args:
        found: speedups by cell, dtype, kind and baseline
    """
    yield "| | worst | 10 % | 25 % | median | 75 % | below 0.95 |"
    yield "|---|---|---|---|---|---|---|"
    for (cell, dtype, kind, baseline), values in found.items():
        if len(values) > 1:
            over = f" over {baseline}" if baseline != f"nn.{cell}" else ""
            yield f"| {cell}, {dtype}, {kind}{over} | {distribution(values)} |"


def by_baseline(
    measured: Mapping[Case, Row], threads: str
) -> dict[tuple[str, str, str, str], list[float]]:
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for case, row in measured.items():
        for name in others(row):
            kind = "training" if case.training else "inference"
            kind = f"{'prepacked ' * (ours(name) == PREPACKED)}{kind}{threads}"
            baseline = ONNX_RUNTIME if name.startswith(ONNX_RUNTIME) else name
            key = (case.cell.upper(), str(case.dtype).removeprefix("torch."), kind, baseline)
            groups.setdefault(key, []).append(row.speedup(name, ours(name)))
    return groups


def main() -> None:
    made = parser("python benchmarks/sweep.py", __doc__)
    made.add_argument("--count", type=int, default=60, help="shapes; default: 60")
    made.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="seed of the shapes"
    )
    made.add_argument("--seconds", type=float, default=math.inf, help=bench_cuda.SECONDS)
    options = made.parse_args()
    options.rounds = options.rounds or 7
    settings = begin(options, draws=False)
    settings.seconds /= 2
    print(f"--seed {options.seed}")
    end = time.monotonic() + options.seconds
    multiple = 8 if options.device == "cuda" else 1
    shapes = options.shapes or [*drawn(options.count, options.seed, multiple)]

    def sweep(dtypes: Sequence[str], prefix: str = "") -> dict[Case, Row]:
        found = {}
        for shape, cell in bench_cuda.until(end, [*product(shapes, options.cell)]):
            print(f"{prefix}{cell.upper()} {'x'.join(map(str, shape))}", end="", flush=True)
            for name, training in product(dtypes, (False, True)):
                case = Case(shape, getattr(torch, name), training, options.device, cell)
                row = found[case] = compare(case, settings)
                ratios = (
                    f"{row.ratio(n, ours(n)):.2f} {n}{' prepacked' * (ours(n) == PREPACKED)}"
                    for n in others(row)
                )
                row.title = f"{prefix}{case}"
                kind = "training" if training else "inference"
                print(f"; {name} {kind}: {', '.join(ratios)}", end="", flush=True)
            print()
        return found

    measured, alone, threads = sweep(options.dtype), {}, torch.get_num_threads()
    # Last, because setting the number of threads changes MKL permanently.
    if threads > 1 and options.device == "cpu":
        torch.set_num_threads(1)
        alone = sweep(options.dtype[:1], "1 thread: ")
        torch.set_num_threads(threads)
    groups = by_baseline(measured, "") | by_baseline(alone, ", 1 thread")
    print("\n".join(["", *table(groups)]))
    results = {"settings": asdict(settings), "seed": options.seed}
    finish(options, results, [*measured.values(), *alone.values()], ())


if __name__ == "__main__":
    main()
