"""Mutation testing: do the tests notice a fault in the library?

    make test-mutants                               all of mutants.txt
    python tests_cpp/mutants/run.py --list
    python tests_cpp/mutants/run.py --only cell-tanh-near,py-cell-state

Every mutant of mutants.txt, which says how it is written down, is applied to a copy of the tree in
build/mutants/src, built in build/mutants/build, and given to the tests that are likely to fail,
then to all that `make test` runs but those of the package. It is killed by a test that fails,
crashes or hangs; one that passes them all has survived. The tree without a mutant goes first and
has to pass. What was found stands in build/mutants/results.json: a mutant that was killed is not
tried again until the library or the mutant changes.

Needs what `make test` leaves in .venv/, and takes hours from nothing, since most mutants mean
compiling something.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")

# ctest's part of the quick suite. What installs the package or looks into the binaries sees no
# arithmetic, and takes a while.
CTEST = ["--label-exclude", "slow", "--exclude-regex", "^(consumer|symbols)"]
# pytest's part, less what is about the wheel, of which the package that is put together here has
# the files only.
PYTEST = ["--ignore=tests_py/test_package.py", "--ignore=tests_py/test_cuda_build.py"]
PROGRAMS = (
    "lltm_kernel_tests",
    "lltm_tests",
    "lltm_cuda_host_tests",
    "lltm_cuda_host_lstm_tests",
    "lltm_lstm_tests",
    "lltm_engine_tests",
)
# The programs of ctest's tests, where it is not lltm_tests.
PROGRAM_OF = {
    "cell_math": "lltm_kernel_tests",
    "bf16x3": "lltm_kernel_tests",
    "schedule": "lltm_kernel_tests",
    "operators.emulated_amx": "lltm_emulated_tests",
    "engines": "lltm_engine_tests",
    "engines.emulated_amx": "lltm_engine_tests",
    "lstm": "lltm_lstm_tests",
    "lstm.emulated_amx": "lltm_lstm_tests",
    "cuda_on_host_lstm": "lltm_cuda_host_lstm_tests",
    "cuda_on_host.tsan": "lltm_persistent_tsan_tests",
}

Result = dict[str, Any]


def stop(*text: object) -> NoReturn:
    sys.exit(" ".join(["mutants:", *map(str, text)]))


# ---- the list ---------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str
    fault: str
    tests: tuple[str, ...]  # to run first
    old: tuple[str, ...]  # whole lines
    new: tuple[str, ...]

    @property
    def python(self) -> bool:
        return self.file.endswith(".py")

    def places(self, lines: Sequence[str]) -> list[int]:
        """Where in the file's lines `old` stands: in one place, as check_places() sees to."""
        size = len(self.old)
        return [n for n in range(len(lines) - size + 1) if tuple(lines[n : n + size]) == self.old]

    def apply(self, path: Path) -> None:
        lines = path.read_text().split("\n")
        place = self.places(lines)[0]
        lines[place : place + len(self.old)] = self.new
        path.write_text("\n".join(lines))


def read_list(path: Path) -> list[Mutant]:
    blocks: list[list[str]] = [[]]
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    mutants = [parse(block) for block in blocks if block]
    ids = [mutant.id for mutant in mutants]
    for twice in {id for id in ids if ids.count(id) > 1}:
        stop(f"{twice}: two mutants of that name")
    return mutants


def check_places(mutants: Sequence[Mutant]) -> None:
    """Stops if the lines of any mutant don't stand in its file exactly once; names all of these."""
    wrong: list[str] = []
    for mutant in mutants:
        path = ROOT / mutant.file
        lines = path.read_text().split("\n") if path.exists() else []
        found = len(mutant.places(lines))
        if found != 1:
            wrong.append(f"{mutant.id}: its lines stand {found} times in {mutant.file}, not once")
    if wrong:
        stop("\n".join(wrong))


def parse(block: list[str]) -> Mutant:
    fields: dict[str, str] = {}
    keys = ("mutant", "file", "fault", "tests")
    for key, line in zip(keys, block, strict=False):
        name, _, value = line.partition(" ")
        if name != key or not value.strip():
            stop(f"expected a line that begins with {key!r}, got {line!r}")
        fields[key] = value.strip()
    old: list[str] = []
    new: list[str] = []
    for line in block[len(keys) :]:
        if line[0] not in " +-":
            stop(f"{fields['mutant']}: expected a line that begins with ' ', - or +, got {line!r}")
        if line[0] != "+":
            old.append(line[1:])
        if line[0] != "-":
            new.append(line[1:])
    if old == new:
        stop(f"{fields['mutant']}: changes nothing")
    tests = tuple(test.strip() for test in fields["tests"].split(";"))
    return Mutant(fields["mutant"], fields["file"], fields["fault"], tests, tuple(old), tuple(new))


# ---- running tests ----------------------------------------------------------


class Workplace:
    """A copy of the tree, its build, and the package put together from both."""

    def __init__(self, folder: Path, jobs: int, timeout: int) -> None:
        self.source = folder / "src"
        self.build = folder / "build"
        self.site = folder / "site"
        self.jobs = jobs
        self.timeout = timeout
        self.environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(self.site),
            # What is written back within a second, of the same length, is the same to it.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *command: str | Path, timeout: int | None = None) -> tuple[int | None, str]:
        """The exit status, None for a command that was stopped, and what it wrote."""
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.source,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output

    def need(self, *command: str | Path) -> None:
        status, output = self.run(*command)
        if status != 0:
            print(output[-8000:])
            stop("failed:", *command)

    def copy_tree(self) -> None:
        """Brings src/ up to date; what has not changed keeps its time."""
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        wanted = {self.source / name: ROOT / name for name in files if (ROOT / name).is_file()}
        for path in self.source.rglob("*") if self.source.exists() else ():
            if path.is_file() and path not in wanted:
                path.unlink()
        for path, original in wanted.items():
            if not path.exists() or path.read_bytes() != original.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(original, path)
                shutil.copymode(original, path)

    def configure(self) -> None:
        self.need(
            *("cmake", "-S", self.source, "-B", self.build, "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            # The kernels and the tests have levels of their own.
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
            "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON",
            *("-DLLTM_TESTS=ON", "-DLLTM_PYTHON=ON"),
            f"-DPython_EXECUTABLE={sys.executable}",
        )

    def compile(self, *targets: str) -> str | None:
        """What the compiler wrote if it failed."""
        command = ["cmake", "--build", str(self.build), "--parallel", str(self.jobs)]
        for target in targets:
            command += ["--target", target]
        status, output = self.run(*command)
        return None if status == 0 else output

    def install(self) -> None:
        """The package, without pip."""
        self.need(
            *("cmake", "--install", self.build, "--component", "python"),
            *("--prefix", self.site / "lltm"),
        )

    def check_import(self) -> None:
        """That what pytest will import is the copy."""
        status, output = self.run(sys.executable, "-c", "import lltm; print(lltm.__file__)")
        if status != 0 or not output.strip().startswith(str(self.site)):
            stop("expected lltm to be imported from", self.site, "but got", output.strip())

    def test(self, spec: str) -> str | None:
        """Runs `spec` of the list; returns what failed."""
        name, _, rest = spec.partition(" ")
        if name == "pytest":
            return self.pytest(shlex.split(rest))
        if name in PROGRAMS:
            command = [str(self.build / "tests_cpp" / name), "--gtest_brief=1"]
            command += ["--gtest_fail_fast", f"--gtest_filter={rest or '*'}"]
            status, output = self.run(*command, timeout=self.timeout)
            if "Running 0 tests" in output or "0 tests from 0 test suites" in output:
                stop(f"no test is called {spec!r}")
            return self.failure(status, output, "[  FAILED  ] ", spec)
        ctest = ["ctest", "--test-dir", str(self.build), "--output-on-failure", "--no-tests=error"]
        status, output = self.run(*ctest, "--tests-regex", f"^{name}$", timeout=self.timeout)
        if "No tests were found" in output:
            stop(f"no test is called {spec!r}")
        return self.failure(status, output, "[  FAILED  ] ", spec)

    def test_natively(self) -> str | None:
        ctest = ["ctest", "--test-dir", str(self.build), "--output-on-failure", "--no-tests=error"]
        ctest += ["--stop-on-failure", "--parallel", str(self.jobs), *CTEST]
        status, output = self.run(*ctest, timeout=4 * self.timeout)
        return self.failure(status, output, "[  FAILED  ] ", "ctest")

    def pytest(self, arguments: Sequence[str] = ()) -> str | None:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        if arguments:
            status, output = self.run(*command, *arguments, timeout=self.timeout)
        else:
            workers = ["--numprocesses", str(self.jobs)] if self.jobs > 1 else []
            status, output = self.run(*command, *workers, *PYTEST, timeout=4 * self.timeout)
        if status == 5:
            stop("no test is called", "pytest", *arguments)
        return self.failure(status, output, "FAILED ", "pytest")

    @staticmethod
    def failure(status: int | None, output: str, marker: str, command: str) -> str | None:
        if status == 0:
            return None
        if status is None:
            return f"{command}: hangs"
        program = command.partition(" ")[0]
        for line in output.splitlines():
            name = line.removeprefix(marker)
            if name != line and "listed below" not in name:
                return f"{program}: {name.split(', where')[0].split(' - ')[0].strip()}"
        return f"{command}: exit status {status}"


# ---- mutants ----------------------------------------------------------------


def digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(str(path).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def digest_of_library() -> str:
    folders = [ROOT / "cpp", ROOT / "python"]
    suffixes = (".cpp", ".h", ".in", ".py", ".txt")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    return digest([ROOT / "CMakeLists.txt", *files])


def targets(tests: Sequence[str]) -> list[str]:
    """What to build for these tests."""
    found = {"lltm"}
    for test in tests:
        name = test.partition(" ")[0]
        if name == "pytest":
            found.add("_C")
        else:
            found.add(name if name in PROGRAMS else PROGRAM_OF.get(name, "lltm_tests"))
    # The kernels alone need no library.
    return sorted(found - {"lltm"} if found <= {"lltm", "lltm_kernel_tests"} else found)


def first_failure(place: Workplace, mutant: Mutant, quick: bool) -> str | None:
    """Of the mutated tree: what fails first, None if nothing does."""

    def build(*names: str) -> None:
        # For a mutant in Python too, whose library is not to be that of the mutant before.
        errors = place.compile(*names)
        if errors is not None:
            print(errors[-4000:])
            stop(f"{mutant.id}: does not compile")

    if not mutant.python:
        build(*targets(mutant.tests))
    installed = False
    for test in mutant.tests:
        if test.startswith("pytest") and not installed:
            build("lltm", "_C")
            place.install()
            installed = True
        found = place.test(test)
        if found is not None:
            return found
    if quick:
        return None
    if not mutant.python:
        build("all")
        found = place.test_natively()
        if found is not None:
            return found
    if not installed:
        build("lltm", "_C")
        place.install()
    return place.pytest()


def try_mutant(place: Workplace, mutant: Mutant, quick: bool) -> Result:
    path = place.source / mutant.file
    original = path.read_text()
    began = time.monotonic()
    try:
        mutant.apply(path)
        found = first_failure(place, mutant, quick)
    finally:
        # With the time of now, so that it is compiled anew; ccache has it.
        path.write_text(original)
    seconds = round(time.monotonic() - began)
    return {"status": "survived" if found is None else "killed", "by": found, "seconds": seconds}


def check_baseline(place: Workplace, python_only: bool) -> None:
    """Everything that is to find the mutants passes without one."""
    errors = place.compile("lltm", "_C") if python_only else place.compile("all")
    if errors is not None:
        print(errors[-4000:])
        stop("the tree does not compile")
    place.install()
    place.check_import()
    failures = [place.pytest()] if python_only else [place.test_natively(), place.pytest()]
    for found in failures:
        if found is not None:
            stop("without a mutant, this fails:", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--only", metavar="ID,ID", help="these mutants")
    parser.add_argument("--again", action="store_true", help="those too that were killed before")
    parser.add_argument("--quick", action="store_true", help="run what is likely to fail only")
    parser.add_argument("--no-baseline", action="store_true", help="trust the tree to pass")
    parser.add_argument(
        "--jobs", type=int, default=1, help="for compiling and testing (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=int, default=300, help="seconds for the first tests; four times for all"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutants")
    options = parser.parse_args()

    mutants = read_list(LIST)
    check_places(mutants)
    if options.only:
        names = options.only.split(",")
        unknown = set(names) - {mutant.id for mutant in mutants}
        if unknown:
            stop("no such mutant:", *sorted(unknown))
        mutants = [mutant for mutant in mutants if mutant.id in names]
    if options.list:
        width = max(len(mutant.id) for mutant in mutants)
        for mutant in mutants:
            print(f"{mutant.id:{width}}  {mutant.file}: {mutant.fault}")
        print(len(mutants), "mutants")
        return

    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    results: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}
    library = digest_of_library()

    def key(mutant: Mutant) -> str:
        text = repr((library, mutant.file, mutant.old, mutant.new))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_known(mutant: Mutant) -> bool:
        known = results.get(mutant.id, {})
        return known.get("status") == "killed" and known.get("key") == key(mutant)

    pending = [mutant for mutant in mutants if options.again or not is_known(mutant)]
    if pending:
        place = Workplace(folder, options.jobs, options.timeout)
        place.copy_tree()
        place.configure()
        if options.no_baseline:
            errors = place.compile("lltm", "_C")
            if errors is not None:
                stop("the tree does not compile")
            place.install()
            place.check_import()
        else:
            print("without a mutant ...", flush=True)
            check_baseline(place, all(mutant.python for mutant in pending))
        for count, mutant in enumerate(pending, 1):
            result = {**try_mutant(place, mutant, options.quick), "key": key(mutant)}
            results[mutant.id] = result
            path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
            print(
                f"[{count}/{len(pending)}] {mutant.id}: {result['status']}"
                f"{' by ' + result['by'] if result['by'] else ''} ({result['seconds']} s)",
                flush=True,
            )
        place.install()

    survivors = [mutant for mutant in mutants if results[mutant.id]["status"] != "killed"]
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors)} killed")
    for mutant in survivors:
        print(f"survived: {mutant.id}, {mutant.file}: {mutant.fault}")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
