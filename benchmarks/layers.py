"""Compares layers on a CPU with other implementations, with the bounds of the CPU and the goals of
this project: `make bench`.

   python benchmarks/layers.py --json layers.json
   python benchmarks/layers.py --users     shapes of known applications

The method is that of `python -m lltm.benchmark`. This program adds bounds, other runtimes, streams,
sequences of other lengths, one and all threads, and memory.

The same rounds measure the rates of the CPU: a large GEMM, and reading as many bytes as the weights
have. The bound of a case is the longer of two times: its FLOP at the rate of the GEMM, and its
passes over the weights at the rate of reading. ONNX Runtime, OpenVINO and JAX are included if
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch
from goals import (
    GRU_GOALS,
    PEAK,
    READ,
    Check,
    CheckedRow,
    check_lines,
    checked,
    checks_as_json,
    chunk_goal,
    sequence_goal,
    step_goal,
)
from machine import (
    PRODUCT_FLOPS,
    Build,
    bounds,
    machine,
    on_threads,
    thread_counts,
    yardsticks,
)
from memory import measure_memory
from runtimes import runtimes
from torch import nn

from lltm import modules
from lltm.benchmark.__main__ import begin, cases, finish, parser
from lltm.benchmark.cases import SHAPES, Case, Shape
from lltm.benchmark.contenders import OURS, Make, contenders
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Sampler, Settings, layer_timer, measure

PREPACKED = "lltm, prepacked"
CHUNKS: tuple[Shape, ...] = ((1, 1, 128, 256), (1, 1, 512, 512), (10, 4, 128, 256))


# Shapes of torch.nn's LSTM and GRU in applications, by application or field. A shape of only one
# cell names it.
USERS: dict[str, Case] = {
    "qlib": Case((20, 800, 20, 64), num_layers=2),
    "neuralhydrology": Case((365, 256, 32, 128)),
    "PufferLib": Case((16, 32, 128, 128)),
    "DeepFilterNet": Case((300, 32, 256, 256), cell="gru"),
    "neuralforecast": Case((48, 128, 8, 128), num_layers=2),
    "taggers": Case((40, 32, 400, 256), bidirectional=True, packed=True),
    "pyannote": Case((589, 32, 60, 128), num_layers=2, bidirectional=True),
    "speech": Case((128, 1, 640, 256), bidirectional=True),
    "OCR": Case((60, 1, 256, 256), bidirectional=True),
    "VAD": Case((1, 1, 128, 128)),
}

Goal = Callable[[Case, str], float | None]


def user_cases(cells: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, Case]]:
    """Yields (title, case) for the LSTM and the GRU, if among `cells`."""
    for name, shape in USERS.items():
        for cell in ("lstm", "gru") if shape.cell == "lltm" else (shape.cell,):
            for dtype in dtypes:
                for training in (False, True):
                    case = replace(shape, cell=cell, dtype=dtype, training=training)
                    if cell in cells:
                        yield f"{case}, {name}", case


def prepacked(case: Case) -> Make:
    def make(input_size: int, hidden_size: int, *, dtype: torch.dtype) -> nn.Module:
        layer: nn.Module = getattr(modules, case.module)(input_size, hidden_size, dtype=dtype)
        packed: nn.Module = layer.prepack()  # type: ignore[operator]
        return packed

    return make


def compare(title: str, case: Case, settings: Settings) -> CheckedRow:
    makes = contenders(case, settings.compile) | runtimes(case)
    return measure_case(title, case, makes, settings, step_goal if case.is_step else sequence_goal)


def measure_case(
    title: str, case: Case, makes: Mapping[str, Make], settings: Settings, goal: Goal
) -> CheckedRow:
    """Measures implementations, and the bound of the case's time."""
    builds: dict[str, Build] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    first = next(iter(makes))
    amounts = {first: case.flops, PEAK: PRODUCT_FLOPS}
    row = checked(measure(title, builds | yardsticks(case), settings, amounts))
    least = bounds(row, case)
    if PEAK in least:  # otherwise the rate of GEMMs is unknown
        row.bound = max(least.values(), key=lambda bound: bound.seconds)
    for name in row.seconds:
        limit = goal(case, name)
        if limit is None:
            continue
        if name in least:
            what = f"share of the rate of {name}"
            row.checks.append(Check(what, least[name].share, limit, at_least=True))
        else:
            row.checks.append(Check(f"{first} / {name}", row.ratio(name), limit))
    return row


def scaling(cell: str, shape: Shape, settings: Settings) -> Iterator[Row]:
    for training in (False, True):
        case = Case(shape, training=training, cell=cell)
        makes = contenders(case)
        builds: dict[str, Build] = {
            f"{name}, {threads}": partial(
                on_threads, count, partial(layer_timer, makes[name], case)
            )
            for name in (OURS, f"nn.{case.yardstick}")
            for threads, count in thread_counts().items()
        }
        yield measure(f"threads: {case}", builds, settings)


def time_per_step(case: Case) -> Sampler:
    sampler = layer_timer(contenders(case)[OURS], case)
    return lambda iterations: {
        part: seconds / case.steps for part, seconds in sampler(iterations).items()
    }


def lengths(cell: str, steps: Sequence[int], sizes: Shape, settings: Settings) -> Iterator[Row]:
    """Measures the time per step."""
    for training in (False, True):
        cases = {f"T={n}": Case((n, *sizes), training=training, cell=cell) for n in steps}
        builds = {name: partial(time_per_step, case) for name, case in cases.items()}
        *_, longest = cases.values()
        yield measure(f"time of a step by length; the longest: {longest}", builds, settings)


def streaming(cell: str, shapes: Sequence[Shape], settings: Settings) -> Iterator[Row]:
    """Weights are packed once and in every call."""
    for shape in shapes:
        case = Case(shape, cell=cell)
        makes = contenders(case)
        theirs = f"nn.{case.yardstick}"
        chosen = {PREPACKED: prepacked(case), OURS: makes[OURS], theirs: makes[theirs]}
        title = f"chunk of a stream: {case}"
        yield measure_case(title, case, chosen | runtimes(case), settings, chunk_goal)


def beyond_cases(
    cells: Sequence[str], quick: bool, dtypes: Sequence[torch.dtype], settings: Settings
) -> Iterator[Row]:
    shapes = [shape for shape in GRU_GOALS if shape not in SHAPES]
    for shape, dtype, training in product(shapes, dtypes, (False, True)):
        if "gru" in cells and not quick:
            case = Case(shape, dtype, training, cell="gru")
            yield compare(str(case), case, settings)
    for cell in cells:
        yield from lengths(
            cell, (10, 100) if quick else (100, 10, 1000, 10000), (16, 32, 64), settings
        )
        yield from streaming(cell, CHUNKS[:1] if quick else CHUNKS, settings)
    # Last, because setting the number of threads changes MKL permanently.
    yield from machine(dtypes, settings)
    for cell in cells:
        yield from scaling(cell, (100, *sizes(quick)), settings)


def sizes(quick: bool) -> Shape:
    return (16, 32, 65) if quick else (64, 128, 256)


def main() -> None:
    made = parser("python benchmarks/layers.py", __doc__)
    made.add_argument("--users", action="store_true", help="their shapes, and nothing else")
    options = made.parse_args()
    settings = begin(options)
    dtypes = [getattr(torch, name) for name in options.dtype]
    rows: list[Row] = []
    notes: list[str] = []  # about memory
    checks: list[tuple[str, Check]] = []

    def show(row: Row) -> None:
        rows.append(row)
        if isinstance(row, CheckedRow):
            checks.extend((row.title, check) for check in row.checks)
        print("\n".join(row.lines()), flush=True)

    plain = ((str(case), case) for case in cases(options))
    for title, case in user_cases(options.cell, dtypes) if options.users else plain:
        show(compare(title, case, settings))
    pictured = list(rows)
    if options.shapes is None and not options.users:
        for row in beyond_cases(options.cell, options.quick, dtypes, settings):
            show(row)
        for title, text, check in measure_memory((512, *sizes(options.quick)), dtypes):
            notes.append(f"{title}: {text}")
            checks.append((title, check))
            print(f"\n{title}\n  {text}\n  {check}", flush=True)
    print("\n".join(check_lines(checks)))
    results = {
        "settings": asdict(settings),
        "memory": notes,
        "goals": checks_as_json(checks),
    }
    finish(options, results, rows, pictured, omit=(PEAK, READ))


if __name__ == "__main__":
    main()
