"""examples/forecast: training without Python, run as in its page."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import support
import torch
from test_docs import FORECAST, run_commands, texts

pytestmark = pytest.mark.slow  # compiles against PyTorch, half a minute


@pytest.fixture(scope="module")
def folder() -> Path:
    """Kept for the next run."""
    folder = support.ROOT / "build" / "examples" / f"forecast-torch-{torch.__version__}"
    shutil.copytree(FORECAST.parent, folder, dirs_exist_ok=True)
    run_commands("\n".join(texts(FORECAST, "sh")), folder, OMP_NUM_THREADS="1")
    return folder


def run(folder: Path, *command: str, check: bool = True) -> support.Done:
    command = ("env", "OMP_NUM_THREADS=1", *command)  # fastest for a small layer
    return support.run(command, check, cwd=folder)


def test_it_trains_saves_loads_and_predicts(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.safetensors"
    trained = run(folder, "build/forecast", "train", "load.csv", str(checkpoint))
    losses = re.findall(r"(?:value:|loss) (\d\S*)$", trained.stdout, re.MULTILINE)
    naive, *validation = map(float, losses)
    assert len(validation) == 20
    assert validation[-1] < 0.4 * naive

    predicted = run(folder, "build/forecast", "predict", "load.csv", str(checkpoint), "24")
    steps, values = zip(*(line.split(",") for line in predicted.stdout.splitlines()), strict=True)
    assert steps == tuple(map(str, range(1, 25)))
    for t, value in enumerate(values, start=2000):  # noise with mean 3 and width 6
        assert abs(float(value) - (103 + 0.02 * t + 20 * math.sin(0.2617994 * t))) < 6

    support.run_python("-c", "\n".join(texts(FORECAST, "python")), cwd=folder)
    linked = run(folder, "ldd", "build/forecast").stdout
    assert re.findall(r"^\t(liblltm|lib\w*python)", linked, re.MULTILINE) == ["liblltm"]


ROWS = "".join(f"{k},{k % 7}\n" for k in range(100))
NUMBER = "{}, line 102: expected a finite number in the last column, got"
ERRORS = [
    ("t,a\n" + ROWS + "100,x\n", f"{NUMBER} 'x'"),
    ("t,a\n" + ROWS + "100,inf\n", f"{NUMBER} 'inf'"),
    ("t,a\n" + ROWS + "\n", f"{NUMBER} ''"),
    (ROWS, "{}, line 1: expected a header, got 0,0"),
    ("t,a\r\n1,2\r\n", "{}: expected 96 rows or more, got 1"),
    ("t,a\n" + "0,0.3\n" * 100, "{}: expected values that differ, got equal ones"),
    (None, "{}: cannot read: No such file or directory"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_in_a_file_are_named(
    folder: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    data, checkpoint = tmp_path / "data.csv", tmp_path / "model.safetensors"
    if text is not None:
        data.write_text(text, encoding="utf-8")
    ran = run(folder, "build/forecast", "train", str(data), str(checkpoint), check=False)
    assert (ran.returncode, ran.stderr) == (1, f"forecast: {message.format(data)}\n")
    assert not checkpoint.exists()


def test_wrong_usage_has_its_own_exit_status(folder: Path) -> None:
    for words in ((), ("train", "load.csv"), ("predict", "load.csv", "load.safetensors", "x")):
        ran = run(folder, "build/forecast", *words, check=False)
        assert ran.returncode == 2
        assert ran.stderr.startswith("usage: forecast train DATA.csv MODEL.safetensors")
