"""GPU bring-up on simulated systems: a failing or hanging stage does not affect others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import first_contact
import pytest
from first_contact import Stage
from support import ROOT

SH = ("sh", "-c")


def test_a_failure_or_hang_does_not_stop_other_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "START_SECONDS", 20)
    left = tmp_path / "left"
    chosen = [
        Stage("figures", (*SH, """echo '{"one": 1}'; echo '{"two": 2}'"""), 20),
        Stage("fails", (*SH, "echo first; echo why >&2; exit 3"), 20),
        Stage("is not there", ("no-such-program",), 20),
        Stage("hangs", (*SH, f"echo ready; (sleep 3; touch {left}) & sleep 60"), 20, silence=0.5),
        Stage("takes long", (*SH, "while true; do echo on; sleep 0.1; done"), 0.5),
        Stage("has its environment", (*SH, "echo $NAME"), 20, environment={"NAME": "made up"}),
    ]
    bad = first_contact.run_all(chosen, tmp_path, 100, dry_run=False)
    assert bad == ["fails", "is not there", "hangs", "takes long"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: entry["state"] for name, entry in summary.items()} == {
        "figures": "done",
        "fails": "failed: exit status 3: why",
        "is not there": "failed: No such file or directory: no-such-program",
        "hangs": "stopped: no output, after: ready",
        "takes long": "stopped: more than 0 seconds, after: on",
        "has its environment": "done",
    }
    assert summary["figures"]["figures"] == {"one": 1, "two": 2}
    assert "\nready\n" in (tmp_path / "log.txt").read_text()
    assert "\nmade up\n" in (tmp_path / "log.txt").read_text()
    time.sleep(3)
    assert not left.exists(), "what a stage has started ends with it"


def test_the_first_line_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch from a cold disk is slow."""
    slow = [Stage("slow", (*SH, "sleep 1; echo ready"), 20, silence=0.3)]
    monkeypatch.setattr(first_contact, "START_SECONDS", 10)
    assert first_contact.run_all(slow, tmp_path, 100, dry_run=False) == []
    monkeypatch.setattr(first_contact, "START_SECONDS", 0.3)
    assert first_contact.run_all(slow, tmp_path, 100, dry_run=False) == ["slow"]


def test_no_stage_starts_after_the_time_limit(tmp_path: Path) -> None:
    """Keeps earlier results of other stages."""
    first = Stage("first", ("true",), 20)
    assert first_contact.run_all([first], tmp_path, 100, dry_run=False) == []
    second = Stage("second", (*SH, "sleep 60"), 50)
    third = Stage("third", ("true",), 20)
    assert first_contact.run_all([second, third], tmp_path, 5.5, False) == ["second", "third"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["state"] for entry in summary.values()] == [
        "done",
        "stopped: more than 0 seconds, after: nothing",
        "not started: out of time",
    ]


def test_tests_that_did_not_pass_are_named() -> None:
    said = """
[ RUN      ] Cell/CudaCell.Values/lltm
[       OK ] Cell/CudaCell.Values/lltm (12 ms)
[ RUN      ] A.Fails
[  FAILED  ] A.Fails, where GetParam() = 3 (1 ms)
[ RUN      ] A.Skips
[  SKIPPED ] A.Skips (0 ms)
[ RUN      ] A.Hangs
[  FAILED  ] 1 test, listed below:
[gw0] [ 50%] PASSED tests_py/test_cuda.py::test_x[(1, 2)]
[gw1] [100%] FAILED tests_py/test_cuda.py::test_x[(1, 3)]
FAILED tests_py/test_cuda.py::test_x[(1, 3)] - RuntimeError: x"""
    bad = ["A.Fails", "A.Hangs", "tests_py/test_cuda.py::test_x[(1, 3)]"]
    assert first_contact.tests(said.splitlines()) == {"tests": 6, "not passed": bad}
    assert first_contact.tests(["done"]) == {}


def test_every_stage_names_existing_files(tmp_path: Path) -> None:
    for stage in first_contact.stages(tmp_path):
        for word in stage.command:
            if word.endswith(".py"):
                assert (ROOT / word).exists(), stage.name


def test_without_a_gpu_a_dry_run_continues(tmp_path: Path) -> None:
    """Stages that need no build run; make passes arguments on."""
    names = ("device", "stepwise-float16", "ncu-forward")
    chosen = [stage for stage in first_contact.stages(tmp_path) if stage.name in names]
    bad = first_contact.run_all(chosen, tmp_path, 300, dry_run=True)
    assert not bad, (tmp_path / "log.txt").read_text()
    make = ("make", "--dry-run", "--no-print-directory", f"PYTHON={sys.executable}")
    command = (*make, "first-contact", "STAGE=a b", "RESULTS=out")
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split()
    assert shown[2:] == [
        *b"benchmarks/first_contact.py --stage a b".split(),
        b"\\",
        b'--results="out"',
    ]
