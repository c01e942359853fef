"""What the benchmark does with contenders that fail, and with goals."""

from __future__ import annotations

from pathlib import Path

import pytest
import support

from lltm.benchmark import Sampler, Settings, measure

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
