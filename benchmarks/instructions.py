"""Compares the instruction counts of the kernels with benchmarks/instructions.json.

    python benchmarks/instructions.py build/benchmarks/lltm_count            `make bench-check`
    python benchmarks/instructions.py build/benchmarks/lltm_count --write    `make bench-baseline`

callgrind counts the instructions of each case of count_instructions.cpp: `lltm` counts liblltm and
its kernels, `all` also libtorch and its GEMMs, without the C library. Unlike a time, a count is the
same in every run and on every CPU with AVX2, because valgrind emulates a CPU with its own
instruction sets (no AVX-512) and caches.

Exits with 1 if a count is more than 3 % above the file, or if the cases differ. Exits with 77 if
the file was made with other tools, which it names: the counts are then not comparable.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BASELINE = Path(__file__).with_suffix(".json")
TOLERANCE = 0.03
FAILED, NOT_COMPARABLE = 1, 77

# The program's entire environment: one thread and AVX2 kernels, on any CPU.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# Printed properties that change the counts without a change of lltm's sources.
TOOLS = ["torch", "compiler", "build", "C library", "CPU kernels in use", "CPU micro-kernel"]
TOOLS += ["caches", "valgrind"]

Counts = dict[str, int]  # "lltm" and "all"


@dataclass(frozen=True)
class Run:
    tools: dict[str, str]
    instructions: dict[str, Counts]


def count(program: Path) -> Run:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        sys.exit("lltm: valgrind is not installed (Debian: valgrind)")
    version = subprocess.run([valgrind, "--version"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [valgrind, "--tool=callgrind", "--instr-atstart=no", program.resolve()],
            cwd=folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            sys.exit(f"lltm: {program} failed under callgrind:\n{run.stdout}{run.stderr}")
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("callgrind.out.*")]
    printed = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    printed["valgrind"] = version.stdout.strip()
    names = (program.name, "liblltm.so")
    counted = [counts_of(text, names) for text in texts if TRIGGER in text]
    return Run({name: printed[name] for name in TOOLS}, dict(sorted(counted)))


TRIGGER = "desc: Trigger: Client Request: "


def counts_of(text: str, names: tuple[str, ...]) -> tuple[str, Counts]:
    """The case and the counts of a callgrind file.

    Objects whose file names start with one of `names` count as `lltm`.
    """
    (case,) = re.findall(f"^{TRIGGER}(.*)$", text, re.MULTILINE)
    objects: dict[str, str] = {}  # later lines have only the number of a path
    counts = {"lltm": 0, "all": 0}
    file, after_call = "", False
    for line in text.splitlines():
        if match := re.match(r"(c?)ob=\((\d+)\)(?: (.*))?$", line):
            called, number, path = match.groups()
            objects.setdefault(number, path)
            if not called:
                file = Path(objects[number]).name
        elif line.startswith("calls="):
            after_call = True  # the next line is the cost of the callee
        elif re.match(r"[\d+*-]", line):  # a position and a cost
            cost = 0 if after_call else int(line.split()[1])
            after_call = False
            counts["lltm"] += cost if file.startswith(names) else 0
            # The search of malloc depends on all earlier allocations.
            counts["all"] += 0 if file.startswith("libc.so") else cost
    return case, counts


def read(path: Path) -> Run:
    return Run(**json.loads(path.read_bytes()))


def compare(baseline: Run, now: Run, file: str) -> tuple[int, list[str]]:
    """An exit status and the lines to print."""
    other = [name for name in now.tools if baseline.tools.get(name) != now.tools[name]]
    if other:
        lines = [f"Instructions not compared with those of {file}:"]
        for name in other:
            there, here = baseline.tools.get(name), now.tools[name]
            lines.append(f"  {name}: {there!r} there, {here!r} here")
        return NOT_COMPARABLE, [*lines, "To compare here, write the file before the change."]

    lines = []
    status = 0
    for case in sorted(baseline.instructions.keys() ^ now.instructions.keys()):
        status = FAILED
        where = file if case in baseline.instructions else "this run"
        lines.append(f"FAILED  {case}: in {where} only")
    largest = -1.0
    for case in sorted(baseline.instructions.keys() & now.instructions.keys()):
        for what, before in baseline.instructions[case].items():
            after = now.instructions[case][what]
            change = after / before - 1
            largest = max(largest, change)
            more = after > (1 + TOLERANCE) * before
            if more or after < (1 - TOLERANCE) * before:
                status = FAILED if more else status
                verdict = "FAILED" if more else "fewer "
                lines.append(f"{verdict}  {case}: {what} {before:,} -> {after:,} ({change:+.1%})")
    if lines:
        lines.append(f"If these counts are intended, write {file}.")
    limit = f"most above {file}: {largest:+.2%}, limit {TOLERANCE:+.0%}"
    return status, [*lines, f"Instructions of {len(now.instructions)} cases; {limit}"]


def as_json(run: Run) -> str:
    """JSON with a line per case."""

    def lines(entries: Mapping[str, object]) -> str:
        return ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())

    tools, cases = lines(run.tools), lines(run.instructions)
    return f'{{\n "tools": {{\n{tools}\n }},\n "instructions": {{\n{cases}\n }}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, help="lltm_count")
    parser.add_argument("--write", action="store_true", help="write the file, compare nothing")
    options = parser.parse_args()
    now = count(options.program)
    if options.write:
        BASELINE.write_text(as_json(now), encoding="utf-8")
        print(f"{len(now.instructions)} cases: {BASELINE}")
        return 0
    status, lines = compare(read(BASELINE), now, BASELINE.name)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
