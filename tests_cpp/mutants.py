"""Mutation testing: do the tests notice a fault in the library?

    make test-mutants                                40 faults by chance
    python tests_cpp/mutants.py --seed 7 --count 5   those of a seed, as far as the tree is the same
    python tests_cpp/mutants.py cpp/src/cell         of a folder

A mutant is the tree with one fault: an operator, a constant, a type or two arguments exchanged, a
condition negated or decided, a statement left out; in any place of the C++ that the build compiles
and of the Python package, each place as likely as the other. It is made in a copy of the tree in
build/mutants/ with a build of its own. A test that fails, crashes or takes too long has killed it;
of the tests those run that use what was linked anew, the quickest first. What does not compile, or
to the same programs and libraries, is no mutant; another is drawn. The diff of each
survivor is printed: a test is missing, or the fault changes nothing that anyone may rely on, such
as a schedule. Fails where more than SURVIVORS survive. Needs what `make test` leaves in .venv/.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
# The largest share of mutants that may survive: some change speed alone.
SURVIVORS = 0.3

# What `make test` runs, but for tests of packages, builds and binaries, of which the copy has none.
CTEST = ["--label-exclude", "slow", "--exclude-regex", "^(consumer|subproject|symbols)"]
NO_PYTEST = {"test_package.py", "test_cuda_build.py", "test_mutants.py"}
# What is installed beside the Python files.
PACKAGE = ("lltm_wheel", "_C")


# ---- faults -----------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`new` in the place of text[begin:end]."""

    kind: str
    begin: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.end :]


# Operators have spaces around them, as clang-format and ruff leave them; so those of templates,
# pointers and defaults of arguments are others.
EXCHANGES = {
    "arithmetic": {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "+=": "-="},
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "logic": {"&&": "||", "||": "&&", "and": "or", "or": "and", "&": "|", "|": "&", "in": "not in"},
}
WORDS = {
    "constant": {"true": "false", "false": "true", "True": "False", "False": "True"},
    # What is accumulated, or counted, in fewer bits.
    "type": {"double": "float", "int64_t": "int32_t"},
}
NUMBER = re.compile(r"(?<![\w.\"'])\d+(?![\w.\"'])")
ARGUMENTS = re.compile(r"(?:(?<=\()|(?<=, ))(\w[\w.]*), (\w[\w.]*)(?=[,)])")
CONDITION = re.compile(r"\bif \(")
# A call or an assignment: no declaration, which would not compile.
STATEMENT = re.compile(
    r"(?<=[;{}]\n) *((?!(?:return|using|typedef|namespace|template|break|continue|case|default|"
    r"delete|else|friend|public|private|goto)\b)"
    r"(?:if \(.*\) )?[\w:.\[\]>*(&-]+(?:\(| [-+*/|&]?= |\+\+|--)[^;{}]*;)(?=\n)"
)


# Comments, strings, directives and assertions of the compiler.
SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    r"|^[ ]*#(?:[^\n]*\\\n)*[^\n]*|\bstatic_assert\([^;]*;",
    re.DOTALL | re.MULTILINE,
)


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


class Source:
    """Python, and where its nodes stand in the text; ast counts columns in bytes."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.nodes = list(ast.walk(ast.parse(text)))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end = node.end_lineno or 0, node.end_col_offset or 0
        return self.place(node.lineno, node.col_offset), self.place(*end)

    def place(self, line: int, column: int) -> int:
        text = self.lines[line - 1]
        return sum(map(len, self.lines[: line - 1])) + len(text.encode()[:column].decode())


def mask_python(text: str, source: Source) -> str:
    """The text without comments, strings, types and decorators; of equal length."""
    starts = [source.place(line, 0) for line in range(1, len(source.lines) + 1)]
    spans = [
        (starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1])
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING)
    ]
    for node in source.nodes:
        masked: list[ast.expr | None] = list(getattr(node, "decorator_list", []))
        masked += [getattr(node, "returns", None), getattr(node, "annotation", None)]
        spans += [source.span(part) for part in masked if part is not None]
    for begin, end in spans:
        text = text[:begin] + blank(text[begin:end]) + text[end:]
    return text


def closing(text: str, begin: int) -> int:
    """Where the parenthesis closes that opens at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError("a parenthesis does not close")


def common_faults(masked: str) -> Iterator[Fault]:
    for kind, table in EXCHANGES.items():
        for old, new in table.items():
            for match in re.finditer(rf"(?<= ){re.escape(old)}(?=[ \n])", masked):
                yield Fault(kind, *match.span(), new)
    for kind, table in WORDS.items():
        for old, new in table.items():
            for match in re.finditer(rf"(?<![\w:]){old}\b", masked):
                yield Fault(kind, *match.span(), new)
    for match in NUMBER.finditer(masked):
        for number in (int(match[0]) + 1, int(match[0]) - 1):
            if number >= 0:
                yield Fault("constant", *match.span(), str(number))
    for match in ARGUMENTS.finditer(masked):
        if match[1] != match[2]:
            yield Fault("arguments", *match.span(), f"{match[2]}, {match[1]}")


def cpp_faults(text: str) -> Iterator[Fault]:
    masked = SKIPPED.sub(lambda match: blank(match[0]), text)
    yield from common_faults(masked)
    for match in CONDITION.finditer(masked):
        end = closing(masked, match.end() - 1)
        condition = text[match.end() : end]
        for new in (f"!({condition})", f"false && ({condition})", f"true || ({condition})"):
            yield Fault("condition", match.end(), end, new)
    for match in STATEMENT.finditer(masked):
        if match[1].count("(") == match[1].count(")"):
            yield Fault("statement", *match.span(1), ";")


def python_faults(text: str) -> Iterator[Fault]:
    source = Source(text)
    yield from common_faults(mask_python(text, source))
    for node in source.nodes:
        if isinstance(node, (ast.If, ast.IfExp)):
            begin, end = source.span(node.test)
            condition = text[begin:end]
            for new in (f"not ({condition})", f"False and ({condition})", f"True or ({condition})"):
                yield Fault("condition", begin, end, new)
        # Of assignments those to an attribute or an element: others name what is then missing.
        if (
            isinstance(node, (ast.AugAssign, ast.Raise))
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name))
        ):
            yield Fault("statement", *source.span(node), "pass")


def faults_of(path: Path, text: str) -> list[Fault]:
    return list(python_faults(text) if path.suffix == ".py" else cpp_faults(text))


# ---- the copy ---------------------------------------------------------------


class Workplace:
    """A copy of the tree, its build, and the package put together from both."""

    def __init__(self, folder: Path, jobs: int, limit: int) -> None:
        self.source, self.build, self.site = (folder / name for name in ("src", "build", "site"))
        self.jobs, self.limit = str(jobs), limit
        # Of ctest: by name the program that a test runs, if it is one of the build.
        self.programs: dict[str, Path] = {}
        self.linked: dict[Path, bytes] = {}
        self.inverted_costs = ""
        self.files_of_pytest: list[str] = []
        self.environment = {
            **os.environ,
            "GTEST_FAIL_FAST": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(self.site),
            # Files that are written back within a second, of equal length, are the same to it.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *command: str | Path, limit: int | None = None) -> tuple[int | None, str]:
        """The exit status, None for a command that took too long, and what it wrote."""
        with subprocess.Popen(
            list(map(str, command)),
            cwd=self.source,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, process.communicate()[0]
        return process.returncode, output

    def need(self, *command: str | Path) -> str:
        status, output = self.run(*command)
        if status != 0:
            sys.exit(f"{output[-8000:]}\nmutants: failed: {' '.join(map(str, command))}")
        return output

    def prepare(self) -> None:
        """Copies the tree as it is and builds it; again by ccache, whatever was left of a fault."""
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        shutil.rmtree(self.source, ignore_errors=True)
        for name in names.split("\0"):
            if (ROOT / name).is_file():
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.source / name)
        self.files_of_pytest = [
            f"tests_py/{path.name}"
            for path in sorted((self.source / "tests_py").glob("test_*.py"))
            if path.name not in NO_PYTEST
        ]
        self.need(
            *("cmake", "-S", self.source, "-B", self.build, "-G", "Ninja"),
            # The kernels and the tests have levels of their own.
            *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"),
            # A fault in a file of the library compiles that alone; the tests are in few files.
            *("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=1"),
            *("-DCMAKE_LINK_DEPENDS_NO_SHARED=ON", "-DLLTM_TESTS=ON", "-DLLTM_PYTHON=ON"),
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        self.need(*self.compile())
        tests = json.loads(self.need(*self.ctest(), "--show-only=json-v1"))["tests"]
        self.programs = {test["name"]: Path(test["command"][0]) for test in tests}
        self.linked = self.digests()

    def compile(self) -> list[str]:
        """Of the programs those that `make test` runs: no fuzzers, no benchmarks."""
        text = (self.build / "tests_cpp/CTestTestfile.cmake").read_text()
        programs = {name for name in re.findall(r"/(lltm_\w*tests)\b", text) if "tsan" not in name}
        targets = ["--target", *PACKAGE, *sorted(programs)]
        return ["cmake", "--build", str(self.build), "--parallel", self.jobs, *targets]

    def ctest(self) -> list[str]:
        return ["ctest", "--test-dir", str(self.build), "--no-tests=error", *CTEST]

    def digests(self) -> dict[Path, bytes]:
        """Of the libraries and programs."""
        found = {*self.build.rglob("*.so*"), *self.programs.values()}
        made = (path for path in found if self.build in path.parents and not path.is_symlink())
        return {path: hashlib.sha256(path.read_bytes()).digest() for path in made}

    def changed(self) -> set[Path]:
        return {path for path, digest in self.digests().items() if digest != self.linked[path]}

    def files(self, folders: list[str]) -> list[Path]:
        """Of these folders, what is Python or read by the compiler."""
        inputs = self.need("ninja", "-C", self.build, "-t", "deps")
        read = {(self.build / name).resolve() for name in re.findall(r"^ +(.*)$", inputs, re.M)}
        files = [path for name in folders for path in sorted((self.source / name).rglob("*"))]
        return [path for path in files if path.suffix == ".py" or path.resolve() in read]

    def find_quickest(self) -> None:
        """Runs all tests, which pass, to see how long each takes."""
        if (found := self.first_failure(set(self.linked))) is not None:
            sys.exit(f"mutants: without a fault, this fails: {found}")
        # What took longest begins first, as far as ctest knows.
        lines = self.costs().read_text().partition("---")[0].splitlines()
        for name, _, cost in map(str.split, lines):
            self.inverted_costs += f"{name} 1 {1 / (float(cost) + 0.01)}\n"
        seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(self.junit()).iter("testcase"):
            file = case.get("classname", "").replace(".Test", "/Test").partition("/")[0]
            seconds[file.replace(".", "/") + ".py"] += float(case.get("time", 0))
        self.files_of_pytest.sort(key=lambda name: seconds[name])

    def costs(self) -> Path:
        return self.build / "Testing/Temporary/CTestCostData.txt"

    def junit(self) -> Path:
        return self.build / "pytest.xml"

    def first_failure(self, changed: set[Path]) -> str | None:
        """Of the tests that use what has changed, or the Python files, what fails first."""
        package = ["--component", "python", "--prefix", str(self.site / "lltm")]
        self.need("cmake", "--install", self.build, *package)
        ctest = [*self.ctest(), "--output-on-failure", "--stop-on-failure", "--parallel", self.jobs]
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        pytest += [f"--junit-xml={self.junit()}", *self.files_of_pytest]
        pytest += ["--numprocesses", self.jobs] if int(self.jobs) > 1 else []
        commands = [ctest, pytest]
        if not any(path.name.startswith("liblltm.so") for path in changed):
            # What the package does not have: of it no test but those of these programs knows.
            names = [name for name, path in self.programs.items() if path in changed]
            commands = [[*ctest, "--tests-regex", f"^({'|'.join(map(re.escape, names))})$"]]
        if not changed:
            commands = [pytest]
        if self.inverted_costs:
            self.costs().write_text(f"{self.inverted_costs}---\n")
        for command in commands:
            status, output = self.run(*command, limit=self.limit)
            if status is None:
                return "the time limit"
            if status != 0:
                found = re.search(r"^(?:\[  FAILED  \]|FAILED|ERROR) (\S+)", output, re.M)
                return found[1].rstrip(",") if found else output[-300:]
        return None

    def try_fault(self, path: Path, fault: Fault) -> str | None:
        """What killed it, None if nothing did; "" for what is no mutant."""
        original = path.read_text()
        try:
            text = fault.apply(original)
            path.write_text(text)
            if path.suffix == ".py":
                ast.parse(text)
            # For a fault in Python too, or the library would be that of the fault before.
            status, _ = self.run(*self.compile(), limit=self.limit)
            changed = self.changed() if status == 0 else set()
            if status != 0 or not (changed or path.suffix == ".py"):
                return ""
            return self.first_failure(changed)
        except SyntaxError:
            return ""
        finally:
            # With the time of now, so that it is compiled anew; ccache has it.
            path.write_text(original)


def draw(texts: dict[Path, str], seed: int) -> Iterator[tuple[Path, Fault]]:
    """One fault of each place, in any order."""
    places: dict[tuple[Path, int], list[Fault]] = {}
    for path, text in texts.items():
        for fault in faults_of(path, text):
            places.setdefault((path, fault.begin), []).append(fault)
    chance = random.Random(seed)
    for path, begin in chance.sample(sorted(places), len(places)):
        yield path, chance.choice(places[path, begin])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=1, help="for compiling and testing")
    parser.add_argument("--limit", type=int, default=1800, help="seconds for each of the tests")
    parser.add_argument("folders", nargs="*", default=["cpp/src", "python/lltm"])
    options = parser.parse_args()
    print(f"mutants: seed {options.seed}", flush=True)

    began = time.monotonic()
    place = Workplace(ROOT / "build/mutants", options.jobs, options.limit)
    place.prepare()
    texts = {path: path.read_text() for path in place.files(options.folders)}
    place.find_quickest()
    print(f"mutants: built and tested in {time.monotonic() - began:.0f} s", flush=True)

    survivors: list[str] = []
    tried = 0
    for path, fault in draw(texts, options.seed):
        began = time.monotonic()
        killer = place.try_fault(path, fault)
        if killer == "":
            continue
        tried += 1
        name = str(path.relative_to(place.source))
        where = f"{name}:{texts[path].count(chr(10), 0, fault.begin) + 1}"
        result = f"killed by {killer}" if killer else "survived"
        result += f" ({time.monotonic() - began:.0f} s)"
        print(f"[{tried}/{options.count}] {where}, {fault.kind}: {result}")
        if killer is None:
            survivors.append(where)
            lines = texts[path].splitlines(), fault.apply(texts[path]).splitlines()
            print(*difflib.unified_diff(*lines, name, name, n=2, lineterm=""), sep="\n")
        sys.stdout.flush()
        if tried == options.count:
            break
    print(f"mutants: {len(survivors)} of {tried} survived:", *survivors)
    sys.exit(len(survivors) > SURVIVORS * tried)


if __name__ == "__main__":
    main()
