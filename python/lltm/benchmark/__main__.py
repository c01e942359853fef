"""`python -m lltm.benchmark`: lltm beside other implementations, measured on this machine.

    python -m lltm.benchmark                everything, and a picture
    python -m lltm.benchmark --shapes 16,32,128 200,8,64,256 --dtype float32
    python -m lltm.benchmark --checkpoint-steps 64   a layer with and without checkpoints
    python -m lltm.benchmark --tutorial     the table of PyTorch's tutorial on C++ extensions

A shape is B,I,H for one step and T,B,I,H for a sequence. Training is forward and backward.

What is compared runs in rounds, in each round one after another for a few dozen milliseconds, so
that a change in the machine's speed touches all alike. Each turn begins when the threads of the one
before have gone to sleep, and with a call that does not count. A time is the median over the
rounds, with its quartiles; a ratio is the median of the ratios within a round. nn.LSTM in ONNX
Runtime and in OpenVINO is compared where they are installed (pip install 'lltm[bench]').

What the CPU can do at most runs in the same rounds: a large matrix product, and reading as many
bytes as the weights have. The bound of a case is the time of its FLOP at the rate of the one, or of
its passes over the weights at the rate of the other, whichever is longer.

With --goals the last word is how the ratios compare with goals: those of a Python file, whose
function goal(case, against) returns the largest ratio wanted or None. Nothing fails when a goal is
missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import modules
from .cases import (
    CHUNKS,
    LONG_SHAPES,
    LOOP_SHAPE,
    QUICK_SHAPES,
    SHAPES,
    TUTORIAL_SHAPE,
    Case,
    Shape,
)
from .contenders import (
    ADDMM,
    CHECKPOINTED,
    COMPILED_SEQUENCES,
    COMPILED_STEPS,
    OURS,
    PEAK,
    PREPACKED,
    PRODUCT_FLOPS,
    PRODUCT_SIZE,
    PUBLISHED,
    READ,
    RUNTIMES,
    SEQUENCES,
    STEPS,
    Make,
    Prepacked,
    addmm,
    checkpointed,
    read_weights,
)
from .memory import checkpoint_memory, measure_memory
from .report import (
    Bound,
    Check,
    Goal,
    Row,
    compare_with,
    draw,
    environment,
    quartiles,
    read_goals,
)
from .timing import Sampler, Settings, layer_timer, measure, parts_timer, product_timer, timed

# ---- rows -------------------------------------------------------------------


def compare(case: Case, settings: Settings, goal: Goal) -> Row:
    """Measures every implementation of a case."""
    makes = dict(STEPS if case.is_step else SEQUENCES)
    if settings.compile:
        torch.compiler.reset()  # at a limit of recompilations it goes back to eager mode
    if settings.compile and case.is_step:
        makes |= COMPILED_STEPS
    elif settings.compile and case.shape == LOOP_SHAPE and case.dtype == torch.float32:
        makes |= COMPILED_SEQUENCES  # the plain loop takes minutes
    if not (case.is_step or case.training) and case.dtype == torch.float32:
        makes |= RUNTIMES
    return measure_case(str(case), case, makes, settings, goal)


def measure_case(
    title: str, case: Case, makes: Mapping[str, Make], settings: Settings, goal: Goal
) -> Row:
    """Measures implementations of a case, and the least time that it can take here."""
    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    if case.is_step and not case.training:
        builds[ADDMM] = lambda: timed(addmm(case))
    builds[PEAK] = partial(product_timer, case.dtype, onednn=True)
    builds[READ] = lambda: timed(read_weights(case))
    first = next(iter(makes))
    amounts = {first: case.flops, PEAK: PRODUCT_FLOPS, READ: float(case.weight_bytes)}
    row = measure(title, builds, settings, amounts)
    least = bounds(row, case)
    if PEAK in least:  # else nothing is known of the GEMMs
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


def bounds(row: Row, case: Case) -> dict[str, Bound]:
    """Returns the least times of a case at the rates that were measured with it."""
    needs = {PEAK: case.flops / PRODUCT_FLOPS, READ: case.weight_passes}
    return {
        name: Bound(name, need * statistics.median(row.seconds[name]), need / row.ratio(name))
        for name, need in needs.items()
        if name in row.seconds
    }


def machine(dtypes: Sequence[torch.dtype], settings: Settings) -> Iterator[Row]:
    """Measures what this machine can do: matrix products and copies."""
    counts = sorted({1, torch.get_num_threads()}, reverse=True)
    for dtype in dtypes:
        builds: dict[str, Callable[[], Sampler]] = {}
        for count in counts:
            for name, onednn in (("torch.mm", False), (PEAK, True)):
                builds[f"{name}, {_threads(count)}"] = partial(product_timer, dtype, onednn, count)
        title = f"matrix product, {PRODUCT_SIZE} x {PRODUCT_SIZE} x {PRODUCT_SIZE}, {dtype}"
        yield measure(title, builds, settings, dict.fromkeys(builds, PRODUCT_FLOPS))
    size = 1 << 28  # bytes, more than a cache holds
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copies: dict[str, Callable[[], Sampler]] = {
        _threads(count): partial(timed, partial(target.copy_, source), count) for count in counts
    }
    title = f"copy of {size >> 20} MiB (read and written)"
    yield measure(title, copies, settings, dict.fromkeys(copies, 2.0 * size), "B")


def scaling(shape: Shape, settings: Settings) -> Iterator[Row]:
    """Measures one thread beside all."""
    for training in (False, True):
        case = Case(shape, training=training)
        builds: dict[str, Callable[[], Sampler]] = {}
        for name in (OURS, "nn.LSTM"):
            for count in sorted({1, torch.get_num_threads()}, reverse=True):
                builds[f"{name}, {_threads(count)}"] = partial(
                    layer_timer, SEQUENCES[name], case, count
                )
        yield measure(f"threads: {case}", builds, settings)


def lengths(steps: Sequence[int], sizes: Shape, settings: Settings) -> Iterator[Row]:
    """Measures the time of a step in sequences of different lengths."""
    for training in (False, True):
        cases = {f"T={n}": Case((n, *sizes), training=training) for n in steps}
        builds: dict[str, Callable[[], Sampler]] = {
            name: partial(layer_timer, SEQUENCES[OURS], case, units=case.shape[0])
            for name, case in cases.items()
        }
        *_, longest = cases.values()
        yield measure(f"time of a step by length; the longest: {longest}", builds, settings)


def streaming(shapes: Sequence[Shape], settings: Settings, goal: Goal) -> Iterator[Row]:
    """Measures chunks of a stream, with weights packed once and packed in every call."""
    makes: dict[str, Make] = {PREPACKED: Prepacked, OURS: modules.LLTM, "nn.LSTM": nn.LSTM}
    for shape in shapes:
        case = Case(shape, prepacked=True)
        yield measure_case(f"chunk of a stream: {case}", case, makes | RUNTIMES, settings, goal)


def checkpointing(case: Case, checkpoint_steps: int, settings: Settings) -> Row:
    """Measures training with checkpoints beside training without."""
    makes = {CHECKPOINTED: checkpointed(checkpoint_steps), OURS: modules.LLTM}
    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    return measure(f"checkpoint_steps={checkpoint_steps}: {case}", builds, settings)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


# ---- the whole run ----------------------------------------------------------


def tutorial(settings: Settings) -> list[Row]:
    """Prints the tutorial's table, measured here, beside its published figures."""
    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        case = Case(TUTORIAL_SHAPE, training=True, device=device)

        makes = STEPS | COMPILED_STEPS
        builds = {name: partial(parts_timer, make, case) for name, make in makes.items()}
        row = measure(f"{case}, {device}", builds, settings)
        rows.append(row)

        def figures(seconds: Sequence[float]) -> str:
            low, median, high = (1e6 * value for value in quartiles(seconds))
            return f"{median:9.1f}{f'({low:.1f} .. {high:.1f})':>20}"

        published = PUBLISHED[device]
        print(f"\nB=16, I=32, H=128 on {device}: microseconds, median (quartiles)\n")
        print(f"  {'':26}{'forward':>29}{'backward':>29}     published")
        for name in [*makes, *(published.keys() - makes.keys())]:
            line = f"  {name:26}"
            if name in row.skipped:
                line += f" not measured: {row.skipped[name]}"
            elif name in makes:
                line += "".join(
                    figures(row.seconds[f"{name}, {part}"]) for part in ("forward", "backward")
                )
            else:
                line += " " * 58
            if name in published:
                forward, backward = published[name]
                line += f"{forward:>8} {backward:>5}"
            print(line)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lltm.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def shape(text: str) -> Shape:
        sizes = tuple(map(int, text.split(",")))
        if len(sizes) not in (3, 4) or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{text} is neither B,I,H nor T,B,I,H")
        return sizes

    names = ("float32", "bfloat16", "float16", "float64")
    option = parser.add_argument
    option("--shapes", nargs="+", type=shape, metavar="SHAPE", help="only these, and nothing else")
    option("--dtype", nargs="+", choices=names, default=["float32", "bfloat16"])
    option("--threads", type=int, help="default: those of torch")
    option("--rounds", type=int, help="default: 15")
    option("--quick", action="store_true", help="small shapes and few rounds, to try it out")
    option("--compile", action="store_true", help="torch.compile too; takes minutes to compile")
    option(
        "--checkpoint-steps",
        type=int,
        metavar="N",
        help="time and memory of training with checkpoints, and nothing else",
    )
    option("--tutorial", action="store_true", help="the tutorial's table, and nothing else")
    option("--goals", type=Path, metavar="FILE", help="what the ratios are compared with")
    option("--json", type=Path, metavar="FILE", help="write every sample")
    option("--compare", type=Path, metavar="FILE", help="a file of --json, of an earlier run")
    option(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path("lltm-benchmark.png"),
        help="default: %(default)s",
    )
    options = parser.parse_args()
    if options.checkpoint_steps is not None:
        if options.checkpoint_steps < 1:
            parser.error("--checkpoint-steps must be 1 at least")
        if any(len(shape) == 3 for shape in options.shapes or ()):
            parser.error("--checkpoint-steps needs shapes of sequences, T,B,I,H")
    return options


@dataclass
class Results:
    """What was measured so far; shown as it comes."""

    rows: list[Row] = field(default_factory=list)
    cases: list[Row] = field(default_factory=list)  # those of the rows that a picture shows
    notes: list[str] = field(default_factory=list)  # about memory
    checks: list[tuple[str, Check]] = field(default_factory=list)

    def show(self, row: Row) -> None:
        self.rows.append(row)
        self.checks.extend((row.title, check) for check in row.checks)
        print("\n".join(row.lines()), flush=True)

    def note(self, title: str, text: str, check: Check | None) -> None:
        self.notes.append(f"{title}: {text}")
        lines = [f"\n{title}", f"  {text}"]
        if check is not None:
            self.checks.append((title, check))
            lines.append(f"  {check}")
        print("\n".join(lines), flush=True)

    def show_goals(self) -> None:
        if self.checks:
            met = sum(check.met for _, check in self.checks)
            print(f"\nGoals: {met} of {len(self.checks)} met")
            for title, check in self.checks:
                print(f"  {check}; {title}")

    def as_json(self, settings: Settings) -> dict[str, Any]:
        return {
            "environment": environment(),
            "settings": asdict(settings),
            "rows": [asdict(row) for row in self.rows],
            "memory": self.notes,
            "goals": [
                {"title": title, "met": check.met, **asdict(check)} for title, check in self.checks
            ],
        }


def run(options: argparse.Namespace, settings: Settings) -> Results:
    """Measures what the options ask for."""
    results = Results()
    if options.tutorial:
        results.rows.extend(tutorial(settings))
        return results
    goal = read_goals(options.goals)
    dtypes = [getattr(torch, name) for name in options.dtype]
    if options.checkpoint_steps is not None:
        for shape in options.shapes or LONG_SHAPES:
            for dtype in dtypes:
                case = Case(shape, dtype, training=True)
                results.show(checkpointing(case, options.checkpoint_steps, settings))
                results.note(*checkpoint_memory(case, options.checkpoint_steps), None)
        return results
    for shape in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
        for dtype in dtypes:
            for training in (False, True):
                results.cases.append(compare(Case(shape, dtype, training), settings, goal))
                results.show(results.cases[-1])
    if options.shapes is not None:
        return results
    steps = (10, 100) if options.quick else (100, 10, 1000, 10000)
    sizes = (16, 32, 65) if options.quick else (64, 128, 256)
    chunks = CHUNKS[:1] if options.quick else CHUNKS
    for row in (*lengths(steps, (16, 32, 64), settings), *streaming(chunks, settings, goal)):
        results.show(row)
    # After the others: to set a number of threads changes what MKL does, for good.
    for row in (*machine(dtypes, settings), *scaling((100, *sizes), settings)):
        results.show(row)
    for note in measure_memory((512, *sizes), dtypes, goal):
        results.note(*note)
    return results


def main() -> None:
    options = _arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = Settings(
        rounds=options.rounds or (3 if options.quick else 15),
        seconds=0.005 if options.quick else 0.05,
        compile=options.compile,
    )
    print("\n".join(f"{name}: {value}" for name, value in environment().items()))
    results = run(options, settings)
    results.show_goals()
    if options.compare is not None:
        print("\n".join(compare_with(options.compare, results.rows)))
    if options.json is not None:
        options.json.write_text(json.dumps(results.as_json(settings), indent=1) + "\n")
        print(f"\nEvery sample: {options.json}")
    if results.cases:
        try:
            draw(results.cases, options.plot)
            print(f"Picture: {options.plot}")
        except ModuleNotFoundError as error:
            print(f"No picture: {error}")


if __name__ == "__main__":
    main()
