"""GPU bring-up within minutes of GPU access: `make first-contact`.

    make first-contact RESULTS=results                         all stages, in nine minutes
    make first-contact RESULTS=results STAGE="native pytest"   these, after the build

docs/cuda.md lists the stages, in order of importance.

Each stage has a time limit, all stages together have --seconds, and a stage that prints nothing for
too long is stopped, so that a failure or a hang does not stop the other stages. RESULTS contains
`summary.json` (the state and the printed values of each stage) and `log.txt` (all output, written
immediately). --dry-run runs the parts that need no GPU. The exit status is 0 if all stages
succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 120.0  # limit for the first line: loading torch from a cold disk is slow


@dataclass(frozen=True)
class Stage:
    name: str
    command: Sequence[str]
    limit: float  # seconds
    silence: float = 45.0  # seconds without a line, after the first one
    environment: Mapping[str, str] = field(default_factory=dict)
    rehearsal: Sequence[str] = ()  # arguments that --dry-run appends


PYTHON = sys.executable
BENCH = (PYTHON, "benchmarks/bench_cuda.py", "--shapes=1024,16,768,768")
DEVICE = f"""command -v nvidia-smi || {{ echo no GPU found; exit 1; }}
nproc; nvidia-smi --query --display=CLOCK,POWER
{PYTHON} -c 'import torch; print(torch.__version__, torch.cuda.get_device_properties(0))'"""
# In shards, so that a hang or a GPU error affects only its shard.
RUN_SHARDS = """seq 0 47 | xargs -P 8 -I % env GTEST_TOTAL_SHARDS=48 GTEST_SHARD_INDEX=% \
timeout 90 build/gpu/tests_cpp/lltm_cuda_tests "$@\""""
NATIVE = ("bash", "-c", RUN_SHARDS, "native")
PYTEST = (
    *(PYTHON, "-m", "pytest", "-p", "xdist.plugin", "--numprocesses=4", "-p", "no:cacheprovider"),
    *("-v", "-W", "default", "-o", "faulthandler_timeout=60"),
    *("-o", "faulthandler_exit_on_timeout=true", "tests_py/test_cuda.py"),
)
# The CPU oracle needs most of the time. pytest needs no other plugin of the environment.
TESTING = {"OMP_NUM_THREADS": "2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
NCU = (
    *("ncu", "--clock-control=none", "--cache-control=none", "--print-units=base", "--set=basic"),
    *("--metrics=lts__t_sectors_srcunit_tex_op_read.sum", "--launch-skip=2", "--launch-count=1"),
    "--kill=yes",
)


def stages(results: Path) -> list[Stage]:
    def engine(name: str, dtype: str) -> Stage:
        options = ("--engine", name, "--dtype", dtype, "--rounds=5")
        return Stage(f"{name}-{dtype}", (*BENCH, *options), 150)

    def profile(direction: str) -> Stage:
        """Profiles the third launch, after the self-check and the first call."""
        program = (*BENCH, "--engine=persistent", "--dtype=bfloat16")
        command = (*NCU, f"--kernel-name=lltm_persistent_{direction}", *program)
        return Stage(f"ncu-{direction}", command, 120)

    def sweep(threads: int) -> Stage:
        files = (f"--json={results / f'sweep-{threads}.json'}", "--plot=build/sweep.png")
        command = (PYTHON, "benchmarks/sweep.py", "--seed=1", "--rounds=3", "--count=20", *files)
        small = ("--quick", "--count=1", "--seed=39")
        return Stage(f"sweep-{threads}", command, 90, 60, {"OMP_NUM_THREADS": f"{threads}"}, small)

    return [
        Stage("device", ("sh", "-c", DEVICE), 60),
        Stage("build", ("make", "--no-print-directory", "build-gpu"), 420, 420),
        *(engine("stepwise", dtype) for dtype in ("float16", "bfloat16", "float32")),
        *(engine("persistent", dtype) for dtype in ("float16", "bfloat16")),
        *map(profile, ("forward", "backward")),
        Stage("native", NATIVE, 180, 95, TESTING, ("--gtest_list_tests",)),
        Stage("pytest", PYTEST, 180, 90, TESTING, ("--collect-only",)),
        *map(sweep, (16, 8, 4)),
    ]


def lines_of(process: subprocess.Popen[bytes], limit: float, silence: float) -> Iterator[str]:
    """Yields output immediately; raises TimeoutError if the process takes too long."""
    assert process.stdout is not None
    end, heard_by, rest = time.monotonic() + limit, time.monotonic() + START_SECONDS, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := min(end, heard_by) - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            read = os.read(process.stdout.fileno(), 1 << 16)
            *whole, rest = (rest + read).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            heard_by = time.monotonic() + silence if whole else heard_by
            if not read:
                yield rest.decode(errors="replace")
                return
    raise TimeoutError("no output" if heard_by < end else f"more than {limit:.0f} seconds")


def end(process: subprocess.Popen[bytes]) -> None:
    """Does not wait for processes that a driver blocks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(2)
    assert process.stdout is not None
    process.stdout.close()


def tests(said: Sequence[str]) -> dict[str, Any]:
    """The number of started tests of GoogleTest or pytest, and the tests without a pass."""
    words = "RUN|OK|PASSED|SKIPPED|FAILED|ERROR"
    named = re.compile(rf"\b({words})(?: +\] ([^\s,]+\.[^\s,]+)| (\S+\.py.*?) *(?: - .*)?$)")
    found = [(m[1], m[2] or m[3]) for m in map(named.search, said) if m]
    good = {name for word, name in found if word in ("OK", "PASSED", "SKIPPED")}
    begun = {name for _, name in found}
    return {"tests": len(begun), "not passed": sorted(begun - good)} if begun else {}


def run(stage: Stage, limit: float, log: Callable[[str], None]) -> dict[str, Any]:
    """Returns the stage's state and printed values."""
    figures: dict[str, Any] = {}
    said, begin, state = ["nothing"], time.monotonic(), "done"
    try:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return {"state": f"failed: {error.strerror}: {stage.command[0]}"}
    try:
        for line in lines_of(process, limit, stage.silence):
            log(line)
            said += [line] if line.strip() else []
            if line.startswith("{"):
                figures |= json.loads(line)
        if process.wait(10) != 0:
            state = f"failed: exit status {process.returncode}: {said[-1]}"
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        state = f"stopped: {error}, after: {said[-1]}"
    finally:
        end(process)
    seconds = round(time.monotonic() - begin, 1)
    return {"state": state, "seconds": seconds, "figures": figures | tests(said)}


def run_all(chosen: Sequence[Stage], results: Path, seconds: float, dry_run: bool) -> list[str]:
    """Returns the names of the failed stages."""
    summary, end_at = results / "summary.json", time.monotonic() + seconds
    known: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    with (results / "log.txt").open("a", buffering=1) as file:
        for stage in chosen:
            if dry_run:
                stage = replace(stage, command=(*stage.command, *stage.rehearsal))
            left = end_at - time.monotonic() - 5  # seconds, to end it
            entry: dict[str, Any] = {"state": "not started: out of time"}
            if left > 0:
                print(f"\n==== {stage.name}: {' '.join(stage.command)}", file=file)
                entry = run(stage, min(stage.limit, left), partial(print, file=file))
            if dry_run and re.search("no GPU found|directory: ncu", entry["state"]):
                entry["state"] = "needs a GPU"
            known[stage.name] = entry
            summary.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{stage.name}: {', '.join(map(str, entry.values()))}", flush=True)
    good = ("done", "needs a GPU")
    return [stage.name for stage in chosen if known[stage.name]["state"] not in good]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    option = parser.add_argument
    option("--stage", nargs="+", metavar="NAME", help="stages to run after the build; default: all")
    option("--results", type=Path, metavar="FOLDER", default=ROOT / "build/results/first-contact")
    option("--seconds", type=float, default=540, help="time limit for all stages; default: 540")
    option("--dry-run", action="store_true", help="run only the parts that need no GPU")
    options = parser.parse_args()
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    known = {stage.name: stage for stage in stages(results)}
    for name in options.stage or ():
        if name not in known:
            parser.error(f"expected --stage to be of {', '.join(known)}, got {name}")
    names = dict.fromkeys(["build", *options.stage]) if options.stage else known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated by SIGTERM"))
    bad = run_all([known[name] for name in names], results, options.seconds, options.dry_run)
    print(f"results: {results}")
    if bad:
        raise SystemExit(f"incomplete; rerun: make first-contact STAGE='{' '.join(bad)}'")


if __name__ == "__main__":
    main()
