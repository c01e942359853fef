"""GPU benchmark, run on the CPU: comparisons and failures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_cuda
import pytest
import torch
from bench_cuda import faults

from lltm.benchmark.cases import GATES, Case, Shape
from lltm.benchmark.contenders import OURS, contenders
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Settings

SHAPE: Shape = (6, 3, 5, 8)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cuda, "engine_that_ran", lambda run: "stepwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", GATES)
def test_accurate_results_have_no_errors(cell: str, dtype: torch.dtype) -> None:
    assert list(faults(Case(SHAPE, dtype, cell=cell), "stepwise")) == []


@pytest.mark.parametrize("cell", GATES)
def test_wrong_results_and_other_kernels_are_errors(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(case: Case) -> dict[str, Any]:
        makes = contenders(case)

        def make(*sizes: int, **options: Any) -> torch.nn.Module:
            layer = makes[OURS](*sizes, **options)
            layer.register_forward_hook(lambda _, arguments, out: (out[0] * 1.0001, out[1]))
            return layer

        return {**makes, OURS: make}

    monkeypatch.setattr(bench_cuda, "contenders", off)
    found = list(faults(Case(SHAPE, cell=cell), "persistent"))
    assert len(found) == 2
    assert "times PyTorch's error" in found[0]
    assert found[1] == "kernels that ran: stepwise"


def test_a_failing_case_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status reports it. Only 16-bit sequences have two engines."""
    measured = []

    def compare(case: Case, _: object, engines: list[str]) -> Row:
        if case.dtype == torch.float16:
            raise RuntimeError("made up\nat length")
        measured.append((case.dtype, case.is_step, engines))
        return Row(str(case), {OURS: [1.0]}, {OURS: 1}, {})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cuda, "compare", compare)
    monkeypatch.setattr(bench_cuda, "faults", lambda case, engine: [])
    options = ["--cell", "gru", "--dtype", "float16", "bfloat16", "float32"]
    path = tmp_path / "cuda.json"
    shapes = ["--shapes", "2,3,4,5", "3,4,5", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_cuda.py", *options, *shapes])
    with pytest.raises(SystemExit, match=r"float16: made up; .*float16: made up"):
        bench_cuda.main()
    both = ["stepwise", "persistent"]
    of_sequences = [(torch.bfloat16, False, both), (torch.float32, False, ["stepwise"])]
    of_steps = [(dtype, True, ["stepwise"]) for dtype in (torch.bfloat16, torch.float32)]
    assert measured == [row for rows in (of_sequences, of_steps) for row in rows for _ in "12"]
    results = json.loads(path.read_text())
    assert len(results["rows"]) == len(measured)
    assert len(results["bad"]) == 4


def test_engines_are_measured_with_other_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1, 100))

    def timer(make: Any, case: Case, engine: str = "") -> Any:
        taken = float(next(seconds))
        return lambda iterations: {"": taken}

    monkeypatch.setattr(bench_cuda, "layer_timer", timer)
    monkeypatch.setattr(bench_cuda, "graph_timer", timer)
    case = replace(Case(SHAPE, torch.float16, cell="lstm"), device="cpu")
    settings = Settings(rounds=2, seconds=0.0, compile=False)
    row = bench_cuda.compare(case, settings, bench_cuda.ENGINES)
    assert list(row.seconds) == [OURS, "lltm, persistent", "nn.LSTM", "lltm, graph replay"]
    assert "missed 2 (goal <= 1)" not in "\n".join(row.lines())
    assert "met    0.667 (goal <= 1)  lltm, persistent / nn.LSTM" in "\n".join(row.lines())


def test_a_missing_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_cuda.py"])
    with pytest.raises(SystemExit, match=r"^no GPU found$"):
        bench_cuda.main()
