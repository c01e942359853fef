"""Programs in examples/, and docs/drop-in.md's hook of Lightning."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from test_docs import FORECAST, run_commands, texts

import lltm

EXAMPLES = support.ROOT / "examples"


def test_a_model_trains_alike_with_its_layers_replaced() -> None:
    """lltm.replace_ is the only change."""
    script = EXAMPLES / "replace" / "forecast.py"
    small = ("--epochs", "3", "--hidden-size", "12", "--sites", "8")
    result = support.run_forked(str(script), *small, cwd=script.parent)
    assert result.stdout.startswith("replaced: 'gru'\n")
    rows = re.findall(r"^ +\d +(\S+) +\S+ s +(\S+) +\S+ s$", result.stdout, re.MULTILINE)
    theirs, ours = ([float(losses[k]) for losses in rows] for k in (0, 1))
    assert len(theirs) == 3
    assert theirs[2] < theirs[0]
    assert ours == pytest.approx(theirs, abs=1.01e-4)  # rounding may move the last digit
    assert re.search(r"^lltm.replace_ took \d+\.\d\d of the time$", result.stdout, re.MULTILINE)


@pytest.mark.slow  # another library's training loop
@support.needs_extra("examples", "pytorch_lightning", "sklearn")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_the_layer_on_digits(precision: str) -> None:
    result = support.run_python(
        str(EXAMPLES / "lightning" / "digits.py"), "--precision", precision, timeout_s=240
    )
    accuracy = re.search(r"not seen in training: (0\.\d+)", result.stdout)
    assert accuracy is not None, result.stdout
    # Chance is 0.1; rounding affects a few digits.
    assert float(accuracy[1]) > 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # another library's warnings
@support.needs_extra("examples", "pytorch_lightning")
def test_a_hook_replaces_the_layers_of_a_loaded_checkpoint(tmp_path: Path) -> None:
    """docs/drop-in.md describes the hook."""
    import pytorch_lightning

    class Model(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rnn: Any = torch.nn.GRU(3, 4)

    class Faster(Model):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            lltm.replace_(self)

    model, file = Model(), tmp_path / "model.ckpt"
    lltm.replace_(model)
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(file)
    x = torch.randn(5, 2, 3)
    for cls, layer in ((Model, torch.nn.GRU), (Faster, lltm.GRU)):
        loaded = cls.load_from_checkpoint(file)
        assert type(loaded.rnn) is layer
        torch.testing.assert_close(loaded.rnn(x), model.rnn(x))


@pytest.mark.slow
def test_the_just_in_time_build_runs_and_agrees_with_the_reference() -> None:
    """In a separate process: operators can be registered only once."""
    run = support.run_python(str(EXAMPLES / "jit" / "build.py"))
    assert "values and gradients agree with the PyTorch reference" in run.stdout
    assert f"CPU kernels in use: {support.BASELINE}" in run.stdout, run.stdout


@pytest.mark.slow  # compiles against PyTorch, half a minute
def test_the_forecast_trains_saves_loads_and_predicts(tmp_path: Path) -> None:
    """In C++, run as in its page. The build is kept for the next run."""
    folder = support.ROOT / "build" / "examples" / f"forecast-torch-{torch.__version__}"
    shutil.copytree(FORECAST.parent, folder, dirs_exist_ok=True)
    run_commands("\n".join(texts(FORECAST, "sh")), folder, OMP_NUM_THREADS="1")

    def run(*command: str) -> str:
        # One thread is fastest for a small layer.
        return support.run(["env", "OMP_NUM_THREADS=1", *command], cwd=folder).stdout

    files = "load.csv", str(tmp_path / "model.safetensors")
    trained = run("build/forecast", "train", *files)
    losses = re.findall(r"(?:value:|loss) (\d\S*)$", trained, re.MULTILINE)
    naive, *validation = map(float, losses)
    assert len(validation) == 20
    assert validation[-1] < 0.4 * naive

    predicted = run("build/forecast", "predict", *files, "24")
    steps, values = zip(*(line.split(",") for line in predicted.splitlines()), strict=True)
    assert steps == tuple(map(str, range(1, 25)))
    for t, value in enumerate(values, start=2000):  # noise with mean 3 and width 6
        assert abs(float(value) - (103 + 0.02 * t + 20 * math.sin(0.2617994 * t))) < 6

    support.run_python("-c", "\n".join(texts(FORECAST, "python")), cwd=folder)
    linked = run("ldd", "build/forecast")
    assert re.findall(r"^\t(liblltm|lib\w*python)", linked, re.MULTILINE) == ["liblltm"]
