"""The benchmark with contenders that fail and with goals; what the pages show of stored runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import support

from lltm.benchmark import Sampler, Settings, measure

RESULTS = support.ROOT / "benchmarks" / "results"
EPYC = RESULTS / "2026-11-22-epyc-zen5-2-cores" / "layers.json"
XEON = RESULTS / "2026-11-21-xeon-2-cores" / "layers.json"

SETTINGS = Settings(rounds=3, seconds=0.0, compile=False)


def sampler() -> Sampler:
    return lambda iterations: {"": 1.0}


def failing_at(call: int) -> Sampler:
    calls = 0

    def sample(iterations: int) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise IndexError("of any kind\nat length")
        return {", forward": 1.0, ", backward": 2.0}

    return sample


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # warming up, counting, the first round, the second
def test_a_contender_that_fails_is_left_out_with_the_reason(call: int) -> None:
    builds = {"ours": sampler, "bad": lambda: failing_at(call), "theirs": sampler}
    row = measure("title", builds, SETTINGS)
    assert row.seconds == {"ours": [1.0] * 3, "theirs": [1.0] * 3}
    assert row.skipped == {"bad": "of any kind"}
    assert row.iterations.keys() == row.seconds.keys()
    assert "not measured: of any kind" in "\n".join(row.lines())


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_the_first_contender_has_to_run(call: int) -> None:
    with pytest.raises(IndexError):
        measure("title", {"ours": lambda: failing_at(call), "theirs": sampler}, SETTINGS)


GOALS = """
def goal(case, against):
    return 100.0 if against == "nn.LSTMCell" and case.training else None
"""


@pytest.mark.parametrize("with_goals", [True, False])
def test_ratios_are_compared_with_goals_that_are_given(tmp_path: Path, with_goals: bool) -> None:
    (tmp_path / "goals.py").write_text(GOALS)
    options = ["--quick", "--rounds", "1", "--shapes", "2,3,4", "--dtype", "float32"]
    options += ["--goals", "goals.py"] if with_goals else []
    run = support.run_python("-m", "lltm.benchmark", *options, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "one step, training, B=2 I=3 H=4, float32" in run.stdout
    assert ("Goals: 1 of 1 met" in run.stdout) == with_goals


# ----- benchmarks/chart.py -----------------------------------------------------


@pytest.fixture
def chart() -> ModuleType:
    path = support.ROOT / "benchmarks" / "chart.py"
    spec = importlib.util.spec_from_file_location("chart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_show_the_stored_runs(chart: ModuleType) -> None:
    page = (support.ROOT / "docs" / "speed.md").read_text()
    runs = [chart.read(EPYC), chart.read(XEON)]
    shown = [chart.table(run) for run in runs]
    assert re.findall(r"^\| T×B.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL) == shown
    assert shown[0] in (support.ROOT / "README.md").read_text()
    said = re.findall(r"(\d\.\d+ to \d\.\d+).*?\b(b?float\d+)", " ".join(page.split()))
    assert said == [(chart.ratios(runs, dtype), dtype) for dtype in ("float32", "bfloat16")]


def test_the_chart_is_that_of_the_stored_run(chart: ModuleType) -> None:
    """Matplotlib names what it writes in comments, whatever its version."""
    run = chart.read(EPYC)
    picture = (support.ROOT / "docs" / "speed.svg").read_text()
    shown = re.findall(r"<!-- (\d\.\d+) -->", picture)
    for kind in ("training", "inference"):
        for shape in chart.SHAPES:
            assert f"{chart.ratio(run, kind, shape, 'float32'):.2f}" in shown
            assert f"{chart.ratio(run, kind, shape, 'float32', 'plain PyTorch'):.1f}" in shown
    assert "lower is better" in picture


def test_a_table_has_the_shapes_that_were_measured_in_full(chart: ModuleType) -> None:
    seconds = {"lltm": [0.002, 0.004, 0.006], "nn.LSTM": [0.004, 0.004, 0.004]}
    run = {
        chart.title(kind, "T=2 B=3 I=4 H=5", dtype): seconds
        for kind in chart.KINDS
        for dtype in chart.DTYPES
    }
    run[chart.title("training", "T=3 B=3 I=4 H=5", "float32")] = seconds
    assert chart.table(run).splitlines()[2:] == ["| 2×3×4×5 | 4 | 1.00 | 4 | 1.00 | 1.00 | 1.00 |"]
    slower = {name: {"lltm": [3.0], "nn.LSTM": [2.0]} for name in run}
    assert chart.ratios([run, slower], "bfloat16") == "1.00 to 1.50"
