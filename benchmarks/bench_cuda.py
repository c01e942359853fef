"""lltm on a GPU beside other implementations, with the goals of this project: `make bench-cuda`.

    python benchmarks/bench_cuda.py --json cuda.json

In the manner of `python -m lltm.benchmark`: contenders in interleaved rounds, medians with
quartiles, ratios within a round. Times are taken by CUDA events around a number of runs, which are
queued without waiting: they are the GPU's time or the host's, whichever is longer. Input, state and
output gradient rotate through several copies, together twice as large as the second-level cache
where that takes no more than MAX_COPIES. Weights do not rotate, as in use, nor does the replay of
a graph, whose arguments are fixed, nor what is measured waiting after each run. What the card can
do, a copy and a product, is measured in the same run. Float32 is float32: TF32 is off.

What fails is left out, with the reason, and the rest goes on, in a new process where an error of
CUDA stays; results are written after each row. What compiles something first, for minutes, comes
last: the tutorial's extension, torch.compile. With --seconds nothing begins after that time. The
exit status says whether a part of the run is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checks import Check, CheckedRow, check_lines, checked, checks_as_json
from results_file import write_json
from torch import Tensor, nn

from lltm import backends, modules, reference
from lltm.benchmark.cases import TUTORIAL_SHAPE, Case
from lltm.benchmark.contenders import (
    OURS,
    PLAIN,
    STEPS,
    TUTORIAL,
    Layer,
    Make,
    tutorial_modules,
)
from lltm.benchmark.report import Row, environment, quartiles
from lltm.benchmark.timing import Sampler, Settings, measure, parts_timer, reason

TUTORIAL_CUDA = "tutorial's CUDA"
GRAPH = "lltm, graph replay"
PERSISTENT = "lltm, persistent"
PERSISTENT_GRAPH = "lltm, persistent, graph replay"
CUDNN = "nn.LSTM (cuDNN)"
MAX_COPIES = 8192

PARTS = ("layers", "tutorial", "compiled")

# The sequence of the goals; others beside it.
GOAL_SHAPE = (1024, 16, 768, 768)
SEQUENCES: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    (GOAL_SHAPE, torch.bfloat16),
    (GOAL_SHAPE, torch.float16),
    (GOAL_SHAPE, torch.float32),
    ((100, 16, 32, 128), torch.float32),
    ((100, 128, 512, 512), torch.bfloat16),
)
# The goal against cuDNN stands on the dtype in which cuDNN is fastest: PyTorch lets it take its
# persistent algorithm, which keeps the weights on the chip, for float16 only. In bfloat16 cuDNN
# reads them anew in every step, as our stepwise engine does.
CUDNN_GOAL_DTYPE = torch.float16
TUTORIAL_SEQUENCE = (100, 16, 32, 128)
COMPILED_SHAPE = (8, 16, 32, 128)  # a loop is unrolled, and compiles for minutes

# ---- contenders -------------------------------------------------------------


def build_tutorial() -> Any:
    """Compiles benchmarks/tutorial/lltm_cuda.cu, as the tutorial does."""
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    from torch.utils import cpp_extension

    # Headers of CUDA's libraries, where the toolkit has none.
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    headers = [str(path) for folder in folders for path in Path(folder).glob("cu*/include")]
    build_dir = Path(__file__).resolve().parents[1] / "build" / f"tutorial-{torch.__version__}"
    build_dir.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name="tutorial_lltm_cuda",
        sources=[str(Path(__file__).parent / "tutorial" / "lltm_cuda.cu")],
        extra_include_paths=headers,
        extra_cuda_cflags=["-O3"],
        build_directory=str(build_dir),
    )


def compiled(make: Make, mode: str) -> Make:
    def build(*sizes: int, **dtype: torch.dtype) -> nn.Module:
        module: Any = torch.compile(make(*sizes, **dtype), dynamic=False, mode=mode)
        assert isinstance(module, nn.Module)
        return module

    return build


# ---- measuring --------------------------------------------------------------


def rotated_copies(case: Case) -> int:
    """Returns how many sets of arguments make twice the second-level cache."""
    *leading, input_size, hidden = case.shape
    outputs = 0 if case.is_step else math.prod(leading) * hidden  # elements of the gradient
    elements = math.prod(leading) * input_size + 2 * leading[-1] * hidden + outputs
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(MAX_COPIES, 1 + 2 * cache // (elements * case.dtype.itemsize))


class RotatingLayer(Layer):
    """A layer whose arguments are another of `copies` sets in each run."""

    def __init__(self, make: Make, case: Case, copies: int) -> None:
        super().__init__(make, case)
        self.sets = [self._copy() for _ in range(copies)]
        self.turn = 0

    def _copy(self) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:
        input = self.input.detach().clone().requires_grad_(self.input.requires_grad)
        h, c = (tensor.clone() for tensor in self.state)
        return input, (h, c), None if self.gradient is None else self.gradient.clone()

    def run(self) -> None:
        self.input, self.state, self.gradient = self.sets[self.turn]
        self.turn = (self.turn + 1) % len(self.sets)
        super().run()


def timed(run: Callable[[], object], training: bool = False) -> Sampler:
    """Times runs by events; returns when they are done."""

    def sample(iterations: int) -> dict[str, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.set_grad_enabled(training):
            start.record()
            for _ in range(iterations):
                run()
            end.record()
        end.synchronize()
        return {"": start.elapsed_time(end) * 1e-3 / iterations}

    return sample


def layer_timer(make: Make, case: Case) -> Sampler:
    return timed(RotatingLayer(make, case, rotated_copies(case)).run, case.training)


def graph_timer(make: Make, case: Case) -> Sampler:
    """Times the replay of a captured run, which has one set of arguments."""
    layer = RotatingLayer(make, case, copies=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.set_grad_enabled(case.training):
        for _ in range(3):
            layer.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.set_grad_enabled(case.training):
        layer.run()

    def replay(keep: Layer = layer) -> None:  # the graph writes to the layer's gradients
        graph.replay()

    return timed(replay)


def persistent(build: Callable[[], Sampler]) -> Sampler:
    """Makes and takes samples with the persistent engine."""
    with backends.cuda.flags(persistent=True):
        sampler = build()

    def sample(iterations: int) -> dict[str, float]:
        with backends.cuda.flags(persistent=True):
            return sampler(iterations)

    return sample


def machine(settings: Settings) -> Row:
    """Measures what the card can do: a copy, and matrix products."""
    size = 1 << 30
    # Of random bytes: zeros are stored compressed.
    source = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    n = 8192

    def product(dtype: torch.dtype) -> Sampler:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        return timed(partial(torch.mm, a, b, out=torch.empty_like(a)))

    builds: dict[str, Callable[[], Sampler]] = {"copy": lambda: timed(lambda: target.copy_(source))}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        builds[f"product, {str(dtype).removeprefix('torch.')}"] = partial(product, dtype)
    amounts = {name: 2.0 * (size if name == "copy" else n**3) for name in builds}
    return measure(
        "the card: copy of 1 GiB (B/s), products of 8192 (FLOP/s)",
        builds,
        settings,
        amounts,
        unit="",
    )


def kernels(program: Path) -> tuple[list[dict[str, Any]], list[Check], list[str]]:
    """Runs the benchmark of the element-wise kernels; returns its rows, checks and a table."""
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"exit status {run.returncode}: {run.stderr.strip()}")
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    checks, lines = (
        [],
        ["\nelement-wise kernels: bytes per second, beside a copy in the same rounds"],
    )
    copy: dict[str, Any] = {}
    for row in rows:
        if row["title"].startswith("copy"):
            copy = row
        shares = [
            (row["bytes"] / ours) / (copy["bytes"] / theirs)
            for ours, theirs in zip(row["seconds"], copy["seconds"], strict=True)
        ]
        low, share, high = quartiles(shares)
        rate = row["bytes"] / quartiles(row["seconds"])[1]
        lines.append(
            f"  {row['title']:58}{rate / 1e9:9.0f} GB/s{share:8.3f} ({low:.3f} .. {high:.3f})"
        )
        if row is not copy and row["title"].endswith("x 1024"):
            checks.append(Check(f"{row['title']}: share of a copy", share, 0.9, at_least=True))
    return rows, checks, lines


# ---- rows -------------------------------------------------------------------


def compare(
    case: Case,
    makes: Mapping[str, Make],
    settings: Settings,
    limits: Mapping[str, float],
) -> CheckedRow:
    """Measures a case; `limits` are the largest ratios to the contenders named.

    Sequences of 16 bits run by both engines, the stepwise one being the default.
    """
    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    builds[GRAPH] = partial(graph_timer, makes[OURS], case)
    if not case.is_step and case.dtype.itemsize == 2:
        builds[PERSISTENT] = partial(persistent, partial(layer_timer, makes[OURS], case))
        builds[PERSISTENT_GRAPH] = partial(persistent, builds[GRAPH])
    row = checked(measure(str(case), builds, settings, {OURS: case.flops}))
    for name, limit in limits.items():
        if name in row.seconds:
            row.checks.append(Check(f"{OURS} / {name}", row.ratio(name), limit))
    return row


def seconds_ratio(seconds: Mapping[str, list[float]], name: str, other: str) -> float:
    """The time of one contender in units of another's."""
    pairs = zip(seconds[name], seconds[other], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def beside_cudnn(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The ratios to cuDNN for the goal's shape, dtype beside dtype."""
    measured = {row["title"]: row["seconds"] for row in rows}
    yield f"\n{OURS} / {CUDNN}, at {GOAL_SHAPE}; with PyTorch's defaults cuDNN is persistent in"
    yield "float16 alone (batches of up to 128 that 8 divides), so that is where the goal stands"
    dtypes = [dtype for shape, dtype in SEQUENCES if shape == GOAL_SHAPE]
    yield f"  {'':21}" + "".join(f"{str(dtype).removeprefix('torch.'):>12}" for dtype in dtypes)
    for training in (False, True):
        for name, engine in ((OURS, "stepwise"), (PERSISTENT, "persistent")):
            line = f"  {'training' if training else 'forward':9} {engine:11}"
            for dtype in dtypes:
                case = Case(GOAL_SHAPE, dtype, training, device="cuda")
                seconds = measured.get(str(case), {})
                known = {name, CUDNN} <= seconds.keys()
                ratio = f"{seconds_ratio(seconds, name, CUDNN):.3f}" if known else "-"
                line += f"{ratio:>12}"
            yield line


def parts(makes: Mapping[str, Make], settings: Settings) -> CheckedRow:
    """Measures forward and backward of one step apart, waiting after each, as the tutorial does."""
    case = Case(TUTORIAL_SHAPE, training=True, device="cuda")
    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(parts_timer, make, case) for name, make in makes.items()
    }
    row = checked(measure(f"forward and backward apart, {case}", builds, settings))
    for part in ("forward", "backward"):
        ours, theirs = f"{OURS}, {part}", f"{TUTORIAL_CUDA}, {part}"
        if theirs in row.seconds:
            value = statistics.median(
                a / b for a, b in zip(row.seconds[ours], row.seconds[theirs], strict=True)
            )
            row.checks.append(Check(f"{ours} / {theirs}", value, 0.6))
    return row


def gpu_works() -> bool:
    """Whether CUDA goes on in this process: after some errors nothing does."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Results:
    """What is known so far, written after each row, so that an end before time leaves it.

    Nothing begins after `end`, of time.monotonic.
    """

    def __init__(self, path: Path | None, end: float, settings: Settings) -> None:
        self.path = path
        self.settings = settings
        self.end = end
        self.environment = environment() | {
            "card": torch.cuda.get_device_name(),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "TF32 in cuDNN": str(torch.backends.cudnn.allow_tf32),
            "TF32 in cuBLAS": str(torch.backends.cuda.matmul.allow_tf32),
        }
        self.rows: list[dict[str, Any]] = []
        self.kernel_rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}  # of parts of the run: why
        self.checks: list[tuple[str, Check]] = []
        self.goals: list[dict[str, Any]] = []  # of the processes before this one
        self.begun: list[str] = []  # parts

    def take_over(self) -> None:
        """What the process before this one has written."""
        assert self.path is not None
        known = json.loads(self.path.read_text())
        self.rows, self.kernel_rows = known["rows"], known["kernels"]
        self.failures, self.goals, self.begun = known["failures"], known["goals"], known["begun"]

    def go_on_in_a_new_process(self) -> None:
        words = [word for word in sys.argv if not word.startswith("--resume=")]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *words, f"--resume={self.end}"])

    def save(self) -> None:
        if self.path is None:
            return
        results = {
            "environment": self.environment,
            "settings": asdict(self.settings),
            "rows": self.rows,
            "kernels": self.kernel_rows,
            "failures": self.failures,
            "goals": [*self.goals, *checks_as_json(self.checks)],
            "begun": self.begun,
        }
        write_json(self.path, results)

    def show(self, row: Row, copies: int = 1) -> None:
        self.rows.append(asdict(row) | {"copies": copies})
        if isinstance(row, CheckedRow):
            self.checks.extend((row.title, check) for check in row.checks)
        print("\n".join(row.lines()), flush=True)
        self.save()

    def part(self, what: str, measure_it: Callable[[], None]) -> None:
        """A part of the run that may fail, of whatever it is, while the rest goes on."""
        if what in self.begun:
            return
        self.begun.append(what)
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("not begun, because the time was up")
            measure_it()
        except Exception as error:
            self.failures[what] = str(error)
            print(f"\n{what}: failed: {reason(error)}", flush=True)
            self.save()
            if self.path is not None and not gpu_works():
                self.go_on_in_a_new_process()


def measure_kernels(program: Path, results: Results) -> None:
    torch.cuda.empty_cache()
    results.kernel_rows, checks, lines = kernels(program)
    results.checks.extend(("element-wise kernels", check) for check in checks)
    print("\n".join((*lines, *(f"  {check}" for check in checks))), flush=True)
    results.save()


def measure_layers(steps: Mapping[str, Make], loops: Mapping[str, Make], results: Results) -> None:
    """A step and sequences beside other implementations that are there."""

    def measure_sequence(case: Case) -> None:
        at_goal = case.shape == GOAL_SHAPE and case.dtype == torch.bfloat16
        limits = {PLAIN: 0.1} if at_goal else {}
        row = compare(case, loops, few_rounds(results.settings), limits)
        if at_goal and not case.training:
            per_step = statistics.median(row.seconds[OURS]) / case.shape[0] * 1e6
            row.checks.append(Check("microseconds a step, forward", per_step, 10.0))
        if case.shape == GOAL_SHAPE and {PERSISTENT, CUDNN} <= row.seconds.keys():
            limit = 1.0 if case.dtype == CUDNN_GOAL_DTYPE else 0.5
            value = seconds_ratio(row.seconds, PERSISTENT, CUDNN)
            row.checks.append(Check(f"{PERSISTENT} / {CUDNN}", value, limit))
        results.show(row, rotated_copies(case))

    for shape, dtype in SEQUENCES:
        for training in (False, True):
            case = Case(shape, dtype, training, device="cuda")
            results.part(str(case), partial(measure_sequence, case))
    print("\n".join(beside_cudnn(results.rows)), flush=True)
    measure_steps("", {**steps, "nn.LSTMCell": nn.LSTMCell}, results)


def measure_steps(what: str, makes: Mapping[str, Make], results: Results) -> None:
    def measure_step(case: Case) -> None:
        row = compare(case, makes, results.settings, {TUTORIAL_CUDA: 0.6})
        results.show(row, rotated_copies(case))

    for training in (False, True):
        case = Case(TUTORIAL_SHAPE, training=training, device="cuda")
        results.part(f"{what}{case}", partial(measure_step, case))


def measure_tutorial(
    steps: Mapping[str, Make], loops: Mapping[str, Make], results: Results
) -> None:
    """Beside the tutorial's extensions, which compile for a minute."""

    def measure_all() -> None:
        step, loop = tutorial_modules(build_tutorial())
        makes = {**steps, TUTORIAL_CUDA: step, "tutorial's C++": STEPS[TUTORIAL]}
        results.part(
            "forward and backward apart", lambda: results.show(parts(makes, results.settings))
        )
        measure_steps(f"{TUTORIAL_CUDA}, ", makes, results)
        case = Case(TUTORIAL_SEQUENCE, device="cuda")
        row = compare(case, {**loops, TUTORIAL_CUDA: loop}, few_rounds(results.settings), {})
        results.show(row, rotated_copies(case))

    results.part(f"beside {TUTORIAL_CUDA}", measure_all)


def measure_compiled(
    steps: Mapping[str, Make], loops: Mapping[str, Make], results: Results
) -> None:
    """Beside torch.compile of plain PyTorch, which takes minutes to compile."""

    def measure_case(case: Case, makes: Mapping[str, Make]) -> None:
        torch.compiler.reset()
        row = compare(case, makes, few_rounds(results.settings), {})
        results.show(row, rotated_copies(case))

    for shape, makes in ((TUTORIAL_SHAPE, steps), (COMPILED_SHAPE, loops)):
        rivals = {name: makes[name] for name in (OURS, PLAIN)}
        for mode in ("default", "reduce-overhead"):
            rivals[f"torch.compile, plain, {mode}"] = compiled(makes[PLAIN], mode)
        for training in (False, True):
            case = Case(shape, training=training, device="cuda")
            results.part(f"compiled, {case}", partial(measure_case, case, rivals))


def few_rounds(settings: Settings) -> Settings:
    """For runs that take long enough to be a sample each."""
    return Settings(rounds=min(5, settings.rounds), seconds=0.02, compile=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    option = parser.add_argument
    option("--json", type=Path, metavar="FILE", help="write every sample")
    option("--kernels", type=Path, metavar="PROGRAM", help="lltm_cuda_bench, as CMake built it")
    option("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the run; default: all")
    option("--seconds", type=float, default=math.inf, help="begin no part after this time")
    option("--rounds", type=int, default=11)
    option("--resume", type=float, metavar="END", help="go on with FILE until END of the clock")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    # PyTorch's default is TF32 in cuDNN and float32 in cuBLAS: the same for all.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = Settings(rounds=options.rounds, seconds=0.05, compile="compiled" in options.parts)
    end = time.monotonic() + options.seconds if options.resume is None else options.resume
    results = Results(options.json, end, settings)
    if options.resume is not None:
        results.take_over()
    environment = results.environment.items()
    print("\n".join(f"{name}: {value}" for name, value in environment), flush=True)
    results.save()

    steps: dict[str, Make] = {OURS: modules.LLTMCell, PLAIN: reference.LLTMCell}
    loops: dict[str, Make] = {OURS: modules.LLTM, CUDNN: nn.LSTM, PLAIN: reference.LLTM}
    if "layers" in options.parts:
        results.part("the card", lambda: results.show(machine(settings)))
        if options.kernels is not None:
            results.part("element-wise kernels", lambda: measure_kernels(options.kernels, results))
        measure_layers(steps, loops, results)
    # Last: a run that is cut short loses only these.
    if "tutorial" in options.parts:
        measure_tutorial(steps, loops, results)
    if "compiled" in options.parts:
        measure_compiled(steps, loops, results)

    print("\n".join(check_lines(results.checks)))
    if results.failures:
        raise SystemExit(f"failed: {'; '.join(results.failures)}")


if __name__ == "__main__":
    main()
