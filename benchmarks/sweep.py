"""Measures layers at random shapes, with torch.nn's and ONNX Runtime's.

    python benchmarks/sweep.py --json build/results/sweep.json --csv build/results/sweep.csv
    python benchmarks/sweep.py --stored build/results/sweep.csv --plot sweep.png
    python benchmarks/sweep.py --device cuda --cell lstm gru --quick --rounds 3 --seconds 80

Each size is sampled on a logarithmic scale, odd sizes included. Usual shapes have T from 10 to 500,
B from 1 to 256, I and H from 16 to 1024. Half as many small shapes, with T, I or H below these
limits, have a table of their own. On a GPU, all shapes are usual, and I and H are multiples of 8.
Each shape is measured for every cell and dtype, in training and inference, with the method of
`python -m lltm.benchmark`. On a GPU, the rows are those of bench_cuda.py. Shapes with more than
LARGEST multiply-adds are sampled again, because a few of them would take as long as all others.

Prints a line of time ratios, lltm to the other implementation, per shape (TxBxIxH) and cell. Then
prints the tables of docs/benchmarks.md, and the rows of the README's table: distributions of the
speedups over torch.nn's layer, the LLTM's also over its PyTorch reference, and of prepacked layers
over ONNX Runtime's, which packs its weights in advance too. `python -m lltm.explain` shows the
schedule of a shape.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any

import bench_cuda
import torch
from torch import Tensor, nn

from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.implementations import OURS, PLAIN, PREPACKED, Make, implementations
from lltm.benchmark.options import begin, count, finish, parser, verdict, written
from lltm.benchmark.report import Row, draw_dots, speedup_text
from lltm.benchmark.timing import Settings, layer_timer, measure

ONNX_RUNTIME = "ONNX Runtime"
USUAL = {"T": (10, 500), "B": (1, 256), "I": (16, 1024), "H": (16, 1024)}
LARGEST = 5 * 10**9  # multiply-adds of an LSTM's inference
LONG = 10**9  # a case with more is measured in fewer rounds
FEW_ROUNDS = 3

# A line of a .csv file: threads, T, B, I, H, then a time ratio for each comparison, whose names are
# cell, dtype, kind and baseline, such as "LSTM float32 training nn.LSTM".
Line = Mapping[str, str]
Comparison = tuple[str, str, str, str]


def is_usual(line: Line) -> bool:
    return all(int(line[letter]) >= least for letter, (least, _) in USUAL.items())


def drawn(count: int, seed: int, usual: bool = True, multiple: int = 1) -> Iterator[Shape]:
    """Yields usual or small shapes, whose I and H are multiples of a number."""
    generator = random.Random(seed)
    while count > 0:
        t, b, *sizes = (
            round(math.exp(generator.uniform(math.log(least if usual else 1), math.log(most))))
            for least, most in USUAL.values()
        )
        shape = (t, b, *(-(-size // multiple) * multiple for size in sizes))
        line = dict(zip(USUAL, map(str, shape), strict=True))
        if is_usual(line) == usual and Case(shape, cell="lstm").flops <= 2 * LARGEST:
            count -= 1
            yield shape


class OnnxRuntime(nn.Module):
    """A torch.nn layer that ONNX Runtime computes, with as many threads as PyTorch.

    The arguments are those of the first call. Passing them in every call would take longer than a
    step.
    """

    def __init__(self, make: Make, *sizes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer: Any = make(*sizes, dtype=dtype)
        self.call: Callable[[], object] | None = None

    def forward(self, input: Tensor, state: Any) -> tuple[Tensor]:
        if self.call is None:
            self.output = input.new_empty(*input.shape[:2], self.layer.hidden_size)
            self.call = self.bound(input, state)
        self.call()
        return (self.output,)

    def bound(self, input: Tensor, state: Any) -> Callable[[], object]:
        import onnxruntime

        model: Any = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but needs no other package
            torch.onnx.export(self.layer, (input, state), model, dynamo=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            model.getvalue(), options, providers=["CPUExecutionProvider"]
        )
        binding = session.io_binding()
        arguments = [input, state] if isinstance(state, Tensor) else [input, *state]
        for node, tensor in zip(session.get_inputs(), arguments, strict=True):
            array = tensor.numpy()
            binding.bind_input(node.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        output, *states = session.get_outputs()
        array = self.output.numpy()
        binding.bind_output(output.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for node in states:
            binding.bind_output(node.name, "cpu")
        return partial(session.run_with_iobinding, binding)


def compare(case: Case, settings: Settings) -> Row:
    if case.device == "cuda":
        return bench_cuda.compare(case, settings, bench_cuda.ENGINES, graphs=False)
    every = implementations(case, prepack=True)
    makes = {name: every[name] for name in (OURS, f"nn.{case.baseline}", PLAIN) if name in every}
    runs = not case.is_step and not case.training and case.dtype == torch.float32
    if runs and find_spec("onnxruntime") is not None:
        theirs = partial(OnnxRuntime, getattr(nn, case.baseline))
        makes |= {PREPACKED: every[PREPACKED], f"{ONNX_RUNTIME} {case.baseline}": theirs}
    builds = {name: partial(layer_timer, make, case) for name, make in makes.items()}
    return measure(str(case), builds, settings)


def ours(other: str) -> str:
    """The implementation that is compared with another: ONNX Runtime packs its weights too."""
    return PREPACKED if other.startswith(ONNX_RUNTIME) else OURS


def others(row: Row) -> list[str]:
    return [name for name in row.seconds if name not in (OURS, PREPACKED)]


def speedups(lines: Iterable[Line], **only: str) -> dict[Comparison, list[float]]:
    """Returns the speedups of all lines by comparison.

    Args:
        only: fields that a line must have, such as threads="2"
    """
    found: dict[Comparison, list[float]] = {}
    for line in lines:
        if all(line[name] == value for name, value in only.items()):
            for name, ratio in [*line.items()][1 + len(USUAL) :]:
                if ratio:
                    cell, dtype, kind, baseline = name.split(maxsplit=3)
                    found.setdefault((cell, dtype, kind, baseline), []).append(1 / float(ratio))
    return found


def distribution(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    tenth = statistics.quantiles(values, n=10, method="inclusive")[0]
    shown = map(speedup_text, (min(values), tenth, low, middle, high))
    return f"{' | '.join(shown)} | {sum(value < 1 / 1.05 for value in values)}/{len(values)}"


def table(found: Mapping[Comparison, Sequence[float]]) -> Iterator[str]:
    """Yields the distributions as Markdown, the GRU first."""
    yield "| | worst | 10 % | 25 % | median | 75 % | below 0.95 |"
    yield "|---|---|---|---|---|---|---|"

    def place(comparison: Comparison) -> tuple[bool, bool, str, bool]:
        cell, dtype, kind, baseline = comparison
        return baseline == ONNX_RUNTIME, dtype != "float32", cell, kind == "inference"

    for cell, dtype, kind, baseline in sorted(found, key=place):
        if len(values := found[cell, dtype, kind, baseline]) > 1:
            over = f" over {baseline}" if baseline != f"nn.{cell}" else ""
            yield f"| {cell}, {dtype}, {kind}{over} | {distribution(values)} |"


def summary(found: Mapping[Comparison, Sequence[float]]) -> Iterator[str]:
    """Yields rows of the README's table: median and worst, by dtype."""
    fields: dict[str, list[str]] = {}
    for cell, kind in product(("GRU", "LSTM"), ("training", "inference")):
        for dtype in dict.fromkeys(name for _, name, *_ in found):
            if values := found.get((cell, dtype, kind, f"nn.{cell}")):
                text = f"{speedup_text(statistics.median(values))} ({speedup_text(min(values))})"
                fields.setdefault(dtype, []).append(text)
    for dtype, texts in fields.items():
        yield f"{dtype} | {' | '.join(texts)} |"


def show(lines: Sequence[Line], plot: Path | None) -> None:
    for usual, title in ((True, "Usual shapes"), (False, "Small shapes")):
        for threads in dict.fromkeys(line["threads"] for line in lines):
            chosen = [line for line in lines if is_usual(line) == usual]
            found = speedups(chosen, threads=threads)
            if found:
                print(f"\n{title}, threads: {threads}\n")
                print("\n".join([*table(found), "", *summary(found)]))
            if found and usual and plot is not None:
                draw_dots(found, plot)
                print(f"\nPicture: {plot}")


def sweep(
    options: argparse.Namespace, settings: Settings, shapes: Sequence[Shape], lines: list[Line]
) -> Iterator[Row]:
    """Prints and yields the rows. Appends to the lines of the .csv file."""
    end = time.monotonic() + options.seconds
    threads = str(torch.get_num_threads())
    measured: dict[Shape, dict[str, str]] = {}
    for shape, cell in bench_cuda.until(end, [*product(shapes, options.cell)]):
        print(f"{cell.upper()} {'x'.join(map(str, shape))}", end="", flush=True)
        sizes = (1, *shape)[-len(USUAL) :]  # a step counts as a sequence
        line = {"threads": threads, **dict(zip(USUAL, map(str, sizes), strict=True))}
        for name, training in product(options.dtype, (False, True)):
            case = Case(shape, getattr(torch, name), training, options.device, cell)
            few = min(settings.rounds, FEW_ROUNDS if case.flops > 2 * LONG else settings.rounds)
            row = compare(case, replace(settings, rounds=few))
            yield row
            kind = "training" if training else "inference"
            ratios = {n: f"{row.ratio(n, ours(n)):.3g}" for n in others(row)}
            for n, ratio in ratios.items():
                baseline = ONNX_RUNTIME if n.startswith(ONNX_RUNTIME) else n
                line[f"{cell.upper()} {name} {kind} {baseline}"] = ratio
            texts = (f"{ratio} {n}" for n, ratio in ratios.items())
            print(f"; {name} {kind}: {', '.join(texts)}", end="", flush=True)
        print()
        if shape not in measured:
            lines.append(measured.setdefault(shape, {}))
        measured[shape] |= line


def stored(text: str) -> Sequence[Line]:
    try:
        lines = [*csv.DictReader(Path(text).read_text(encoding="utf-8").splitlines())]
        speedups(lines)
        if not all({"threads", *USUAL} <= line.keys() for line in lines):
            raise ValueError("expected columns threads, T, B, I, H")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a file of --csv: {error}") from None
    return lines


def main() -> None:
    made = parser("python benchmarks/sweep.py", __doc__)
    made.set_defaults(cell=["lstm", "gru"])
    option = made.add_argument
    option("--count", type=count, default=50, help="usual shapes; default: 50")
    option("--seed", type=int, default=random.randrange(10**6), help="seed of the shapes")
    option("--seconds", type=float, default=math.inf, help=bench_cuda.SECONDS)
    option("--csv", type=written, metavar="FILE", help="write the time ratios")
    option("--stored", type=stored, metavar="FILE", help="measure nothing; show such a file")
    option("--plot", type=written, metavar="FILE", help="the picture: a dot per usual shape")
    options = made.parse_args()
    if options.plot is not None and find_spec("matplotlib") is None:
        made.error("--plot needs matplotlib (pip install matplotlib)")
    if options.stored is not None:
        show(options.stored, options.plot)
        return
    options.rounds = options.rounds or 7
    settings = begin(options)
    settings.seconds /= 2
    print(f"--seed {options.seed}")
    on_gpu = options.device == "cuda"
    usual = [*drawn(options.count, options.seed, multiple=8 if on_gpu else 1)]
    small = [*drawn(0 if on_gpu else options.count // 2, options.seed, usual=False)]
    pairs = (usual[k : k + 2] + small[k // 2 : k // 2 + 1] for k in range(0, options.count, 2))
    shapes = options.shapes or [*chain.from_iterable(pairs)]  # --seconds leaves out both kinds
    lines: list[Line] = []
    try:
        finish(options, settings, sweep(options, settings, shapes, lines), seed=options.seed)
    finally:
        if options.csv is not None and lines:
            with options.csv.open("w", encoding="utf-8", newline="") as file:
                names = dict.fromkeys(name for line in lines for name in line)
                writer = csv.DictWriter(file, [*names], lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
        if verdict(settings):
            show(lines, options.plot)


if __name__ == "__main__":
    main()
