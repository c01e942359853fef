"""Runs tests on a GPU so that one which hangs or breaks the GPU for its process costs only itself.

    python benchmarks/gpu_tests.py native build/gpu/tests_cpp/lltm_cuda_tests --jobs=8
    python benchmarks/gpu_tests.py pytest tests_py/test_cuda.py

Of GoogleTest's programs and of pytest. After an error of CUDA that stays, every later test of the
process fails. So a process ends with its first failure, and the tests that are left go on in a new
one; so they do where a test has printed nothing for --timeout seconds. All output is printed as it
comes, after the number of its process. The last line has the counts and the names of what failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from processes import watch
from results_file import write_json

GOOD = ("passed", "skipped")
MOST_NAMED = 20
MOST_OF_A_PROCESS = 100  # tests, so that their names fit a command line


class Native:
    """A program of GoogleTest."""

    def __init__(self, program: str, pattern: str) -> None:
        self.program, self.pattern = program, pattern

    def listing(self) -> list[str]:
        return [self.program, "--gtest_list_tests", f"--gtest_filter={self.pattern}"]

    def names(self, listed: str) -> list[str]:
        found, suite = [], ""
        for line in listed.splitlines():
            name = line.partition("#")[0].rstrip()
            if name.startswith("  "):
                found.append(suite + name.strip())
            elif re.fullmatch(r"[\w/]+\.", name):
                suite = name
        return found

    def command(self, names: Sequence[str]) -> list[str]:
        return [self.program, "--gtest_fail_fast", f"--gtest_filter={':'.join(names)}"]

    def begun(self, line: str) -> str | None:
        match = re.match(r"\[ RUN      \] (\S+)", line)
        return match[1] if match else None

    def result(self, line: str) -> tuple[str, str] | None:
        match = re.match(r"\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+)", line)
        return (match[2], match[1].lower().replace("ok", "passed")) if match else None


class Pytest:
    def __init__(self, files: Sequence[str]) -> None:
        self.base = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default"]
        self.files = files

    def listing(self) -> list[str]:
        return [*self.base, "--collect-only", "--quiet", *self.files]

    def names(self, listed: str) -> list[str]:
        return [line for line in listed.splitlines() if re.match(r"\S+\.py::", line)]

    def command(self, names: Sequence[str]) -> list[str]:
        return [*self.base, "-v", "--maxfail=1", "--durations=5", *names]

    def begun(self, line: str) -> str | None:
        """Of a line that the result was to complete."""
        return line.strip() if re.match(r"\S+\.py::", line) else None

    def result(self, line: str) -> tuple[str, str] | None:
        match = re.match(r"(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", line)
        if not match:
            return None
        return match[1], {"ERROR": "failed", "XFAIL": "skipped"}.get(match[2], match[2].lower())


class Run:
    """The tests that are left, and how the others went."""

    def __init__(
        self, kind: Native | Pytest, names: Sequence[str], path: Path | None, seconds: float
    ) -> None:
        self.kind = kind
        self.path = path
        self.left = deque(names)
        self.of_a_process = MOST_OF_A_PROCESS
        self.results: dict[str, str] = {}
        self.end = time.monotonic() + seconds
        self.processes = 0
        self.lock = threading.Lock()

    def take(self) -> tuple[int, list[str]]:
        with self.lock:
            if time.monotonic() > self.end:
                return 0, []
            self.processes += 1
            count = min(self.of_a_process, len(self.left))
            return self.processes, [self.left.popleft() for _ in range(count)]

    def keep(self, name: str, result: str) -> None:
        with self.lock:
            self.results[name] = result
            if self.path is not None:
                write_json(self.path, self.results)

    def work(self, timeout: float) -> None:
        """One process after another, until nothing is left."""
        while (taken := self.take())[1]:
            self.process(*taken, timeout)

    def process(self, number: int, names: list[str], timeout: float) -> None:
        wanted, done = set(names), set()
        running, last = "", "it said nothing"

        def heed(line: str) -> None:
            nonlocal running, last
            print(f"{number:3}| {line}", flush=True)
            last = line.strip() or last
            if (found := self.kind.result(line)) is not None:
                name, result = found
                # GoogleTest names tests once more at the end, and those that it left out.
                if name in wanted and (name == running or isinstance(self.kind, Pytest)):
                    done.add(name)
                    self.keep(name, result)
                    running = ""
            elif (name := self.kind.begun(line) or "") in wanted:
                running = name

        seconds = max(1.0, self.end - time.monotonic()) + timeout
        status = watch(self.kind.command(names), heed, seconds=seconds, silence=timeout)
        if running:
            self.keep(running, "hung" if status is None else f"crashed ({status})")
            done.add(running)
        left = [name for name in names if name not in done]
        if not done:  # so a next process would fare no better
            for name in left:
                self.keep(name, f"not begun: {last}")
            return
        with self.lock:
            self.left.extendleft(reversed(left))


def summary(run: Run) -> str:
    counts = Counter(result.partition(":")[0].partition(" (")[0] for result in run.results.values())
    counts["left out"] = len(run.left)
    parts = [f"{counts[what]} {what}" for what in sorted(counts) if counts[what]]
    bad = [f"{name} {result}" for name, result in run.results.items() if result not in GOOD]
    if len(bad) > MOST_NAMED:
        bad = [*bad[:MOST_NAMED], f"and {len(bad) - MOST_NAMED} more"]
    return ", ".join(parts or ["no tests"]) + (f": {'; '.join(bad)}" if bad else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    option = parser.add_argument
    option("kind", choices=("native", "pytest"))
    option("what", nargs="+", help="the program; files of tests")
    option("--filter", default="*", metavar="PATTERN", help="GoogleTest's")
    option("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    option("--timeout", type=float, default=60, metavar="SECONDS", help="without output")
    option("--seconds", type=float, default=1e9, help="begin no process after this time")
    option("--json", type=Path, metavar="FILE", help="write how each test went")
    option("--list", action="store_true", help="nothing but that: needs no GPU")
    options = parser.parse_args(arguments)
    kind: Native | Pytest = Pytest(options.what)
    if options.kind == "native":
        kind = Native(options.what[0], options.filter)
    listed = subprocess.run(kind.listing(), capture_output=True, text=True, check=False)
    names = kind.names(listed.stdout)
    if not names:
        print(listed.stdout + listed.stderr)
        raise SystemExit("no tests")
    print(f"{len(names)} tests", flush=True)
    if options.list:
        print("\n".join(names))
        return
    run = Run(kind, names, options.json, options.seconds)
    # Several for each worker, since tests take different times.
    run.of_a_process = min(MOST_OF_A_PROCESS, -(-len(names) // (3 * options.jobs)))
    if options.jobs == 1:
        run.of_a_process = MOST_OF_A_PROCESS
    with ThreadPoolExecutor(options.jobs) as pool:
        for worker in [pool.submit(run.work, options.timeout) for _ in range(options.jobs)]:
            worker.result()
    print(summary(run))
    if run.left or any(result not in GOOD for result in run.results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
