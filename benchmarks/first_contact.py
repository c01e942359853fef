"""GPU bring-up within minutes of GPU access: `make first-contact`.

    make first-contact RESULTS=results                              all stages, in nine minutes
    make first-contact RESULTS=results STAGE="float32 sweep-gpu"    these, after the build

Each stage has a time limit, and all stages together have --seconds, so that a failure or a hang
does not stop the other stages. RESULTS contains `summary.json` (the state and the printed values of
each stage) and a log of each stage. --dry-run runs the parts that need no GPU. The exit status is 0
if all stages succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Stage:
    name: str
    command: Sequence[str]
    limit: float  # seconds
    environment: Mapping[str, str] = field(default_factory=dict)
    rehearsal: Sequence[str] = ()  # arguments that --dry-run appends


PYTHON = sys.executable
CELLS = ("--quick", "--cell", "lstm", "gru")
BENCH = (PYTHON, "benchmarks/bench_cuda.py", *CELLS, "--rounds=5")
SWEEP = (
    *(PYTHON, "benchmarks/sweep.py", *CELLS, "--rounds=3"),
    *("--device=cuda", "--seed=1", "--count=40", "--seconds=75"),
)
SHAPES = ("--shapes", "1024,16,768,768", "100,64,512,512", "100,16,256,256")
DEVICE = f"""command -v nvidia-smi || {{ echo no GPU found; exit 1; }}
nproc; nvidia-smi --query --display=CLOCK,POWER
{PYTHON} -c 'import torch; print(torch.__version__, torch.cuda.get_device_properties(0))'"""
# No GPU has run any kernel of this version. Each kernel is checked at its first use.
SELF_CHECKS = """
import itertools, json, sys, warnings, torch, lltm
warnings.simplefilter("always")
layers, dtypes = (lltm.LSTM, lltm.GRU, lltm.LLTM), (torch.float32, torch.float16, torch.bfloat16)
with warnings.catch_warnings(record=True) as said:
    for new, dtype, H, both in itertools.product(layers, dtypes, (256, 768, 1024), (False, True)):
        layer = new(H, H, bidirectional=both).to(sys.argv[-1], dtype)
        layer(torch.randn(8, 16, H, device=sys.argv[-1], dtype=dtype))[0].sum().backward()
failed = sorted({str(each.message) for each in said if "lltm" in str(each.message)})
print(json.dumps({"failed self-checks": failed}))
sys.exit(bool(failed))
"""
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
# No GPU has run the features of these tests.
FLOAT32 = "--gtest_filter=Persistent/*float32*"
NEW = "(float32 and persistent) or reset or mask or checkpoint or direction"
NCU = (
    *("ncu", "--clock-control=none", "--cache-control=none", "--print-units=base", "--set=basic"),
    # The self-check makes the first launches.
    *("--metrics=lts__t_sectors_srcunit_tex_op_read.sum", "--launch-skip=4", "--launch-count=1"),
    "--kill=yes",
)


def stages(results: Path) -> list[Stage]:
    def bench(name: str, *options: str) -> Stage:
        """Ends 30 seconds before the limit, to write every sample."""
        command = (*BENCH, *options, f"--json={results}/{name}.json", "--seconds=90")
        return Stage(name, command, 120, {}, ("--device=cpu", "--shapes", "6,3,5,8"))

    def profile(dtype: str, direction: str) -> Stage:
        program = (*BENCH, *SHAPES[:2], "--engine=persistent", "--dtype", dtype)
        command = (*NCU, f"--kernel-name=lltm_persistent_{direction}", *program)
        return Stage(f"ncu-{direction}-{dtype}", command, 120)

    both = ("--dtype", "float32", "float16")
    sweep = (*SWEEP, *both, f"--json={results}/sweep-gpu.json")
    small = ("--device=cpu", "--count=1", "--seed=149")
    return [
        Stage("device", ("sh", "-c", DEVICE), 60),
        Stage("build", ("make", "--no-print-directory", "build-gpu"), 420),
        Stage("self-checks", (PYTHON, "-c", SELF_CHECKS, "cuda"), 90, {}, ("cpu",)),
        Stage("native-float32", (*NATIVE, FLOAT32), 180, TESTING, ("--gtest_list_tests",)),
        Stage("pytest-new", (*PYTEST, "-k", NEW), 180, TESTING, ("--collect-only",)),
        bench("float32", *SHAPES, "--dtype=float32"),
        bench("forms", *both, "--form", "bidirectional", "layers", "packed"),
        Stage("sweep-gpu", sweep, 100, rehearsal=small),
        *(bench(dtype, *SHAPES, "--dtype", dtype) for dtype in ("float16", "bfloat16")),
        bench("compile", *both, "--shapes", SHAPES[-1], "--compile", "--engine=persistent"),
        *starmap(profile, product(("float32", "bfloat16"), ("forward", "backward"))),
        Stage("native", NATIVE, 180, TESTING, ("--gtest_list_tests",)),
        Stage("pytest", PYTEST, 180, TESTING, ("--collect-only",)),
    ]


def run(stage: Stage, limit: float, log: Path) -> dict[str, Any]:
    """Returns the stage's state, the values that it printed and the tests that failed."""
    begin, state = time.monotonic(), "done"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ("bash", "-c", 'exec "$@"', "stage", *stage.command),  # reports a missing program
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if process.wait(limit) != 0:
                state = f"failed: exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {limit:.0f} seconds"
        finally:  # does not wait for processes that a driver blocks
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(2)
    entry: dict[str, Any] = {"state": state, "seconds": round(time.monotonic() - begin, 1)}
    text = log.read_text(encoding="utf-8", errors="replace")
    said = [line for line in text.splitlines() if line.strip()]
    for line in said:
        with suppress(ValueError):
            entry |= json.loads(line) if line.startswith("{") else {}
    failed = re.findall(r"FAILED +(?:\] )?(\S+[.:]\S+)", "\n".join(said))
    entry |= {"failed tests": sorted({*failed})} if failed else {}
    return entry if state == "done" else entry | {"last line": said[-1] if said else ""}


def run_all(chosen: Sequence[Stage], results: Path, seconds: float, dry_run: bool) -> list[str]:
    """Returns the names of the failed stages."""
    summary, end_at = results / "summary.json", time.monotonic() + seconds
    known: dict[str, Any] = json.loads(summary.read_bytes()) if summary.exists() else {}
    for stage in chosen:
        if dry_run:
            stage = replace(stage, command=(*stage.command, *stage.rehearsal))
        left = end_at - time.monotonic() - 5  # seconds, to end it
        entry: dict[str, Any] = {"state": "not started: out of time"}
        if left > 0:
            entry = run(stage, min(stage.limit, left), results / f"{stage.name}.log")
        if dry_run and re.search("no GPU found|ncu: .*not found", entry.get("last line", "")):
            entry["state"] = "needs a GPU"
        known[stage.name] = entry
        summary.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
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
