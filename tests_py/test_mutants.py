"""The mutator (tests_cpp/mutants.py): one fault in one place, and everything as it was after it."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[1]

CPP = """\
// x < y && true
int f(int n, const char* text) {
  if (n < 3 && text != nullptr) {
    log("a + b");
    barrier(n);
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
# What each of these texts becomes, by the kind of fault: the old and the new part.
CPP_FAULTS = {
    "comparison": {("<", "<="), ("!=", "==")},
    "logic": {("&&", "||")},
    "arithmetic": {("+", "-")},
    "constant": {("3", "4"), ("3", "2"), ("10", "11"), ("10", "9")},
    "type": {("double", "float")},
    "arguments": {("n, text", "text, n")},
    "condition": {
        ("n < 3 && text != nullptr", new + "(n < 3 && text != nullptr)")
        for new in ("!", "false && ", "true || ")
    },
    "statement": {('log("a + b");', ";"), ("barrier(n);", ";"), ("total_ = sum;", ";")},
}
PYTHON_FAULTS = {
    "comparison": {("<", "<=")},
    "logic": {("and", "or")},
    "arithmetic": {("+", "-")},
    "constant": {("True", "False"), ("3", "4"), ("3", "2"), ("10", "11"), ("10", "9")},
    "arguments": {("x, y", "y, x")},
    "condition": {
        ("x < 3 and y", new + "(x < 3 and y)") for new in ("not ", "False and ", "True or ")
    },
    "statement": {('log("a + b")', "pass"), ("self.total = g(x, y) + 10", "pass")},
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("a.cpp", CPP, CPP_FAULTS), ("a.py", PYTHON, PYTHON_FAULTS)],
    ids=["cpp", "python"],
)
def test_faults_are_these_and_none_in_comments_strings_and_types(
    name: str, text: str, expected: dict[str, set[tuple[str, str]]]
) -> None:
    found: dict[str, set[tuple[str, str]]] = {}
    for fault in mutants.faults_of(Path(name), text):
        found.setdefault(fault.kind, set()).add((text[fault.begin : fault.end], fault.new))
    assert found == expected


@pytest.mark.parametrize("folder", ["cpp/src", "python/lltm"])
def test_every_source_has_faults_that_change_one_place(folder: str) -> None:
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h", ".py")]
    drawn = mutants.draw({path: path.read_text() for path in paths}, seed=1)
    for _ in range(200):
        path, fault = next(drawn)
        text = path.read_text()
        changed = fault.apply(text)
        assert changed != text
        assert changed[: fault.begin] == text[: fault.begin]
        assert changed[fault.begin + len(fault.new) :] == text[fault.end :]


def test_a_seed_draws_the_same_faults_again() -> None:
    texts = {Path("a.cpp"): CPP, Path("a.py"): PYTHON}
    first, again, other = (list(mutants.draw(texts, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("killer", ["a test", None])
def test_the_file_is_as_it_was_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killer: str | None
) -> None:
    (tmp_path / "src").mkdir()
    path = tmp_path / "src/a.py"
    path.write_text(PYTHON)
    place = mutants.Workplace(tmp_path, jobs=1, limit=1)
    seen = []

    def first_failure(changed: set[Path]) -> str | None:
        assert not changed
        seen.append(path.read_text())
        ast.parse(seen[0])
        return killer

    monkeypatch.setattr(place, "first_failure", first_failure)
    monkeypatch.setattr(place, "compile", lambda: ["true"])
    fault = next(f for f in mutants.faults_of(path, PYTHON) if f.kind == "comparison")
    assert place.try_fault(path, fault) == killer
    assert seen == [PYTHON.replace("x < 3", "x <= 3")]
    assert path.read_text() == PYTHON
    # What is no Python is no mutant.
    broken = mutants.Fault("statement", 0, 3, "dfe")
    assert place.try_fault(path, broken) == ""
    assert len(seen) == 1
    assert path.read_text() == PYTHON
