"""Whether the engines of a GPU work at all, and how long a step takes: of `make first-contact`.

    python benchmarks/smoke.py check --json smoke.json
    python benchmarks/smoke.py time --json times.json

`check` runs a short sequence forward and backward by each engine, in float16 and bfloat16, and
compares results and gradients with those of the CPU in float64, with a second run, and the engines
with each other. `time` takes the microseconds of a step, forward and backward, at the shape of the
goals, of one direction and of both, beside cuDNN's LSTM.

Each engine and dtype has a process of its own, which is ended after --limit seconds: what hangs or
breaks the GPU for its process costs the others nothing. What is known so far is in the file after
each figure. The exit status says whether all is well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from processes import watch
from results_file import write_json
from torch import Tensor, nn

import lltm

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICE = "cuda"
CUDNN = "cuDNN's LSTM"
ENGINES = ("persistent", "stepwise")
CHECKED = (64, 16, 768)  # T, B, and H, which is I too
TIMED = (1024, 16, 768)
ROUNDS = 9
# In eps of the dtype: the largest error by the largest value, of sums over 64 steps.
MOST_ERROR = 32

# ---- in a process of its own -------------------------------------------------


@contextmanager
def engine_chosen(engine: str) -> Iterator[None]:
    if engine == CUDNN:
        yield
        return
    with lltm.backends.cuda.flags(persistent=engine == "persistent"):
        yield


def results(device: str, dtype: torch.dtype, computed: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of the same numbers of `dtype`, computed in another or the same."""
    torch.manual_seed(0)
    steps, batch, size = CHECKED
    layer = lltm.LLTM(size, size).to(dtype).to(device, computed)
    sizes = [(steps, batch, size), (1, batch, size), (1, batch, size), (steps, batch, size)]
    input, h, c, gradient = (torch.randn(s).to(dtype).to(device, computed) for s in sizes)
    leaves = {"input": input, "h_0": h, "c_0": c}
    for leaf in leaves.values():
        leaf.requires_grad_()
    output, (h_n, c_n) = layer(input, (h, c))
    leaves |= dict(layer.named_parameters())
    gradients = torch.autograd.grad(output, list(leaves.values()), gradient)
    found = {"output": output, "h_n": h_n, "c_n": c_n}
    found |= dict(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))
    return {name: value.detach().double().cpu() for name, value in found.items()}


def kernels() -> list[str]:
    """The names of the kernels that a sequence takes; none where the profiler is not to be had."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            results(DEVICE, torch.float16, torch.float16)
    except (RuntimeError, AssertionError):  # as torch says it
        return []
    return [event.key for event in profile.key_averages() if "lltm_" in event.key]


def check_one(engine: str, name: str, path: Path) -> None:
    dtype = DTYPES[name]
    with engine_chosen(engine):
        found = results(DEVICE, dtype, dtype)
        again = results(DEVICE, dtype, dtype)
        torch.save(found, path)
        same = all(torch.equal(found[key], again[key]) for key in found)
        say({"same bits twice": same})
        # Last: it may do harm.
        if names := kernels():
            ran = any("lltm_persistent" in kernel for kernel in names)
            say({"engine that ran": "persistent" if ran else "stepwise"})


def time_one(engine: str, name: str) -> None:
    for bidirectional in (False, True):
        time_layer(engine, DTYPES[name], bidirectional)


def time_layer(engine: str, dtype: torch.dtype, bidirectional: bool) -> None:
    steps, batch, size = TIMED
    module = nn.LSTM if engine == CUDNN else lltm.LLTM
    layer: Any = module(size, size, bidirectional=bidirectional).to(DEVICE, dtype)
    input = torch.randn(steps, batch, size, device=DEVICE, dtype=dtype)
    gradient = torch.randn_like(torch.cat([input, input], -1) if bidirectional else input)

    def seconds(run: Callable[[], object]) -> tuple[float, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3, result

    def tell(what: str, samples: Sequence[float]) -> None:
        taken = [1e6 * sample / steps for sample in samples[2:]]  # without those to warm up
        what += " of both directions" if bidirectional else ""
        say({f"{what}, us a step": statistics.median(taken), f"{what}, all": taken})

    with engine_chosen(engine):
        with torch.no_grad():
            tell("forward", [seconds(lambda: layer(input))[0] for _ in range(2 + ROUNDS)])
        input.requires_grad_()
        both: list[tuple[float, float]] = []
        for _ in range(2 + ROUNDS):
            forward, (output, _) = seconds(lambda: layer(input))
            backward, _ = seconds(partial(output.backward, gradient))
            both.append((forward, backward))
        tell("forward of training", [pair[0] for pair in both])
        tell("backward", [pair[1] for pair in both])


def say(known: dict[str, Any]) -> None:
    print(json.dumps(known), flush=True)


# ---- over them all -----------------------------------------------------------


class Runs:
    """What is known of each engine and dtype, written after each line that a process prints."""

    def __init__(self, path: Path | None, limit: float) -> None:
        self.path = path
        self.limit = limit
        self.known: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []

    def add(self, name: str, more: dict[str, Any]) -> None:
        self.known.setdefault(name, {}).update(more)
        for what, value in more.items():
            if not isinstance(value, list):
                shown = f"{value:.4g}" if isinstance(value, float) else value
                print(f"{name}: {what}: {shown}", flush=True)
        if self.path is not None:
            write_json(self.path, self.known)

    def fault(self, name: str, why: str) -> None:
        self.faults.append(f"{name}: {why}")
        self.add(name, {"fault": why})

    def run(self, engine: str, dtype: str, *words: str) -> None:
        """One process of this program."""
        name, said = f"{engine}, {dtype}", "it said nothing"

        def heed(line: str) -> None:
            nonlocal said
            if line.startswith("{"):
                self.add(name, json.loads(line))
            elif line.strip():
                print(line, flush=True)
                said = line.strip()

        command = (sys.executable, __file__, *words, "--engine", engine, "--dtype", dtype)
        status = watch(command, heed, seconds=self.limit)
        if status is None:
            self.fault(name, f"more than {self.limit:g} seconds")
        elif status != 0:
            self.fault(name, f"exit status {status}: {said}")


def error(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max()
    return float((found - expected).abs().max() / largest)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error, NaN before all, and of what."""
    errors = [(error(found[name], expected[name]), name) for name in expected]
    return max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))


def check(runs: Runs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for dtype in DTYPES:
            results_of: dict[str, dict[str, Tensor]] = {}
            for engine in ENGINES:
                path = Path(folder, f"{engine}-{dtype}")
                runs.run(engine, dtype, "check", "--results", str(path))
                name = f"{engine}, {dtype}"
                if runs.known[name].get("same bits twice") is False:
                    runs.fault(name, "other bits in a second run")
                if runs.known[name].get("engine that ran", engine) != engine:
                    runs.fault(name, "the other engine ran")
                if path.exists():
                    results_of[engine] = torch.load(path)
            expected = results("cpu", DTYPES[dtype], torch.float64)
            for engine, found in results_of.items():
                compare(runs, f"{engine}, {dtype}", "the CPU", found, expected, dtype)
            for engine, other in combinations(results_of, 2):
                name = f"{engine}, {dtype}"
                compare(runs, name, other, results_of[engine], results_of[other], dtype)


def compare(
    runs: Runs,
    name: str,
    other: str,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: str,
) -> None:
    value, where = worst(found, expected)
    in_eps = value / torch.finfo(DTYPES[dtype]).eps
    runs.add(name, {f"error beside {other}, eps": in_eps, f"largest beside {other}": where})
    if not in_eps <= MOST_ERROR:
        runs.fault(name, f"{where} is off by {in_eps:.1f} eps beside {other}")


def time_all(runs: Runs) -> None:
    for dtype in DTYPES:
        for engine in (*ENGINES, CUDNN):
            runs.run(engine, dtype, "time")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    option = parser.add_argument
    option("what", choices=("check", "time"))
    option("--json", type=Path, metavar="FILE", help="write all that was found")
    option("--limit", type=float, default=15, metavar="SECONDS", help="of one process")
    option("--engine", choices=(*ENGINES, CUDNN), help="this one alone, in this process")
    option("--dtype", choices=list(DTYPES))
    option("--results", type=Path, metavar="FILE", help="where this process saves its results")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    if options.engine is not None:
        if options.what == "time":
            time_one(options.engine, options.dtype)
        else:
            check_one(options.engine, options.dtype, options.results)
        return
    runs = Runs(options.json, options.limit)
    (check if options.what == "check" else time_all)(runs)
    if runs.faults:
        raise SystemExit("; ".join(runs.faults))


if __name__ == "__main__":
    main()
