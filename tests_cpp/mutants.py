"""Mutation testing: do the tests notice a fault in the library?

    make test-mutants                                40 mutants by chance
    python tests_cpp/mutants.py --seed 7 --count 5   others; the same ones again by the same seed
    python tests_cpp/mutants.py --list --count 20    what would be tried

A mutant is the tree with one small fault: an operator, a constant, a type or an argument
exchanged, a condition negated or decided, a statement left out. The fault stands in any place of
the C++ that the build compiles and of the Python package, each as likely as the other; where no
test goes, it survives, and rightly so. It is made in a copy of the tree in build/mutants/ with a
build of its own, and given to `ctest` and then to `pytest`. A test that fails, crashes or takes
too long has killed it. What does not compile is no mutant, nor what compiles to the same objects;
others are drawn in their place. The diff of each survivor is printed: a test is missing, or the
fault changes nothing that anyone may rely on, such as a schedule.

Fails where more than SURVIVORS survive. Needs what `make test` leaves in .venv/.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cpp/src", "python/lltm")
# The largest share of mutants that may survive: some change speed alone.
SURVIVORS = 0.3

# Of ctest and pytest, what sees neither arithmetic nor arguments: packages, documents, benchmarks.
CTEST = ["--label-exclude", "slow", "--exclude-regex", "^(consumer|symbols)"]
NO_PYTEST = ("package", "cuda_build", "docs", "native", "mutants", "bench_cuda", "first_contact")


def stop(*text: object) -> NoReturn:
    sys.exit(" ".join(["mutants:", *map(str, text)]))


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


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def mask_cpp(text: str) -> str:
    """The text without comments, strings, directives and what ends in them; of equal length."""
    skipped = re.compile(
        r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
        r"|^[ ]*#(?:[^\n]*\\\n)*[^\n]*|\bstatic_assert\([^;]*;",
        re.DOTALL | re.MULTILINE,
    )
    return skipped.sub(lambda match: blank(match[0]), text)


class Source:
    """Python, and where its nodes stand in the text; ast counts columns in bytes."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.nodes = list(ast.walk(ast.parse(text)))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        ends = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        begin, end = (
            self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())
            for line, column in ends
        )
        return begin, end


def mask_python(text: str, source: Source) -> str:
    """The text without comments, strings and types; of equal length."""
    spans: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            begin, end = (source.starts[line - 1] + at for line, at in (token.start, token.end))
            spans.append((begin, end))
    for node in source.nodes:
        types: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef):
            types = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            types = [node.annotation]
        spans += [source.span(part) for part in types if part is not None]
    masked = list(text)
    for begin, end in spans:
        masked[begin:end] = blank(text[begin:end])
    return "".join(masked)


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
    masked = mask_cpp(text)
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


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", n=2, lineterm=""
    )
    return "\n".join(lines)


# ---- the copy ---------------------------------------------------------------


class Workplace:
    """A copy of the tree, its build, and the package put together from both."""

    def __init__(self, folder: Path, jobs: int, limit: int) -> None:
        self.source, self.build, self.site = (folder / name for name in ("src", "build", "site"))
        self.jobs = str(jobs)
        self.limit = limit
        self.objects: dict[Path, str] = {}
        self.environment = {
            **os.environ,
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
            print(output[-8000:])
            stop("failed:", *command)
        return output

    def prepare(self) -> None:
        """Brings the copy up to date, and builds it; what has not changed keeps its time."""
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        wanted = [Path(name) for name in names.split("\0") if (ROOT / name).is_file()]
        for path in self.source.rglob("*") if self.source.exists() else ():
            if path.is_file() and path.relative_to(self.source) not in wanted:
                path.unlink()
        for name in wanted:
            original, path = ROOT / name, self.source / name
            if not path.exists() or path.read_bytes() != original.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(original, path)
        self.need(
            *("cmake", "-S", self.source, "-B", self.build, "-G", "Ninja"),
            # The kernels and the tests have levels of their own.
            *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"),
            *("-DCMAKE_LINK_DEPENDS_NO_SHARED=ON", "-DLLTM_TESTS=ON", "-DLLTM_PYTHON=ON"),
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        self.need(*self.compile())
        self.objects = {path: self.digest(path) for path in self.build.rglob("*.o")}

    def compile(self) -> list[str]:
        return ["cmake", "--build", str(self.build), "--parallel", self.jobs]

    @staticmethod
    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def files(self, folders: list[str]) -> list[Path]:
        """Of these folders, what is Python or read by the compiler."""
        inputs = self.need("ninja", "-C", self.build, "-t", "deps")
        read = {(self.build / name).resolve() for name in re.findall(r"^ +(.*)$", inputs, re.M)}
        files = [path for name in folders for path in sorted((self.source / name).rglob("*"))]
        return [path for path in files if path.suffix == ".py" or path.resolve() in read]

    def first_failure(self) -> str | None:
        """Of all tests that `make test` runs, what fails first."""
        package = ["--component", "python", "--prefix", self.site / "lltm"]
        self.need("cmake", "--install", self.build, *package)
        ctest = ["ctest", "--test-dir", str(self.build), "--output-on-failure", "--no-tests=error"]
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        pytest += ["--numprocesses", self.jobs] if int(self.jobs) > 1 else []
        pytest += [f"--ignore=tests_py/test_{name}.py" for name in NO_PYTEST]
        ctest += ["--stop-on-failure", "--parallel", self.jobs, *CTEST]
        for command in (ctest, pytest):
            status, output = self.run(*command, limit=self.limit)
            if status is None:
                return "the time limit"
            if status != 0:
                found = re.search(r"^(?:\[  FAILED  \]|FAILED|ERROR) (\S+)", output, re.M)
                return found[1].rstrip(",") if found else output[-300:]
        return None

    def is_mutant(self, path: Path) -> bool:
        """Whether the tree with the fault compiles, to anything else."""
        if path.suffix == ".py":
            return parses(path.read_text())
        status, _ = self.run(*self.compile(), limit=self.limit)
        return status == 0 and any(self.digest(of) != was for of, was in self.objects.items())

    def try_fault(self, path: Path, fault: Fault) -> str | None:
        """What killed it, None if nothing did; "" for what is no mutant."""
        original = path.read_text()
        try:
            path.write_text(fault.apply(original))
            return self.first_failure() if self.is_mutant(path) else ""
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
    parser.add_argument("--list", action="store_true", help="show mutants and stop")
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), help="where faults are made")
    options = parser.parse_args()
    print(f"mutants: seed {options.seed}", flush=True)

    place = Workplace(ROOT / "build/mutants", options.jobs, options.limit)
    place.prepare()
    texts = {path: path.read_text() for path in place.files(options.folders)}
    if not options.list and (found := place.first_failure()) is not None:
        stop("without a mutant, this fails:", found)

    survivors: list[str] = []
    tried = 0
    for path, fault in draw(texts, options.seed):
        began = time.monotonic()
        killer = "nothing yet" if options.list else place.try_fault(path, fault)
        if killer == "":
            continue
        tried += 1
        name = str(path.relative_to(place.source))
        where = f"{name}:{texts[path].count(chr(10), 0, fault.begin) + 1}"
        result = f"killed by {killer}" if killer else "survived"
        seconds = time.monotonic() - began
        print(f"[{tried}/{options.count}] {where}, {fault.kind}: {result} ({seconds:.0f} s)")
        if killer is None or options.list:
            print(diff(name, texts[path], fault.apply(texts[path])))
        sys.stdout.flush()
        survivors += [where] if killer is None else []
        if tried == options.count:
            break
    if not options.list:
        print(f"mutants: {len(survivors)} of {tried} survived:", *survivors)
        sys.exit(len(survivors) > SURVIVORS * tried)


if __name__ == "__main__":
    main()
