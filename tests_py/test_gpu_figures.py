"""What comes of the results of `make first-contact`: figures in the documents, and a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_figures
import pytest
import results_file
from support import ROOT


def times(value: float) -> dict[str, Any]:
    return {f"{what}, us a step": value for what in gpu_figures.WHATS}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run in which all is well."""
    folder = tmp_path / "2026-01-02-made-up-gpu"
    folder.mkdir()
    dtypes = ("float16", "bfloat16")
    smoke = {f"persistent, {dtype}": {"engine that ran": "persistent"} for dtype in dtypes}
    values = {"persistent": 1.25, "stepwise": 8.0, "cuDNN's LSTM": 2.0}
    known = {f"{name}, {dtype}": times(value) for dtype in dtypes for name, value in values.items()}
    results_file.write_json(folder / "smoke.json", smoke)
    results_file.write_json(folder / "times.json", known)
    results_file.write_json(folder / "device.json", {"GPU": {"name": "Made Up"}})
    results_file.write_json(folder / "native-persistent.json", {"a": "passed", "b": "skipped"})
    return folder


def test_the_figures_in_the_documents_are_those_of_the_stored_results() -> None:
    """If not: python benchmarks/gpu_figures.py --write."""
    text = gpu_figures.PAGE.read_text()
    assert gpu_figures.page(text, gpu_figures.runs()) == text


def test_figures_replace_those_before_them(measured: Path) -> None:
    text = f"before\n{gpu_figures.BEGIN}old\n{gpu_figures.END}after\n"
    new = gpu_figures.page(text, [measured])
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert "Made Up, 2026-01-02" in new
    assert "| persistent, float16 | 1.25 | 1.25 | 1.25 |" in new
    assert gpu_figures.page(new, [measured]) == new
    with pytest.raises(SystemExit, match="expected a line"):
        gpu_figures.page("no place", [measured])


def test_where_all_is_well_nothing_speaks_against_the_default(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_figures.main(["--print", str(measured)])
    assert "The persistent engine may be the default: kCudaPersistent" in capsys.readouterr().out
    assert "kCudaPersistent" in (ROOT / "cpp/src/common/backends.cpp").read_text()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("smoke", {}, "persistent, float16: no smoke test"),
        (
            "smoke",
            {"persistent, float16": {"fault": "more than 15 seconds"}},
            "persistent, float16: more than 15 seconds",
        ),
        (
            "smoke",
            {"persistent, float16": {"engine that ran": "stepwise"}},
            "persistent, float16: nothing shows that it ran",
        ),
        ("times", {}, "persistent, bfloat16: backward was not measured"),
        (
            "times",
            {"persistent, float16": times(9), "stepwise, float16": times(8)},
            "persistent, float16: forward takes 9.00 us a step, stepwise 8.00",
        ),
        ("native-persistent", {}, "its tests did not run"),
        ("native-persistent", {"a": "hung"}, "a: hung"),
        (
            "stage-2",
            {"steps": [{"name": "native-persistent", "state": "timed out", "reason": "more"}]},
            "its tests: timed out: more",
        ),
    ],
)
def test_what_speaks_against_the_default(
    name: str, value: Any, reason: str, measured: Path
) -> None:
    results_file.write_json(measured / f"{name}.json", value)
    assert reason in list(gpu_figures.against(measured))
