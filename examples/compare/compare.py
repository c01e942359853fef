"""Compares lltm.LLTM, nn.LSTM and nn.GRU with equal parameter counts on five tasks.

    python examples/compare/compare.py

Sweeps the learning rate of every model on every task, trains each with three seeds, measures the
time per update, and writes results.json, summary.md and the plots to build/compare. This needs
about 90 minutes of CPU time. Results are saved after every run; the same command resumes an
interrupted comparison. `--time` measures only the times again, in a minute.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import report
import torch
from results import SWEEP_SEED, Description, Results, Run, Spec
from tasks import TASKS, task
from training import MODELS, run, seconds_per_update


def learning_rate(exponent: int) -> float:
    """Returns a rate of the grid, which has two rates per factor of ten."""
    return float(f"{10 ** (exponent / 2):.3g}")


def next_exponents(
    errors: Mapping[int, float], first: Sequence[int], limits: tuple[int, int]
) -> list[int]:
    """Returns the remaining exponents of a sweep: the initial grid, then beyond the best edge.

    `errors` are the errors of earlier exponents. Returns nothing if the best exponent has neighbors
    on both sides or is a limit.
    """
    if untried := [exponent for exponent in first if exponent not in errors]:
        return untried
    best = min(errors, key=lambda exponent: errors[exponent])
    if best == min(errors) and best > limits[0]:
        return [best - 1]
    if best == max(errors) and best < limits[1]:
        return [best + 1]
    return []


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison."""

    seeds: int = 3
    exponents: Sequence[int] = (-6, -5, -4)  # 0.001, 0.00316 and 0.01
    limits: tuple[int, int] = (-10, 0)
    updates: int | None = None  # default: the task's number

    def missing(self, results: Results, name: str, model: str) -> Iterator[Spec]:
        """Returns the next runs; later runs may depend on their results."""
        updates = self.updates or task(name).updates

        def spec(seed: int, exponent: int) -> Spec:
            return Spec(name, model, seed, learning_rate(exponent), updates)

        errors: dict[int, float] = {}
        for exponent in range(self.limits[0], self.limits[1] + 1):
            if done := results.runs.get(spec(SWEEP_SEED, exponent)):
                errors[exponent] = error(done)
        if exponents := next_exponents(errors, self.exponents, self.limits):
            yield from (spec(SWEEP_SEED, exponent) for exponent in exponents)
        else:
            best = min(errors, key=lambda exponent: errors[exponent])
            specs = (spec(seed, best) for seed in range(self.seeds))
            yield from (spec for spec in specs if spec not in results.runs)


def error(run: Run) -> float:
    """Validation error; smaller is better."""
    higher_is_better = task(run.spec.task).higher_is_better
    value = run.selected(higher_is_better).validation
    return -value if higher_is_better else value


def do_runs(
    plan: Plan, names: Sequence[str], results: Results, path: Path, pool: Executor, jobs: int
) -> None:
    """Does the missing runs, several concurrently, and saves the results after each."""
    running: dict[Future[Run], Spec] = {}

    def waiting() -> list[Spec]:
        missing = (plan.missing(results, name, model) for name in names for model in MODELS)
        return [spec for specs in missing for spec in specs if spec not in running.values()]

    while True:
        for spec in waiting()[: jobs - len(running)]:
            running[pool.submit(run, spec)] = spec
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            spec, done = running.pop(future), future.result()
            results.runs[spec] = done
            results.save(path)
            value = done.selected(task(spec.task).higher_is_better).test
            print(
                f"{spec.task}: {spec.model}, seed {spec.seed}, learning rate"
                f" {spec.learning_rate:g}: {value:.4g} ({task(spec.task).metric})",
                flush=True,
            )


def measure_times(names: Sequence[str], results: Results, rounds: int) -> None:
    """Uses all threads, the models in turn; needs an otherwise idle machine."""
    for name in names:
        results.seconds_per_update[name] = seconds_per_update(name, rounds)
    results.machine = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe(name: str, updates: int | None = None) -> Description:
    found = task(name)
    # The last digits depend on the machine.
    levels = {level: float(f"{value:.4g}") for level, value in found.levels.items()}
    return Description(
        found.title,
        updates or found.updates,
        found.metric,
        found.higher_is_better,
        found.log_scale,
        levels,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="of them all")
    parser.add_argument("--seeds", type=int, default=3, help="of the reported runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--out", type=Path, default=Path("build/compare"), help="a folder")
    parser.add_argument("--time", action="store_true", help="only measure the times, again")
    parser.add_argument(
        "--quick", action="store_true", help="one update, in OUT/quick: does it work"
    )
    options = parser.parse_args()
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(options, name)}")
    plan = Plan(seeds=options.seeds)
    if options.quick:
        plan = Plan(seeds=options.seeds, exponents=(-5,), limits=(-5, -5), updates=1)
        options.out /= "quick"

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    results = Results.load(path)
    names = options.task
    results.tasks |= {name: describe(name, plan.updates) for name in names}
    if options.time:
        names = [name for name in names if any(results.reported(name, model) for model in MODELS)]
        if not names:
            sys.exit(f"expected the runs of a comparison in {path} before --time, got none")
    else:
        # One thread per run: results would otherwise depend on the number of cores, because the
        # number of threads changes the order of sums.
        with ProcessPoolExecutor(
            options.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            do_runs(plan, names, results, path, pool, options.jobs)
    if options.time or not set(names) <= set(results.seconds_per_update):
        measure_times(names, results, rounds=2 if options.quick else 40)
    results.save(path)
    report.write(results, options.out)
    print(f"{path}, summary.md and pictures: {options.out}")


if __name__ == "__main__":
    main()
