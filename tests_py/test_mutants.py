"""Mutation testing (tests_cpp/mutants.py)."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from support import ROOT

CPP = """\
// x < y && true
int f(int n, const char* text) {
  if (n < 3 && text != nullptr) {
    log("a + b");
  }
  double sum = g(n, text) + 10;
  total_ = sum;
  return use<int>(n);
}
"""
PYTHON = '''\
def f(x: int, y: bool = True) -> int | None:
    """x < y and True"""
    if x < 3 and y:
        log("a + b")  # 1 + 1
    self.total = g(x, y) + 10
    return use(x)
'''
NUMBERS = {("3", "4"), ("3", "2"), ("10", "11"), ("10", "9"), ("<", "<="), ("+", "-")}


def decided(condition: str, *new: str) -> set[tuple[str, str]]:
    return {(condition, f"{first}({condition})") for first in new}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.cpp",
            CPP,
            {("!=", "=="), ("&&", "||"), ("double", "float"), ("n, text", "text, n")}
            | decided("n < 3 && text != nullptr", "!", "false && ", "true || ")
            | {('log("a + b");', ";"), ("total_ = sum;", ";")},
        ),
        (
            "a.py",
            PYTHON,
            {("and", "or"), ("True", "False"), ("x, y", "y, x")}
            | decided("x < 3 and y", "not ", "False and ", "True or ")
            | {('log("a + b")', "pass"), ("self.total = g(x, y) + 10", "pass")},
        ),
    ],
    ids=["cpp", "python"],
)
def test_mutations_are_these_and_exclude_comments_strings_and_types(
    name: str, text: str, expected: set[tuple[str, str]]
) -> None:
    faults = [*mutants.faults_of(Path(name), text)]
    assert {(text[fault.begin : fault.end], fault.new) for fault in faults} == expected | NUMBERS
    for fault in faults:
        changed = fault.apply(text)
        assert changed[: fault.begin] + text[fault.begin : fault.end] + text[fault.end :] == text


def test_every_python_file_has_mutations_that_compile() -> None:
    for path in (ROOT / "python" / "lltm").rglob("[a-z]*.py"):
        for fault in [*mutants.faults_of(path, path.read_text())][::20]:
            compile(fault.apply(path.read_text()), path, "exec")


@pytest.mark.parametrize("killer", ["a test", None])
def test_the_file_is_restored_after_a_mutation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killer: str | None
) -> None:
    path = tmp_path / "a.py"
    path.write_text(PYTHON)
    seen = []

    def first_failure(*commands: str) -> str | None:
        assert commands == (mutants.INSTALL, mutants.PYTEST)
        seen.append(path.read_text())
        return killer

    monkeypatch.setattr(mutants, "first_failure", first_failure)
    monkeypatch.setattr(mutants, "run", lambda command: (0, ""))
    fault = next(f for f in mutants.faults_of(path, PYTHON) if f.new == "<=")
    assert mutants.try_fault(path, fault, {}) == killer
    assert seen == [PYTHON.replace("x < 3", "x <= 3")]
    assert path.read_text() == PYTHON
    # Invalid Python does not count.
    assert mutants.try_fault(path, mutants.Fault(0, 3, "dfe"), {}) == ""
    assert len(seen) == 1
    assert path.read_text() == PYTHON
