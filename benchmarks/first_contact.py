"""The first minutes on a machine with a GPU, in five stages: `make first-contact`.

    make first-contact                            all stages, one after another
    make first-contact STAGE=3 RESULTS=results    one of them

1. Whether both engines work, and the microseconds of a step beside cuDNN's (smoke.py).
2. The native tests and pytest (gpu_tests.py).
3. What the card can do (gpu_check.py), and the benchmark without compilers (bench_cuda.py).
4. The sweep that the tuning table is made of (sweep_cuda.cpp, tuning_table.py).
5. compute-sanitizer and ncu, if they work there; the benchmarks that compile something first.

Such a machine is often lent for minutes, and a command that takes too long is killed. So a stage
takes at most eight minutes: each step has a limit of its own, and the last ones what is left. The
next stage may be on another machine, so each builds what is not yet built. What fails or is stopped
keeps nothing else from running.

What comes back may be limited too, so the folder of results holds two files, which are up to date
at every moment: `summary.json`, how far each step came, what it said and the figures in it; and
`results.tar.gz`, a folder for benchmarks/results/ with the same by stage, `stage-N.json`, the
output, `stage-N.txt`, and what the steps write themselves.

--dry-run does what needs no GPU: it builds, lists the tests, and sees that the programs start.
The exit status says whether every step did all of its work.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import processes
from results_file import write_json

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path("build", "gpu")
STAGE_SECONDS = 480.0
PACK_SECONDS = 10.0  # between two archives while a step runs
LOG_BYTES = 4 << 20  # of the end of a log, in the archive
GOOD_STATES = ("done", "needs a GPU")

Figures = dict[str, Any]
Entry = dict[str, Any]  # of a step: how it went


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]
    limit: float  # seconds
    # Of a program that ends by itself, for which --seconds is added: how long before its limit it
    # has to begin with nothing new.
    spare: float | None = None
    # What --dry-run runs instead; None: nothing, the command is only shown.
    rehearsal: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    # Where standard output goes, in the folder of results; else it goes to the log.
    output: str | None = None
    # A step of the same stage without which this one is of no use.
    needs: str | None = None
    # What the output says in figures.
    figures: Callable[[str], Figures] = lambda text: {}


@dataclass(frozen=True)
class Stage:
    title: str
    steps: Sequence[Step]


# ---- what the output of a step says ------------------------------------------


COUNTS = {
    "passed": r"\[  PASSED  \] (\d+) test|\b(\d+) passed\b",
    "failed": r"\[  FAILED  \] (\d+) test|\b(\d+) failed\b",
    "skipped": r"\[  SKIPPED \] (\d+) test|\b(\d+) skipped\b",
    "hung": r"\b(\d+) hung\b",
    "crashed": r"\b(\d+) crashed\b",
    "not begun": r"\b(\d+) (?:not begun|left out)\b",
    "sanitizer errors": r"ERROR SUMMARY: (\d+) error",
}


def test_figures(text: str) -> Figures:
    """How many tests passed and did not, by the last word of gpu_tests.py, GoogleTest or pytest."""
    found: Figures = {}
    for name, pattern in COUNTS.items():
        for match in re.finditer(pattern, text):
            found[name] = int(match[match.lastindex or 0])
    return found


def profile_figures(text: str) -> Figures:
    """The row of `ncu --csv --page raw`: metrics by name, numbers as such."""
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 3:  # names, units, and a row for each kernel
        return {}
    figures: Figures = {}
    for name, value in zip(table[0], table[2], strict=False):
        if name == "Kernel Name":
            figures[name] = value
        elif "__" in name:
            number = value.replace(",", "")
            figures[name] = (
                float(number) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", number) else value
            )
    return figures


def persistent_figures(steps: int, bytes_of_state: int) -> Callable[[str], Figures]:
    """Those of a persistent kernel, and how often a thread block reads the state of a step.

    Twice is the aim: once to see that it is there, and once more on average.
    """

    def figures(text: str) -> Figures:
        found = profile_figures(text)
        sectors = found.get("lts__t_sectors_srcunit_tex_op_read.sum")
        blocks = found.get("launch__grid_size")
        if isinstance(sectors, float) and isinstance(blocks, float):
            found["L2 read sectors a step"] = sectors / steps
            found["reads of a state"] = 32 * sectors / (steps * blocks * bytes_of_state)
        return found

    return figures


def smoke_figures(text: str) -> Figures:
    """What smoke.py says of each engine and dtype, a figure to a line."""
    found: Figures = {}
    for name, what, value in re.findall(r"^([^:\n]+, \w+): ([^:\n]+): (.+)$", text, re.MULTILINE):
        is_number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value)
        found[f"{name}: {what}"] = float(value) if is_number else value
    return found


# What a program says where there is no GPU.
NO_GPU = re.compile(r"no GPU here")

ERROR = re.compile(r"\berror: |^CMake Error")


def fault(status: int, text: str) -> str | None:
    """Why a step that has ended did not do its work, in a line of its own; None if it did.

    That is the first error of a compiler, or else what was said last.
    """
    said = [line.strip() for line in text.splitlines() if line.strip()]
    without_gpu = [line for line in said if NO_GPU.search(line)]
    if without_gpu:
        return without_gpu[-1]
    if status == 0:
        return None
    errors = [line for line in said if ERROR.search(line)]
    reason = next(iter([*errors, *said[-1:], "it said nothing"]))
    return f"exit status {status}: {reason}"


# ---- the stages --------------------------------------------------------------

METRICS = (
    "gpu__time_duration.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__grid_size",
    "launch__block_size",
)
PROFILED_STEPS, PROFILED_ROWS, PROFILED_HIDDEN = 128, 16, 768


def profile(engine: str, direction: str, dtype: str) -> Step:
    """ncu on one kernel, of the second of two calls."""
    program = str(BUILD / "benchmarks" / "lltm_cuda_sweep")
    sizes = [str(size) for size in (PROFILED_STEPS, PROFILED_ROWS, PROFILED_HIDDEN)]
    is_persistent = engine == "persistent"
    # One launch takes all steps, or each step one.
    skipped = 1 if is_persistent else PROFILED_STEPS + PROFILED_STEPS // 2
    kernel = f"lltm_{'persistent_' if is_persistent else ''}{direction}"
    # A thread block reads 8 rows of h or, backward, of dz.
    state = 8 * PROFILED_HIDDEN * 2 * (1 if direction == "forward" else 3)
    return Step(
        f"ncu-{engine}-{direction}-{dtype}",
        (
            *("ncu", "--clock-control", "none", "--cache-control", "none"),
            *("--kernel-name", kernel, "--launch-skip", str(skipped), "--launch-count", "1"),
            *("--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)),
            *(program, "--run", "lltm", direction, engine, dtype, *sizes),
        ),
        limit=45,
        figures=persistent_figures(PROFILED_STEPS, state) if is_persistent else profile_figures,
    )


def sanitize(name: str, tool: str, pattern: str, limit: float, needs: str | None = None) -> Step:
    """compute-sanitizer on our kernels, as `make test-cuda-sanitize` runs it."""
    program = str(BUILD / "tests_cpp" / "lltm_cuda_tests")
    # Each tensor an allocation of its own, whose bounds are known.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    return Step(
        name,
        (
            *("compute-sanitizer", "--tool", tool, "--kernel-name", "kns=lltm_"),
            *("--report-api-errors", "no", "--error-exitcode", "1"),
            *(program, f"--gtest_filter={pattern}"),
        ),
        limit=limit,
        needs=needs,
        rehearsal=(program, "--gtest_list_tests", f"--gtest_filter={pattern}"),
        environment=environment,
        figures=test_figures,
    )


def benchmark(name: str, file: Path, *options: str, limit: float, spare: float) -> Step:
    program = (sys.executable, "benchmarks/bench_cuda.py")
    command = (*program, *options, "--json", str(file))
    return Step(name, command, limit=limit, spare=spare, rehearsal=(*program, "--help"))


def tests(name: str, words: Sequence[str], results: Path, limit: float) -> Step:
    """Tests that cannot harm each other, each named before it begins."""
    command = (sys.executable, "benchmarks/gpu_tests.py", *words)
    return Step(
        name,
        (*command, "--timeout", "60", "--json", str(results / f"{name}.json")),
        limit=limit,
        spare=40,
        rehearsal=(*command, "--list"),
        # Much of their time is the oracle's, on the CPU. Of plugins of pytest they need none.
        environment={"OMP_NUM_THREADS": "2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        figures=test_figures,
    )


def stages(results: Path) -> dict[int, Stage]:
    python = sys.executable
    # With the variables of the make that runs this program.
    make = ("make", "--no-print-directory", "build-gpu")
    build = Step("build", make, limit=420, rehearsal=make)
    native = str(BUILD / "tests_cpp" / "lltm_cuda_tests")
    kernels = str(BUILD / "benchmarks" / "lltm_cuda_bench")
    sweep = str(BUILD / "benchmarks" / "lltm_cuda_sweep")
    check = (python, "benchmarks/gpu_check.py")
    smoke = (python, "benchmarks/smoke.py")
    table = (python, "benchmarks/tuning_table.py", "--print", str(results / "sweep.jsonl"))
    pytest = ("pytest", "tests_py/test_cuda.py", "tests_py/test_cuda_build.py")

    def machine(name: str, *options: str, limit: float) -> Step:
        words = (*check, *options, "--json", str(results / f"{name}.json"))
        return Step(name, words, limit=limit, rehearsal=words)

    def first(name: str, what: str, limit: float) -> Step:
        words = (*smoke, what, "--json", str(results / f"{name}.json"))
        return Step(name, words, limit=limit, rehearsal=(*smoke, "--help"), figures=smoke_figures)

    profiles = [
        *(profile("stepwise", way, "bfloat16") for way in ("forward", "backward")),
        *(
            profile("persistent", way, dtype)
            for dtype in ("bfloat16", "float16")
            for way in ("forward", "backward")
        ),
    ]
    return {
        1: Stage(
            "whether it works, and microseconds a step",
            [
                machine("device", "--quick", limit=40),
                build,
                first("smoke", "check", limit=75),
                first("times", "time", limit=110),
            ],
        ),
        2: Stage(
            "tests",
            [
                build,
                tests(
                    "native",
                    ("native", native, "--filter=-*ersistent*", "--jobs=8"),
                    results,
                    limit=180,
                ),
                tests(
                    "native-persistent",
                    ("native", native, "--filter=*ersistent*", "--jobs=4"),
                    results,
                    limit=180,
                ),
                tests("pytest", pytest, results, limit=240),
            ],
        ),
        3: Stage(
            "what the card can do, benchmark without compilers",
            [
                build,
                machine("machine", limit=60),
                benchmark(
                    "bench",
                    results / "cuda.json",
                    *("--parts", "layers", "--kernels", kernels),
                    limit=475,
                    spare=55,
                ),
            ],
        ),
        4: Stage(
            "tuning sweep",
            [
                build,
                Step(
                    "sweep",
                    (sweep,),
                    limit=450,
                    spare=50,
                    rehearsal=(sweep, "--list"),
                    output="sweep.jsonl",
                ),
                Step("table", table, limit=30, rehearsal=(*table[:2], "--help")),
            ],
        ),
        5: Stage(
            "compute-sanitizer, ncu, benchmarks that start compilers",
            [
                build,
                sanitize("sanitizer-works", "memcheck", "Cell/CudaCell.*Values*OracleForMany*", 40),
                sanitize("memcheck", "memcheck", "*/CudaAccess.*", 130, needs="sanitizer-works"),
                # It knows shared memory alone, which no other kernel uses.
                sanitize(
                    "racecheck", "racecheck", "*/CudaAccess.*/persistent*", 60, "sanitizer-works"
                ),
                replace(profiles[0], name="ncu-works"),
                *(replace(step, needs="ncu-works") for step in profiles[1:]),
                benchmark(
                    "bench-tutorial",
                    results / "cuda-tutorial.json",
                    *("--parts", "tutorial"),
                    limit=150,
                    spare=60,
                ),
                benchmark(
                    "bench-compiled",
                    results / "cuda-compiled.json",
                    *("--parts", "compiled"),
                    limit=300,
                    spare=180,
                ),
            ],
        ),
    }


# ---- running them ------------------------------------------------------------


class CutOff(Exception):
    """Somebody ends this program."""


@contextmanager
def signals_raise() -> Iterator[None]:
    def cut_off(number: int, frame: FrameType | None) -> None:
        raise CutOff(signal.Signals(number).name)

    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, cut_off) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Package:
    """In `folder`, what comes back of all that there is in `results`."""

    results: Path
    folder: Path

    def pack(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        reports = sorted(self.results.glob("stage-*.json"))
        write_json(
            self.folder / "summary.json", {r.stem: json.loads(r.read_text()) for r in reports}
        )
        archive = self.folder / "results.tar.gz"
        new = archive.with_name(f".{archive.name}.new")
        with tarfile.open(new, "w:gz") as tar:
            for path in sorted(self.results.glob("[!.]*")):
                content = path.read_bytes()
                if path.suffix == ".txt":
                    content = content[-LOG_BYTES:]
                member = tarfile.TarInfo(f"{self.results.name}/{path.name}")
                member.size, member.mtime = len(content), int(path.stat().st_mtime)
                tar.addfile(member, io.BytesIO(content))
        new.replace(archive)


class Report:
    """stage-N.json and stage-N.txt: the latter goes on where an earlier run ended."""

    def __init__(
        self,
        results: Path,
        number: int,
        stage: Stage,
        dry_run: bool,
        pack: Callable[[], None] = lambda: None,
    ) -> None:
        self.pack = pack
        self.json = results / f"stage-{number}.json"
        self.log = results / f"stage-{number}.txt"
        self.steps: list[Entry] = []
        self.known = {
            "stage": number,
            "title": stage.title,
            "dry run": dry_run,
            "began": now(),
            "ended": None,
            "steps": self.steps,
        }

    def keep(self, other_than: Sequence[str]) -> None:
        """Takes over what an earlier run says of other steps."""
        if self.json.exists():
            earlier: list[Entry] = json.loads(self.json.read_text())["steps"]
            self.steps += [entry for entry in earlier if entry["name"] not in other_than]

    def save(self) -> None:
        write_json(self.json, self.known)
        self.pack()

    def say(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{text}\n")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def wait(process: subprocess.Popen[bytes], limit: float, meanwhile: Callable[[], None]) -> int:
    """As process.wait; does something else now and then."""
    last = time.monotonic() + limit
    while True:
        left = last - time.monotonic()
        try:
            return process.wait(max(0.0, min(left, PACK_SECONDS)))
        except subprocess.TimeoutExpired:
            if left <= PACK_SECONDS:
                raise
            meanwhile()


def run_step(step: Step, command: Sequence[str], limit: float, report: Report) -> Entry:
    """Runs one step for at most `limit` seconds; what it returns is in the report too."""
    shown = ["python" if word == sys.executable else word for word in command]
    entry: Entry = {
        "name": step.name,
        "command": shown,
        "limit": round(limit),
        "state": "running",
        "reason": None,
        "seconds": None,
        "figures": {},
    }
    report.steps.append(entry)
    report.save()
    set_here = "".join(f"{name}={value} " for name, value in step.environment.items())
    report.say(f"\n$ {set_here}{' '.join(shown)}")
    begin, offset = time.monotonic(), report.log.stat().st_size
    entry["state"] = "cut off"  # unless something else comes of it
    try:
        with report.log.open("ab") as log:
            out = (report.log.parent / step.output).open("wb") if step.output else log
            try:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    preexec_fn=processes.own_group,
                )
            finally:
                if out is not log:
                    out.close()
        try:
            status = wait(process, limit, report.pack)
            entry["reason"] = fault(status, text_from(report.log, offset))
            entry["state"] = "failed" if entry["reason"] else "done"
        except subprocess.TimeoutExpired:
            entry["state"], entry["reason"] = "timed out", f"more than {limit:.0f} seconds"
        finally:
            processes.end(process)
    except OSError as error:
        entry["state"], entry["reason"] = "failed", f"{error.strerror}: {command[0]}"
    finally:
        entry["seconds"] = round(time.monotonic() - begin, 1)
        if report.log.stat().st_size > offset:
            entry["figures"] = step.figures(text_from(report.log, offset))
        report.say(f"# {describe(entry)}")
        report.save()
    return entry


def text_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def describe(entry: Mapping[str, Any]) -> str:
    taken = "" if entry["seconds"] is None else f" in {entry['seconds']:.1f} s"
    reason = f": {entry['reason']}" if entry["reason"] else ""
    return f"{entry['name']}: {entry['state']}{taken}{reason}"


def figure_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    for name, value in figures.items():
        yield f"    {name}: {f'{value:.6g}' if isinstance(value, float) else value}"


def run_stage(
    number: int,
    stage: Stage,
    results: Path,
    *,
    seconds: float = STAGE_SECONDS,
    patience: float = 1.0,
    dry_run: bool = False,
    chosen: Sequence[str] = (),
    pack: Callable[[], None] = lambda: None,
) -> bool:
    """Runs a stage, or the steps of it that are chosen; returns whether all did their work.

    All times are multiplied by `patience`.
    """
    results.mkdir(parents=True, exist_ok=True)
    report = Report(results, number, stage, dry_run, pack)
    if chosen:
        report.keep(other_than=chosen)
    before = len(report.steps)
    report.say(f"==== stage {number}: {stage.title}, {report.known['began']}")
    report.save()
    last = time.monotonic() + patience * seconds
    print(f"stage {number}: {stage.title}", flush=True)
    for step in stage.steps:
        if chosen and step.name not in chosen:
            continue
        command = step.rehearsal if dry_run else step.command
        if command is None:
            print(f"  {step.name}: needs a GPU", flush=True)
            continue
        limit = min(patience * step.limit, last - time.monotonic() - processes.KILL_SECONDS)
        states = {entry["name"]: entry["state"] for entry in report.steps[before:]}
        reason = "the time was up" if limit <= 0 else None
        if step.needs is not None and states.get(step.needs) not in (None, *GOOD_STATES):
            reason = f"{step.needs}: {states[step.needs]}"
        if reason is not None:
            entry: Entry = {"name": step.name, "state": "not begun", "reason": reason}
            entry |= {"seconds": None, "figures": {}}
            report.steps.append(entry)
            report.save()
        else:
            if step.spare is not None and not dry_run:
                seconds_of_its_own = max(0.0, limit - step.spare)
                command = (*command, "--seconds", f"{seconds_of_its_own:.0f}")
            entry = run_step(step, command, limit, report)
            if dry_run and NO_GPU.search(entry["reason"] or ""):
                entry["state"] = "needs a GPU"
        print("\n".join([f"  {describe(entry)}", *figure_lines(entry["figures"])]), flush=True)
    report.known["ended"] = now()
    report.save()
    return all(entry["state"] in GOOD_STATES for entry in report.steps[before:])


# ---- the program -------------------------------------------------------------


def gpu_name() -> str | None:
    commands = (
        ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        (sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"),
    )
    for command in commands:
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.check_output(
                command, stderr=subprocess.DEVNULL, text=True, timeout=60
            )
            if output.strip():
                return output.splitlines()[0].strip()
    return None


def run_name() -> str:
    """Of this day and GPU, as the results in the repository are named."""
    words = "-".join(re.findall(r"[a-z0-9]+", (gpu_name() or "no GPU").lower()))
    return f"{datetime.date.today().isoformat()}-{words}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    option = parser.add_argument
    option("--stage", type=int, action="append", choices=(1, 2, 3, 4, 5), help="not all of them")
    option("--step", action="append", metavar="NAME", help="of the stages, this step alone")
    option("--results", type=Path, metavar="FOLDER", default=ROOT / "build/results/first-contact")
    option(
        "--patience", type=float, default=1.0, metavar="N", help="N times as long, for few cores"
    )
    option("--dry-run", action="store_true", help="what needs no GPU")
    options = parser.parse_args(arguments)
    results = Path("build", "first-contact", run_name())
    package = Package(ROOT / results, options.results.resolve())
    plan = stages(results)
    names = {step.name for number in options.stage or plan for step in plan[number].steps}
    for name in options.step or ():
        if name not in names:
            parser.error(f"expected --step to be one of {', '.join(sorted(names))}, got {name}")
    try:
        with signals_raise():
            done = [
                run_stage(
                    number,
                    plan[number],
                    ROOT / results,
                    patience=options.patience,
                    dry_run=options.dry_run,
                    chosen=options.step or (),
                    pack=package.pack,
                )
                for number in options.stage or plan
            ]
    except CutOff as by:
        raise SystemExit(f"cut off by {by}; results so far: {package.folder}") from None
    print(f"results: {package.folder}")
    if not all(done):
        raise SystemExit("not everything was done")


if __name__ == "__main__":
    main()
