"""Training without Python: examples/forecast, built against the installed package."""

from __future__ import annotations

import csv
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import support
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lltm

pytestmark = [
    pytest.mark.slow,  # compiles PyTorch's headers, half a minute
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("ninja")), reason="builds with CMake and Ninja"
    ),
]

Array = npt.NDArray[np.float64]

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
PERIOD, CONTEXT, HIDDEN, BATCH = 12, 24, 16, 32
OPTIONS = ("--context", str(CONTEXT), "--hidden", str(HIDDEN), "--seed", "3")


@pytest.fixture(scope="module")
def program() -> Path:
    """Kept, so that the next run has nothing to compile."""
    build = support.ROOT / "build" / "examples" / f"forecast-torch-{torch.__version__}"
    build.mkdir(parents=True, exist_ok=True)
    prefixes = f"{lltm.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    configure = ["-S", str(support.ROOT / "examples/forecast"), "-B", str(build), "-G", "Ninja"]
    configure.append(f"-DCMAKE_PREFIX_PATH={prefixes}")
    with (build / "lock").open("w") as lock:  # for workers of pytest-xdist
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in (configure, ["--build", str(build)]):
            done = subprocess.run(
                ["cmake", *arguments], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return build / "forecast"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=240
    )


@dataclass
class Run:
    """One run of training and its files, in a folder of its own."""

    program: Path
    data: Path
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.checkpoint = self.folder / "model.safetensors"
        self.losses = self.folder / "losses.csv"

    def train_command(self, *options: str) -> list[str]:
        files = ["--checkpoint", str(self.checkpoint), "--losses", str(self.losses)]
        return [str(self.program), "train", str(self.data), *files, *options]

    def train(self, *options: str) -> str:
        """Returns what it reported."""
        done = run(*self.train_command(*options))
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        return done.stderr

    def predict(self, steps: int) -> tuple[list[str], Array]:
        files = [str(self.data), "--checkpoint", str(self.checkpoint)]
        done = run(str(self.program), "predict", *files, "--steps", str(steps))
        assert (done.returncode, done.stderr) == (0, "")
        return read(done.stdout)

    def loss_rows(self) -> Array:
        header, rows = read(self.losses.read_text())
        assert header == ["epoch", "training", "validation"]
        return rows


def read(text: str) -> tuple[list[str], Array]:
    header, *rows = csv.reader(text.splitlines())
    return header, np.array(rows, dtype=np.float64)


def series(rows: int, columns: int = 1) -> Array:
    """A trend, a season and noise, in each column of another size and phase."""
    generator = np.random.default_rng(0)
    t, f = np.arange(rows)[:, None], np.arange(columns)
    values: Array = 50 + 0.01 * t + 2 * np.sin(2 * np.pi * (t / PERIOD + f / 3))
    values += 0.2 * generator.standard_normal((rows, columns))
    return values * 10.0**f


def write(path: Path, header: str, rows: Array, dates: bool = False) -> Path:
    days = np.arange("2020-01-01", "2100-01-01", dtype="datetime64[D]")[: len(rows)]
    with path.open("w", newline="") as file:
        file.write(header + "\n")
        for day, row in zip(days, rows.tolist(), strict=True):
            file.write(",".join([str(day)] * dates + [repr(value) for value in row]) + "\n")
    return path


class Forecaster(nn.Module):
    """ForecasterImpl of model.h."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("deviation", torch.ones(columns, dtype=torch.float64))
        self.rnn = lltm.LLTM(columns, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, columns)

    @classmethod
    def load(cls, checkpoint: Path) -> Forecaster:
        tensors = load_file(checkpoint)
        state = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        forecaster = cls(len(state["mean"]))
        forecaster.load_state_dict(state)
        return forecaster

    def standardise(self, values: Array) -> Tensor:
        return ((torch.from_numpy(values) - self.mean) / self.deviation).float()

    def forward(self, window: Tensor) -> Tensor:
        last = window[:, -1:]
        change: Tensor = self.output(self.rnn(window - last)[0][:, -1])
        return last[:, 0] + change

    def predict(self, values: Array, steps: int) -> Array:
        window = self.standardise(values[-CONTEXT:])[None]
        for _ in range(steps):
            window = torch.cat([window, self(window[:, -CONTEXT:])[:, None]], 1)
        return (window[0, CONTEXT:] * self.deviation + self.mean).numpy()


def assert_same_state(one: Path, other: Path) -> None:
    """Bit for bit, by name first, for a message that says where."""
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert one.read_bytes() == other.read_bytes()


# ----- training and forecasting ----------------------------------------------


def test_it_links_nothing_of_python(program: Path) -> None:
    linked = run("ldd", str(program)).stdout
    assert "liblltm.so" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked


@torch.no_grad()
def test_it_learns_more_than_the_naive_forecasts(program: Path, tmp_path: Path) -> None:
    values = series(1000)
    data = write(tmp_path / "series.csv", "day,load", values, dates=True)
    training = Run(program, data, tmp_path / "run")
    report = training.train(*OPTIONS, "--epochs", "20", "--period", str(PERIOD))
    assert "load; 800 rows for training, 200 held out" in report

    # Standardised by the training part alone.
    mean, deviation = values[:800].mean(0), values[:800].std(0)
    saved = load_file(training.checkpoint)
    np.testing.assert_allclose(saved["model.mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(saved["model.deviation"], deviation, rtol=1e-12)

    standardised = (values - mean) / deviation
    naive = [
        float(np.square(standardised[800:] - standardised[800 - distance : -distance]).mean())
        for distance in (1, PERIOD)
    ]
    reported = re.search(r"naive forecasts: (\S+) by the last value, (\S+) by the value", report)
    assert reported is not None, report
    np.testing.assert_allclose([float(loss) for loss in reported.groups()], naive, rtol=1e-5)

    rows = training.loss_rows()
    assert rows[:, 0].tolist() == list(range(1, 21))
    assert rows[-1, 1] < rows[0, 1]
    assert rows[-1, 2] < 0.8 * min(naive)

    # The last loss is that of the checkpoint, over the held-out values alone.
    forecaster = Forecaster.load(training.checkpoint)
    held_out = forecaster.standardise(values[800 - CONTEXT :])
    windows = held_out.unfold(0, CONTEXT, 1).transpose(1, 2)[:-1]
    loss = nn.functional.mse_loss(forecaster(windows), held_out[CONTEXT:])
    assert rows[-1, 2] == pytest.approx(float(loss), rel=1e-5)


def test_held_out_rows_have_no_part_in_training(program: Path, tmp_path: Path) -> None:
    values = series(200)
    one = Run(program, write(tmp_path / "one.csv", "a", values), tmp_path / "one")
    values[160:] *= -3
    other = Run(program, write(tmp_path / "other.csv", "a", values), tmp_path / "other")
    for training in (one, other):
        training.train(*OPTIONS, "--epochs", "2")
    assert_same_state(one.checkpoint, other.checkpoint)
    np.testing.assert_array_equal(one.loss_rows()[:, 1], other.loss_rows()[:, 1])
    assert np.all(one.loss_rows()[:, 2] != other.loss_rows()[:, 2])


def test_the_seed_draws_the_initial_weights(program: Path, tmp_path: Path) -> None:
    # All examples in one batch: their order, which the seed draws too, only rounds differently.
    data = write(tmp_path / "series.csv", "a", series((CONTEXT + BATCH) * 5 // 4))
    losses = []
    for name, seed in (("one", "3"), ("again", "3"), ("other", "4")):
        training = Run(program, data, tmp_path / name)
        training.train("--context", str(CONTEXT), "--seed", seed, "--epochs", "1")
        assert int(load_file(training.checkpoint)["updates"]) == 1
        losses.append(training.loss_rows()[0, 1])
    assert losses[0] == losses[1]
    assert abs(losses[2] / losses[0] - 1) > 1e-3


@torch.no_grad()
def test_python_reads_its_checkpoint_and_forecasts_the_same(program: Path, tmp_path: Path) -> None:
    values = series(300, columns=3)
    data = write(tmp_path / "series.csv", "date,a,b,c", values, dates=True)
    training = Run(program, data, tmp_path / "run")
    training.train(*OPTIONS, "--epochs", "2")
    header, rows = training.predict(steps=30)
    assert header == ["step", "a", "b", "c"]
    assert rows[:, 0].tolist() == list(range(1, 31))
    expected = Forecaster.load(training.checkpoint).predict(values, steps=30)
    np.testing.assert_allclose(rows[:, 1:], expected, rtol=1e-5)


def test_columns_are_chosen_and_found_by_name(program: Path, tmp_path: Path) -> None:
    values = series(150, columns=3)
    first = write(tmp_path / "first.csv", "a,b,c", values)
    training = Run(program, first, tmp_path / "run")
    training.train(*OPTIONS, "--epochs", "1", "--columns", "c,a")
    header, rows = training.predict(steps=2)
    assert header == ["step", "c", "a"]
    assert bytes(load_file(training.checkpoint)["columns"].tolist()) == b"c,a"
    # In another order, with a byte order mark, white space and Windows's ends of lines.
    other = write(tmp_path / "other.csv", "x, c ,a", values[:, [1, 2, 0]])
    other.write_bytes(b"\xef\xbb\xbf" + other.read_bytes().replace(b"\n", b"\r\n"))
    training.data = other
    np.testing.assert_array_equal(training.predict(steps=2)[1], rows)


# ----- stopping and going on -------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With many updates in an epoch."""
    folder = tmp_path_factory.mktemp("data")
    return write(folder / "series.csv", "a,b", series(2000, columns=2))


def test_a_resumed_run_ends_as_one_that_never_stopped(
    program: Path, data: Path, tmp_path: Path
) -> None:
    whole, parts = (Run(program, data, tmp_path / name) for name in ("whole", "parts"))
    whole.train(*OPTIONS, "--epochs", "4")
    parts.train(*OPTIONS, "--epochs", "2")
    assert len(parts.loss_rows()) == 2
    parts.train("--epochs", "4", "--resume")
    assert_same_state(whole.checkpoint, parts.checkpoint)
    assert whole.losses.read_text() == parts.losses.read_text()


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that a failing test does not leave running, nor waits for without end."""
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        too_long = threading.Timer(240, process.kill)
        too_long.start()
        try:
            yield process
        finally:
            too_long.cancel()
            process.kill()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_what_a_resumed_run_goes_on_with(
    program: Path, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    stopped = Run(program, data, tmp_path / "stopped")
    with started(stopped.train_command(*OPTIONS, "--epochs", "1000000")) as process:
        wait_until(stopped.losses.exists, process)
        wait_until(lambda: stopped.losses.read_text().count("\n") > 2, process)
        process.send_signal(number)
        report = process.communicate()[1]
    assert process.returncode == 128 + number, report
    updates = int(load_file(stopped.checkpoint)["updates"])
    assert f"saved {stopped.checkpoint} after {updates} updates" in report
    updates_of_epoch = -(-(1600 - CONTEXT) // BATCH)
    assert len(stopped.loss_rows()) == updates // updates_of_epoch >= 2

    epochs = str(updates // updates_of_epoch + 1)
    stopped.train("--epochs", epochs, "--resume")
    whole = Run(program, data, tmp_path / "whole")
    whole.train(*OPTIONS, "--epochs", epochs)
    assert_same_state(whole.checkpoint, stopped.checkpoint)
    assert whole.losses.read_text() == stopped.losses.read_text()


def test_a_second_signal_ends_it_at_once(program: Path, data: Path, tmp_path: Path) -> None:
    training = Run(program, data, tmp_path / "run")
    os.mkfifo(training.losses)  # without a reader: the program waits for one
    with started(training.train_command()) as process:
        assert process.stderr is not None
        while "naive" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        assert "again to end at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT


# ----- errors ----------------------------------------------------------------

ROWS = "1,2\n2,1\n" * 20
NO_ROWS = "{file}: expected a header and rows of numbers, got none"
NUMBER = "expected a finite number, got"
NO_DEVIATION = "expected a finite deviation above 0 in the first 80 % of the rows, got 0.000000"
DATA = [
    ("", NO_ROWS),
    ("a,b\n", NO_ROWS),
    ("day\n2026-11-22\n", NO_ROWS),
    (ROWS, "{file}, line 1, column 1: expected a name, got 1"),
    ("a,\n" + ROWS, "{file}, line 1, column 2: expected a name, got nothing"),
    ("a,a\n" + ROWS, "{file}, line 1, column 1: expected a name of its own, got a"),
    ("a,b\n1,2,3\n", "{file}, line 2: expected 2 cells, as in the header, got 3"),
    ("a,b\n1,2\n3\n", "{file}, line 3: expected 2 cells, as in the header, got 1"),
    ("a,b\n1,2\n\n", "{file}, line 3: expected 2 cells, as in the header, got 1"),
    ("a,b\n1,2\n3,\n", f"{{file}}, line 3, column b: {NUMBER} nothing"),
    ("a,b\n1,2\nx,4\n", f"{{file}}, line 3, column a: {NUMBER} x"),
    ("a,b\n1,2\n3.5e,4\n", f"{{file}}, line 3, column a: {NUMBER} 3.5e"),
    ("a,b\n1,2\n3,NaN\n", f"{{file}}, line 3, column b: {NUMBER} NaN"),
    ("a,b\n1,2\n3,-inf\n", f"{{file}}, line 3, column b: {NUMBER} -inf"),
    ("a,b\n1,2\n3,1e999\n", f"{{file}}, line 3, column b: {NUMBER} 1e999"),
    ("day,b\n22.11.2026,2\n", f"{{file}}, line 2, column day: {NUMBER} 22.11.2026"),
    (
        "a,b\n" + ROWS,
        "{file}: expected more than 32 rows (--context) in the first 80 %, got 32",
    ),
    # Rounding gives the second a deviation above 0.
    ("a,b\n" + "1,0.5\n2,0.5\n" * 20 + "1,2\n" * 10, "{file}, column b: " + NO_DEVIATION),
    ("a\n" + "0.3\n" * 1250, "{file}, column a: " + NO_DEVIATION),
]


@pytest.mark.parametrize(("text", "message"), DATA, ids=[message for _, message in DATA])
def test_what_is_wrong_in_the_data_is_named_with_its_line(
    program: Path, tmp_path: Path, text: str, message: str
) -> None:
    data = tmp_path / "data.csv"
    data.write_text(text)
    training = Run(program, data, tmp_path / "run")
    done = run(*training.train_command("--context", "32"))
    assert (done.returncode, done.stderr) == (1, f"forecast: {message.format(file=data)}\n")
    assert list(training.folder.iterdir()) == []


@pytest.fixture(scope="module")
def files(program: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, and files that do not fit it."""
    folder = tmp_path_factory.mktemp("files")
    values = series(100, columns=2)
    training = Run(program, write(folder / "data.csv", "a,b", values), folder / "run")
    training.train(*OPTIONS, "--epochs", "1")
    layer = folder / "layer.safetensors"
    save_file(lltm.LLTM(2, HIDDEN).state_dict(), layer)
    return {
        "data": training.data,
        "checkpoint": training.checkpoint,
        "losses": training.losses,
        "folder": folder,
        "missing": folder / "missing",
        "layer": layer,
        "longer": write(folder / "longer.csv", "a,b", series(101, columns=2)),
        "short": write(folder / "short.csv", "a,b", values[: CONTEXT - 1]),
        "other": write(folder / "other.csv", "a,c", values),
    }


FILES = [
    (
        "train {missing} --checkpoint {missing} --losses {missing}",
        "{missing}: cannot read: No such file or directory",
    ),
    (
        "train {folder} --checkpoint {missing} --losses {missing}",
        "{folder}: cannot read: Is a directory",
    ),
    (
        "train {data} --checkpoint {checkpoint} --losses {missing}",
        "{checkpoint}: expected no such file without --resume, which goes on with it, got one",
    ),
    (
        "train {data} --checkpoint {missing} --losses {losses}",
        "{losses}: expected no such file without --resume, which goes on with it, got one",
    ),
    (
        "train {data} --checkpoint {missing} --losses {missing} --period 81",
        "{data}: expected --period of at most 80, got 81",
    ),
    (
        "train {data} --checkpoint {missing} --losses {missing} --columns a,c",
        "{data}, line 1: expected a column c, got none",
    ),
    (
        "train {data} --checkpoint {missing}/model --losses {missing}",
        "lltm::save_safetensors: cannot write {missing}/model: No such file or directory",
    ),
    (
        "train {data} --checkpoint {missing} --losses {missing} --resume",
        "lltm::load_safetensors: cannot read {missing}: No such file or directory",
    ),
    (
        "train {data} --checkpoint {layer} --losses {missing} --resume",
        "{layer}: expected a checkpoint of forecast, got one without columns",
    ),
    (
        "train {longer} --checkpoint {checkpoint} --losses {losses} --resume",
        "{longer}: expected 100 rows, as its training began, got 101",
    ),
    (
        "train {other} --checkpoint {checkpoint} --losses {losses} --resume",
        "{other}, line 1: expected a column b, got none",
    ),
    (
        "train {data} --checkpoint {checkpoint} --losses /dev/full --resume",
        "/dev/full: cannot write: No space left on device",
    ),
    (
        "predict {data} --checkpoint {layer} --steps 1",
        "{layer}: expected a checkpoint of forecast, got one without columns",
    ),
    (
        "predict {short} --checkpoint {checkpoint} --steps 1",
        f"{{short}}: expected {CONTEXT} rows to forecast from, got {CONTEXT - 1}",
    ),
    (
        "predict {other} --checkpoint {checkpoint} --steps 1",
        "{other}, line 1: expected a column b, got none",
    ),
]


@pytest.mark.parametrize(("command", "message"), FILES, ids=[command for command, _ in FILES])
def test_a_file_that_does_not_fit_is_named(
    program: Path, files: dict[str, Path], command: str, message: str
) -> None:
    before = files["checkpoint"].read_bytes()
    done = run(str(program), *(word.format(**files) for word in command.split()))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "forecast: " + message.format(**files)
    assert files["checkpoint"].read_bytes() == before
    assert not files["missing"].exists()


def test_a_full_disk_is_an_error(program: Path, files: dict[str, Path]) -> None:
    command = [str(program), "predict", str(files["data"]), "--checkpoint"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, str(files["checkpoint"]), "--steps", "1"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    message = "forecast: standard output: cannot write: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize("command", ["--help", "train --help", "train a --seed 1 --help"])
def test_help_is_no_error(program: Path, command: str) -> None:
    done = run(str(program), *command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: forecast train DATA.csv")


USAGE = [
    ("", "expected train or predict, got nothing"),
    ("test", "expected train or predict, got test"),
    ("train", "expected a CSV file, got none"),
    ("train a b", "expected one CSV file, got b too"),
    ("train a --losses l", "expected --checkpoint, got none"),
    ("train a --checkpoint c", "expected --losses, got none"),
    ("train a --checkpoint", "--checkpoint: expected a value, got nothing"),
    ("train a --steps 3", "expected an option of train, got --steps"),
    ("train a --epochs 0", "--epochs: expected a whole number from 1 on, got 0"),
    ("train a --epochs 1.5", "--epochs: expected a whole number from 1 on, got 1.5"),
    ("train a --seed -1", "--seed: expected a whole number from 0 on, got -1"),
    (
        "train a --checkpoint c --losses l --resume --hidden 3",
        "--resume: expected no --hidden, which the checkpoint holds, got one",
    ),
    ("predict a --checkpoint c", "expected --steps, got none"),
    ("predict a --resume", "expected an option of predict, got --resume"),
]


@pytest.mark.parametrize(("command", "message"), USAGE, ids=[message for _, message in USAGE])
def test_wrong_usage_is_told_apart(program: Path, command: str, message: str) -> None:
    done = run(str(program), *command.split())
    assert done.returncode == 2
    first, *usage = done.stderr.splitlines()
    assert first == f"forecast: {message}"
    assert usage[0].startswith("usage: forecast train DATA.csv")
