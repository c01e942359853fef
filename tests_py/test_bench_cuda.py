"""The GPU benchmark, on a made-up GPU: which parts run, what a failure or an early end leaves."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import bench_cuda
import pytest
import torch
from checks import CheckedRow

from lltm import modules
from lltm.benchmark.cases import Case
from lltm.benchmark.contenders import OURS, PLAIN


def row(title: str) -> CheckedRow:
    return CheckedRow(title, seconds={OURS: [1.0]}, iterations={OURS: 1}, skipped={})


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which everything takes a second."""

    def compare(case: Case, makes: dict[str, Any], *_: object) -> CheckedRow:
        assert set(makes) >= {OURS, PLAIN}
        compiled = any("torch.compile" in name for name in makes)
        return row(f"compiled {case}" if compiled else str(case))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(bench_cuda, "environment", lambda: {"torch": "made up"})
    monkeypatch.setattr(bench_cuda, "machine", lambda settings: row("the card"))
    monkeypatch.setattr(bench_cuda, "compare", compare)
    monkeypatch.setattr(bench_cuda, "parts", lambda makes, settings: row("apart"))
    monkeypatch.setattr(bench_cuda, "rotated_copies", lambda case: 3)
    monkeypatch.setattr(bench_cuda, "build_tutorial", lambda: None)
    monkeypatch.setattr(
        bench_cuda, "tutorial_modules", lambda built: (modules.LLTMCell, modules.LLTM)
    )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the results of `run` are."""
    monkeypatch.setattr(sys, "argv", ["bench_cuda.py", "--json", str(tmp_path / "cuda.json")])
    return tmp_path / "cuda.json"


def run(*options: str) -> None:
    sys.argv.extend(options)
    bench_cuda.main()


def titles(path: Path) -> list[str]:
    return [found["title"] for found in json.loads(path.read_text())["rows"]]


LAYERS = 1 + 2 * len(bench_cuda.SEQUENCES) + 2  # the card, sequences, steps


def test_what_compiles_comes_last_and_may_be_left_out(path: Path) -> None:
    run("--parts", "layers")
    layers = titles(path)
    assert layers[0] == "the card"
    assert len(layers) == LAYERS
    rest = []
    for part, count in (("tutorial", 1 + 2 + 1), ("compiled", 4)):
        sys.argv[-1] = part
        run()
        rest += titles(path)
        assert len(titles(path)) == count
    assert [title for title in rest if "compiled" in title] == rest[-4:]
    del sys.argv[-2:]
    run()
    assert titles(path) == layers + rest


def test_after_an_error_that_stays_a_new_process_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was not begun: neither the part that failed nor those before it run again."""
    measured: list[str] = []
    broken = False
    first, second = (str(Case(*bench_cuda.SEQUENCES[k], device="cuda")) for k in (0, 1))

    def compare(case: Case, *_: object) -> CheckedRow:
        nonlocal broken
        measured.append(str(case))
        broken = broken or str(case) == second
        if broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return row(str(case))

    def synchronize() -> None:
        if broken:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def execv(program: str, words: list[str]) -> None:
        nonlocal broken
        broken = False
        assert words[0] == program == sys.executable
        sys.argv = words[1:]
        bench_cuda.main()
        raise SystemExit("the other process")

    monkeypatch.setattr(bench_cuda, "compare", compare)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit, match=f"^failed: {re.escape(second)}$"):
        run("--parts", "layers", "--seconds", "1000")
    assert measured.count(second) == 1
    assert measured.count(first) == 1
    assert len(titles(path)) == LAYERS - 1
    assert json.loads(path.read_text())["failures"].keys() == {second}


def test_a_part_that_fails_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> CheckedRow:
        raise RuntimeError("made up")

    monkeypatch.setattr(bench_cuda, "parts", fail)
    with pytest.raises(SystemExit, match=r"^failed: forward and backward apart$"):
        run("--parts", "layers", "tutorial")
    assert json.loads(path.read_text())["failures"] == {"forward and backward apart": "made up"}
    assert len(titles(path)) == LAYERS + 2 + 1


def test_no_part_begins_after_the_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def takes_a_minute(*_: object) -> CheckedRow:
        nonlocal clock
        clock += 60
        return row("slow")

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(bench_cuda, "machine", takes_a_minute)
    monkeypatch.setattr(bench_cuda, "compare", takes_a_minute)
    with pytest.raises(SystemExit, match=r"^failed: "):
        run("--parts", "layers", "--seconds", "100")
    assert titles(path) == ["slow", "slow"]
    failures = json.loads(path.read_text())["failures"]
    assert len(failures) == LAYERS - 2
    assert set(failures.values()) == {"not begun, because the time was up"}


def test_an_end_in_the_middle_leaves_the_rows_so_far(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> CheckedRow:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cuda, "compare", end)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert titles(path) == ["the card"]
    assert [file.name for file in path.parent.iterdir()] == ["cuda.json"]


def test_without_a_gpu_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU here$"):
        run()
    assert not path.exists()
