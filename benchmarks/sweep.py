"""Measures layers at random shapes, with torch.nn's and ONNX Runtime's.

    python benchmarks/sweep.py --json build/results/sweep.json
    python benchmarks/sweep.py --device cuda --cell lstm gru --quick --rounds 3 --seconds 80

Each size is sampled on a logarithmic scale: T from 1 to 500, B from 1 to 256, I and H from 1 to
1024, odd sizes included. On a GPU, I and H are multiples of 8. Each shape is measured for every
cell and dtype, in training and inference, with the method of `python -m lltm.benchmark`. On a GPU,
the rows are those of bench_cuda.py. Shapes with more than LARGEST multiply-adds are sampled again,
because a few of them would take as long as all others.

Prints a line of time ratios, lltm to the other implementation, per shape (TxBxIxH) and cell, and
the distributions of the speedups over torch.nn's layer, the LLTM's also over its PyTorch reference,
and of prepacked layers over ONNX Runtime's, which packs its weights in advance too.
`python -m lltm.explain` shows the schedule of a shape.
"""

from __future__ import annotations

import io
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import bench_cuda
import torch
from torch import Tensor, nn

from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.implementations import OURS, PLAIN, PREPACKED, Make, implementations
from lltm.benchmark.options import begin, finish, parser
from lltm.benchmark.report import Row, speedup_text
from lltm.benchmark.timing import Settings, layer_timer, measure

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


def by_baseline(measured: Mapping[Case, Row]) -> dict[tuple[str, str, str, str], list[float]]:
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for case, row in measured.items():
        for name in others(row):
            kind = "training" if case.training else "inference"
            kind = f"{'prepacked ' * (ours(name) == PREPACKED)}{kind}"
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
    settings = begin(options)
    settings.seconds /= 2
    print(f"--seed {options.seed}")
    end = time.monotonic() + options.seconds
    multiple = 8 if options.device == "cuda" else 1
    shapes = options.shapes or [*drawn(options.count, options.seed, multiple)]
    measured = {}
    for shape, cell in bench_cuda.until(end, [*product(shapes, options.cell)]):
        print(f"{cell.upper()} {'x'.join(map(str, shape))}", end="", flush=True)
        for name, training in product(options.dtype, (False, True)):
            case = Case(shape, getattr(torch, name), training, options.device, cell)
            row = measured[case] = compare(case, settings)
            ratios = (
                f"{row.ratio(n, ours(n)):.2f} {n}{' prepacked' * (ours(n) == PREPACKED)}"
                for n in others(row)
            )
            kind = "training" if training else "inference"
            print(f"; {name} {kind}: {', '.join(ratios)}", end="", flush=True)
        print()
    print("\n".join(["", *table(by_baseline(measured))]))
    finish(options, settings, [*measured.values()], seed=options.seed)


if __name__ == "__main__":
    main()
