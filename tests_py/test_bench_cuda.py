"""The GPU benchmark, on a made-up GPU: which parts run, what a failure or an early end leaves."""

from __future__ import annotations

import json
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


def test_without_compile_and_with_it_alone_are_the_whole(path: Path) -> None:
    run("--no-compile")
    without = titles(path)
    assert without[:2] == ["the card", "apart"]
    assert len(without) == 2 + 2 + 2 * len(bench_cuda.SEQUENCES)
    assert not any("compiled" in title for title in without)
    sys.argv.remove("--no-compile")
    run("--only-compile")
    alone = titles(path)
    assert len(alone) == 4
    assert all("compiled" in title for title in alone)
    sys.argv.remove("--only-compile")
    run()
    assert titles(path) == without + alone


def test_both_at_once_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--no-compile", "--only-compile")
    assert "--no-compile and --only-compile leave nothing" in capsys.readouterr().err


def test_a_part_that_fails_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> CheckedRow:
        raise RuntimeError("made up")

    monkeypatch.setattr(bench_cuda, "parts", fail)
    with pytest.raises(SystemExit, match=r"^failed: forward and backward apart$"):
        run("--no-compile")
    assert json.loads(path.read_text())["failures"] == {"forward and backward apart": "made up"}
    assert len(titles(path)) == 1 + 2 + 2 * len(bench_cuda.SEQUENCES)


def test_no_part_begins_after_the_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def takes_a_minute(*_: object) -> CheckedRow:
        nonlocal clock
        clock += 60
        return row("slow")

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(bench_cuda, "machine", takes_a_minute)
    monkeypatch.setattr(bench_cuda, "parts", takes_a_minute)
    with pytest.raises(SystemExit, match=r"^failed: "):
        run("--no-compile", "--seconds", "100")
    assert titles(path) == ["slow", "slow"]
    failures = json.loads(path.read_text())["failures"]
    assert len(failures) == 2 + 2 * len(bench_cuda.SEQUENCES)
    assert set(failures.values()) == {"not begun, because the time was up"}


def test_an_end_in_the_middle_leaves_the_rows_so_far(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> CheckedRow:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cuda, "parts", end)
    with pytest.raises(KeyboardInterrupt):
        run("--no-compile")
    assert titles(path) == ["the card"]
    assert [file.name for file in path.parent.iterdir()] == ["cuda.json"]


def test_without_a_gpu_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU here$"):
        run()
    assert not path.exists()
