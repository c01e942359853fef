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
