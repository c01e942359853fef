"""Mutation testing: do the tests detect bugs in the library?

    make test-mutants                                40 random mutations
    python tests_cpp/mutants.py --seed 7 --count 5   repeatable for an unchanged tree
    python tests_cpp/mutants.py cpp/src/cell         only in a folder

A mutation exchanges an operator, constant, type or two arguments, fixes a condition or deletes a
statement, in a copy of the tree in build/mutants/. A test that fails, crashes or times out kills
the mutant. Mutants that do not compile or leave all binaries unchanged do not count. Survivors are
printed: a test is missing, or the mutation changes only unspecified behavior, such as a schedule.
Fails if the share of survivors exceeds SURVIVORS.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"  # the tree, its build and package
SURVIVORS = 0.3  # maximum share: some mutations change only speed
LIMIT = "1800"  # seconds for a command
JOBS = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1")


class Fault(NamedTuple):
    begin: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.end :]


# Formatted binary operators have spaces around them, unlike templates, pointers and default
# arguments. Types are replaced by types with fewer bits.
EXCHANGED = re.compile(
    r"(?<= )(?:[-+*/%<>]|//|\+=|[<>=!]=|&&|\|\||and|or)(?=\s)"
    r"|(?<![\w:])(?:true|false|True|False|double|int64_t)\b"
)
BOTH_WAYS = {"+": "-", "*": "/", "<": "<=", ">": ">=", "==": "!=", "&&": "||", "and": "or"}
BOTH_WAYS |= {"true": "false", "True": "False"}
EXCHANGES = BOTH_WAYS | {new: old for old, new in BOTH_WAYS.items()}
EXCHANGES |= {"//": "*", "%": "*", "+=": "-=", "double": "float", "int64_t": "int32_t"}
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
ARGUMENTS = re.compile(r"(?:(?<=\()|(?<=, ))(\w[\w.]*), (\w[\w.]*)(?=[,)])")


STRINGS = r"(?:\b[bfr])?\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
# Text that tests cannot check: comments, strings, directives, Python types.
CPP_SKIPPED = r"//[^\n]*|R\"(\w*)\(.*?\)\1\"|^ *#(?:[^\n]*\\\n)*[^\n]*|\bstatic_assert\([^;]*;|"
PYTHON_SKIPPED = r"\"\"\".*?\"\"\"|#[^\n]*|^ *@[^\n]*|-> [^:]*(?=:)|"
PYTHON_SKIPPED += r"(?<=\w): \w[\w.\[\], |]*(?=[,)\n]| =)|"
# A call or assignment on separate lines.
CPP_STATEMENT = (
    r"(?<=[;{}]\n) *((?!return|using|typedef|namespace|template|break|continue|case|default|delete|"
    r"else)(?:if \(.*\) )?[\w:.\[\]>*(&-]+(?:\(| [-+*/|&]?= |\+\+|--)[^;{}]*;)(?= *\n)"
)
PYTHON_STATEMENT = (
    r"(?<=[^(\[{,]\n) +((?!return|yield|assert)[\w.]+(?:\(.*\)|[.\[][^=\n]* = .*[^\s(\[{]))(?= *\n)"
)


def faults_of(path: Path, text: str) -> Iterator[Fault]:
    python = path.suffix == ".py"
    skipped = (PYTHON_SKIPPED if python else CPP_SKIPPED) + STRINGS
    code = re.sub(skipped, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)
    for match in EXCHANGED.finditer(code):
        yield Fault(*match.span(), EXCHANGES[match[0]])
    for match in NUMBER.finditer(code):
        for number in {int(match[0]) + 1, abs(int(match[0]) - 1)}:
            yield Fault(*match.span(), str(number))
    for match in ARGUMENTS.finditer(code):
        if match[1] != match[2]:
            yield Fault(*match.span(), f"{match[2]}, {match[1]}")
    condition = (
        r"^ *(?:el)?if ([^:\n]+)(?=:\n)"
        if python
        else r"\bif \(([^;{}\n]+)\)(?= \{\n| [^\n()]+;\n)"
    )
    for match in re.finditer(condition, code, re.M):
        begin, end = match.span(1)
        for new in ("not ", "False and ", "True or ") if python else ("!", "false && ", "true || "):
            yield Fault(begin, end, f"{new}({text[begin:end]})")
    for match in re.finditer(PYTHON_STATEMENT if python else CPP_STATEMENT, code):
        if match[1].count("(") == match[1].count(")"):
            yield Fault(*match.span(1), "pass" if python else ";")


# Rebuilds everything (with ccache), in case an earlier mutation remains. Kernels and tests set
# their own optimization levels. A mutation recompiles one library file; the tests are in few files.
BUILD = f"cmake --build build --parallel {JOBS}"
PREPARE = f"""rm -rf src && mkdir src &&
git -C {ROOT} ls-files -z -co --exclude-standard |
tar -C {ROOT} -c --null --ignore-failed-read -T - | tar -C src -x &&
cmake -S src -B build -G Ninja -DCMAKE_BUILD_TYPE=Release '-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG' \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=1 -DCMAKE_LINK_DEPENDS_NO_SHARED=ON \
  -DLLTM_TESTS=ON -DLLTM_PYTHON=ON -DPython_EXECUTABLE={sys.executable} && {BUILD}"""
INSTALL = "cmake --install build --component python --prefix site/lltm"
# Like `make test`, without tests of packages, builds and binaries, which the copy lacks.
CTEST = f"""ctest --test-dir build --no-tests=error --label-exclude slow --output-on-failure \
  --exclude-regex '^(consumer|subproject|symbols)' --stop-on-failure --parallel {JOBS}"""
# Tests that have killed a mutant run first.
PYTEST = f"""{sys.executable} -m pytest -x -q --failed-first --rootdir=src --numprocesses {JOBS} \
  src/tests_py --ignore-glob='*/test_package.py' --ignore-glob='*/test_cuda_build.py' \
  --ignore-glob='*/test_mutants.py'"""


def run(command: str) -> tuple[int, str]:
    """Returns the exit status (124 after a timeout) and the output."""
    # Python's cache misses changes of equal length within a second.
    environment = {"PYTHONPATH": str(COPY / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"GTEST_FAIL_FAST": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        ("timeout", "--kill-after=9", LIMIT, "bash", "-c", command),
        cwd=COPY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def linked() -> dict[Path, bytes]:
    found = [*COPY.glob("build/**/*.so*"), *COPY.glob("build/tests_cpp/lltm_*tests")]
    made = (path for path in found if not path.is_symlink())
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in made}


def first_failure(*commands: str) -> str | None:
    for command in commands:
        status, output = run(command)
        if status != 0:
            found = re.search(r"^(?:\[  FAILED  \]|FAILED|ERROR) ([^\s,]+)", output, re.M)
            return "the time limit" if status == 124 else found[1] if found else output[-1000:]
    return None


def try_fault(path: Path, fault: Fault, before: dict[Path, bytes]) -> str | None:
    """Returns the failure that killed the mutant, None if it survived, "" if it does not count."""
    original, python = path.read_text(encoding="utf-8"), path.suffix == ".py"
    try:
        path.write_text(fault.apply(original), encoding="utf-8")
        if python:
            compile(path.read_text(encoding="utf-8"), path, "exec")
        # Also for Python mutations, to restore the library after a C++ mutation.
        if run(BUILD)[0] != 0 or (not python and linked() == before):
            return ""
        return first_failure(INSTALL, *(() if python else (CTEST,)), PYTEST)
    except SyntaxError:
        return ""
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("folders", nargs="*", default=["cpp/src", "python/lltm"])
    options = parser.parse_args()
    print(f"mutants: seed {options.seed}", flush=True)
    COPY.mkdir(parents=True, exist_ok=True)
    if (found := first_failure(PREPARE, INSTALL, CTEST, PYTEST)) is not None:
        sys.exit(f"mutants: without a fault, this fails: {found}")
    before, survivors, tried = linked(), [], 0
    files = (path for name in options.folders for path in sorted((COPY / "src" / name).rglob("*")))
    sources = (path for path in files if path.suffix in (".cpp", ".h", ".py"))
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    faults = [(path, fault) for path, text in texts.items() for fault in faults_of(path, text)]
    random.Random(options.seed).shuffle(faults)
    for path, fault in faults:
        began, killer = time.monotonic(), try_fault(path, fault, before)
        if killer == "":
            continue
        tried += 1
        name, text = str(path.relative_to(COPY / "src")), texts[path]
        where = f"{name}:{text.count(chr(10), 0, fault.begin) + 1}"
        result = f"killed by {killer}" if killer else "survived"
        print(f"[{tried}/{options.count}] {where}: {result} ({time.monotonic() - began:.0f} s)")
        if killer is None:
            survivors.append(where)
            lines = text.splitlines(), fault.apply(text).splitlines()
            print(*difflib.unified_diff(*lines, name, name, n=2, lineterm=""), sep="\n")
        sys.stdout.flush()
        if tried == options.count:
            break
    print(f"mutants: {len(survivors)} of {tried} survived:", *survivors)
    sys.exit(len(survivors) > SURVIVORS * tried)


if __name__ == "__main__":
    main()
