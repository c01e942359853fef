"""Benchmarks: implementations, bounds, goals, programs, and documented results."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chart
import custom_cells
import layers
import pytest
import sharing
import support
import sweep
import torch
from goals import ONNX_RUNTIME, PEAK, READ, sequence_goal
from layers import USERS, user_cases
from machine import bounds, read_weights, weight_passes
from runtimes import JAX, RUNTIMES, runtimes
from torch.utils.dlpack import from_dlpack

from lltm.benchmark import timing
from lltm.benchmark.__main__ import cases, parser
from lltm.benchmark.cases import GATES, Case, Shape
from lltm.benchmark.contenders import OURS, TUTORIAL, Layer, contenders
from lltm.benchmark.report import Row, samples, speedup_text, tables
from lltm.benchmark.timing import Sampler, Settings, measure
from lltm.benchmark.user_model import compare_model, function

RUN = support.ROOT / "benchmarks/results/2026-11-25-epyc-zen5-2-cores"
CELLS = RUN / "layers.json"
SWEEP = (RUN / "sweep.txt").read_text()
README = (support.ROOT / "README.md").read_text()
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


@pytest.mark.parametrize("call", [1, 2, 4])  # warming up, counting, in a round
def test_a_failing_implementation_is_skipped_with_the_reason(call: int) -> None:
    builds = {"ours": sampler, "bad": lambda: failing_at(call), "theirs": sampler}
    row = measure("title", builds, SETTINGS)
    assert row.seconds == {"ours": [1.0] * 3, "theirs": [1.0] * 3}
    assert row.skipped == {"bad": "of any kind"}
    assert "not measured: of any kind" in "\n".join(row.lines())
    with pytest.raises(IndexError):  # the first must run
        measure("title", {"ours": lambda: failing_at(call), "theirs": sampler}, SETTINGS)


@pytest.mark.parametrize("spins", [0.0, 0.035, 1e9])
def test_a_turn_begins_when_no_other_thread_runs(
    spins: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is simulated; another thread spins until a time on it."""
    now = 0.0
    calls: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def call(iterations: int) -> dict[str, float]:
        calls.append(now)
        return {}

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(timing, "others_run", lambda: now < spins)
    timing.wake(call)
    assert calls == [pytest.approx(min(spins, 1.0), abs=0.0011)]


@pytest.fixture
def signal_stack() -> Iterator[None]:
    """Restores the signal stack: OpenVINO leaves a freed one."""
    libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a stack_t
    assert libc.sigaltstack(None, stack) == 0
    yield
    gc.collect()
    assert libc.sigaltstack(stack, None) == 0


@pytest.mark.usefixtures("signal_stack")
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("name", "module"), [(ONNX_RUNTIME, "onnxruntime"), ("OpenVINO", "openvino"), (JAX, "jax")]
)
def test_a_layer_of_another_runtime_equals_torchs(
    name: str, module: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needed in ("onnx", module):
        pytest.importorskip(needed, reason="part of the bench extra")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(torch.get_num_threads()))
    case = Case((7, 3, 5, 9), cell=cell)
    layer = Layer(runtimes(case)[f"{name} {cell.upper()}"], case)
    theirs: Any = layer.module.layer
    with torch.no_grad():
        for input in (layer.input, torch.empty_like(layer.input)):
            input.normal_()
            torch.testing.assert_close(layer.module(input, layer.state), theirs(input, layer.state))
    if name == JAX:  # training
        jax: Any = layer.module
        jax(layer.input.requires_grad_(), layer.state)
        theirs(layer.input, layer.state)[0].sum().backward()
        found = map(from_dlpack, (*jax.gradients[0], jax.gradients[1]))
        expected = [tensor.grad for tensor in (*theirs.parameters(), layer.input)]
        torch.testing.assert_close([*found], expected)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = name.lower().replace(" ", "")
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    case = Case((2, 3, 4, 5))
    makes = {OURS: contenders(case)[OURS], name: runtimes(case)[f"{name} LSTM"]}
    row = layers.measure_case("title", case, makes, SETTINGS, lambda case, against: None)
    assert row.skipped[name] == f"needs {module}: pip install {module}"


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("shape", [(3, 5, 6), (4, 3, 5, 6)])
def test_implementations_with_the_same_parameters_agree(cell: str, shape: Shape) -> None:
    """Only implementations whose arithmetic matches are compared."""
    case = Case(shape, training=True, cell=cell)
    found = {name: Layer(make, case) for name, make in contenders(case).items()}
    ours = found[OURS]
    for name, layer in found.items():
        layer.backward(layer.forward())
        assert all(parameter.grad is not None for parameter in layer.module.parameters())
        assert (layer.input.grad is None) == case.is_step
        if cell != "lltm" or not name.startswith("nn."):
            layer.module.load_state_dict(ours.module.state_dict())
            torch.testing.assert_close(layer.forward(), ours.forward())


def test_the_tutorials_implementation_runs_the_tutorials_code() -> None:
    """Not the kernels that its classes inherit."""
    for case in (Case((3, 5, 6)), Case((4, 3, 5, 6))):
        layer = Layer(contenders(case)[TUTORIAL], case)
        with torch.no_grad(), torch.profiler.profile() as profile:
            layer.forward()
        keys = [event.key for event in profile.key_averages()]
        assert "aten::addmm" in keys
        assert not [key for key in keys if key.startswith("lltm::")]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_case_may_have_layers_directions_and_packed_sequences(cell: str) -> None:
    case = Case(
        (9, 3, 5, 6), training=True, cell=cell, num_layers=2, bidirectional=True, packed=True
    )
    assert case.lengths.tolist() == [9, 6, 3]
    ours, theirs = (Layer(make, case) for make in contenders(case).values())
    ours.module.load_state_dict(theirs.module.state_dict())
    weights = [p for p in theirs.module.parameters() if p.dim() == 2]
    assert case.weights == sum(weight.numel() for weight in weights)
    assert case.flops == 3 * 2 * int(case.lengths.sum()) * case.weights
    for layer in (ours, theirs):
        layer.backward(layer.forward())
    torch.testing.assert_close(ours.input.grad, theirs.input.grad)
    assert not runtimes(case)


@pytest.mark.parametrize("name", custom_cells.NAMES)
def test_the_loop_over_a_gallery_cell_equals_the_layer(name: str) -> None:
    assert custom_cells.error(name, loop=True)[0] < 1e-14


def test_the_bound_is_the_longer_of_both_times() -> None:
    products = 3 * 5 * (4 + 5)  # multiply-adds of a batch element; weight elements
    step, sequence = Case((3, 4, 5), training=True), Case((7, 3, 4, 5), training=True)
    assert step.flops == 2 * 2 * 3 * products
    assert sequence.flops == 3 * 7 * 2 * 3 * products
    assert weight_passes(step) == 2
    assert weight_passes(sequence) == pytest.approx(2 * (4 + 7 * 5) / 9 + 1)
    read: Any = read_weights(step)
    assert read.args[0].nbytes == 4 * products
    case = Case((10, 64, 128, 256))
    seconds = {OURS: [4.0, 8.0], PEAK: [100.0, 200.0], READ: [0.1, 0.1]}
    found = bounds(Row("title", seconds, {}, {}), case)
    large, passes = 10 * 64 * 3 * 256 * (128 + 256) / 1024**3, (128 + 10 * 256) / (128 + 256)
    assert (found[PEAK].seconds, found[PEAK].share) == pytest.approx((large * 150, large * 25))
    assert (found[READ].seconds, found[READ].share) == pytest.approx((passes * 0.1, passes / 60))


def test_ratios_and_shares_are_compared_with_goals() -> None:
    goals = {TUTORIAL: 1e9, "nn.LSTM": 1e-9, PEAK: 1e9, READ: 0.0}
    case = Case((3, 2, 3, 4))
    row = layers.measure_case(
        "title", case, contenders(case), SETTINGS, lambda case, against: goals.get(against)
    )
    assert {check.what: check.met for check in row.checks} == {
        f"{OURS} / nn.LSTM": False,
        f"{OURS} / {TUTORIAL}": True,
        f"share of the rate of {PEAK}": False,
        f"share of the rate of {READ}": True,
    }
    assert {str(check) for check in row.checks} < {line.strip() for line in row.lines()}
    gru = Case((50, 128, 512, 512), torch.bfloat16, training=True, cell="gru")
    assert sequence_goal(gru, "nn.GRU") == 0.45
    assert sequence_goal(Case((60, 33, 100, 200), cell="gru"), f"{ONNX_RUNTIME} GRU") == 0.42
    assert sequence_goal(Case((7, 2, 3, 4), cell="gru"), "nn.GRU") is None


SHAPES = ["--quick", "--shapes", "2,3,4", "3,2,3,4", "--dtype", "float32", "--json", "out.json"]


def run_program(*arguments: str, cwd: Path) -> str:
    if arguments[0] != "-m":
        arguments = (str(support.ROOT / "benchmarks" / arguments[0]), *arguments[1:])
    return support.run_forked(*arguments, cwd=cwd).stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    assert all(f"\n  {json.dumps(row)}" in text for row in rows), "a row a line"
    return rows


def test_the_benchmark_of_a_user_measures_and_compares_with_an_earlier_run(tmp_path: Path) -> None:
    shown = run_program("-m", "lltm.benchmark", *SHAPES, cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80, "a terminal"
    rows = rows_of(tmp_path / "out.json")
    beside = {row["title"].split(", ")[0]: [*row["seconds"]][-1] for row in rows}
    assert beside == {
        "LLTM one step": "nn.LSTMCell",
        "LLTM sequence": "nn.LSTM",
        "LSTM one step": "nn.LSTMCell",
        "LSTM sequence": "nn.LSTM",
        "GRU one step": "nn.GRUCell",
        "GRU sequence": "nn.GRU",
    }
    assert len(rows) == 2 * len(beside)
    assert all(len(row["seconds"][OURS]) == 3 for row in rows)
    again = [*SHAPES[:-1], "new/out.json", "--compare", "out.json", "--cell", "gru"]
    shown = run_program("-m", "lltm.benchmark", *again, cwd=tmp_path)
    pattern = r"^  GRU one step, \w+, B=2 I=3 H=4, float32\n    earlier .* speedup +\d"
    assert len(re.findall(pattern, shown, re.MULTILINE)) == 2
    assert rows_of(tmp_path / "new" / "out.json")


def test_a_user_s_model_is_timed_before_and_after_replace(tmp_path: Path) -> None:
    """Includes several inputs and a shared GRU."""
    page = (support.ROOT / "docs/performance.md").read_text()
    (shown,) = re.findall(r"^```python\n(# my_model\.py\n.*?)^```", page, re.M | re.S)
    (command,) = re.findall(r"^python -m (lltm\.benchmark --model .*)$", page, re.M)
    (tmp_path / "my_model.py").write_text(shown)
    options = ["--quick", "--rounds", "1", "--threads", "1", "--json", "out.json"]
    printed = support.run_python("-m", *command.split(), *options, cwd=tmp_path).stdout
    assert "\nreplaced: the model\n" in printed
    rows = rows_of(tmp_path / "out.json")
    assert [row["title"] for row in rows] == ["model, inference", "model, training"]
    assert all([*row["seconds"]] == [OURS, "torch.nn"] for row in rows)
    assert len(re.findall(r"^With lltm, \w+ is [\d.]+ times as fast\.$", printed, re.M)) == 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.GRU(3, 4), torch.nn.GRUCell(4, 4)

        def forward(self, x: Any, h: Any, scale: float) -> dict[str, Any]:
            output, h = self.first(x, h)
            return {"last": [scale * self.second(output[-1], h[0])], "length": torch.tensor(5)}

    inputs = torch.randn(5, 2, 3), torch.randn(1, 2, 4), 2.0
    model = Model()
    settings = Settings(rounds=1, seconds=0.0, compile=False)
    assert len(compare_model(lambda: (model, inputs), settings)) == 2
    assert type(model.first) is torch.nn.GRU
    assert not compare_model(lambda: (torch.nn.Linear(2, 3), torch.randn(2)), settings)


@pytest.mark.parametrize("text", ["missing:make", "json:missing", "json", "json:__name__"])
def test_a_missing_function_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        function(text)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--json", "folder"), "--json: cannot write folder"),
        (("--plot", "file/out.png"), "--plot: cannot write file/out.png: "),
        (("--compare", "missing.json"), "--compare: cannot read missing.json: "),
        (("--compare", "file"), "--compare: file is not a file written by --json"),
    ],
)
def test_files_are_checked_before_measuring(
    tmp_path: Path, option: tuple[str, str], said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("[]")
    run = support.run_forked("-m", "lltm.benchmark", *SHAPES, *option, cwd=tmp_path, check=False)
    assert run.returncode == 2
    assert "one step, " not in run.stdout
    assert f"error: argument {said}" in run.stderr.splitlines()[-1]


def test_a_missing_matplotlib_is_reported_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import runpy, sys\n"
        "sys.modules['matplotlib'] = None\n"
        "runpy.run_module('lltm.benchmark', run_name='__main__')\n"
    )
    shown = support.run_forked("run.py", *SHAPES, "--cell", "gru", cwd=tmp_path).stdout
    assert 0 < shown.index("no plot: it needs matplotlib") < shown.index("one step, ")
    assert not (tmp_path / "lltm-benchmark.png").exists()


def test_the_benchmark_of_this_project_states_bounds_and_goals(tmp_path: Path) -> None:
    shown = run_program("layers.py", *SHAPES, cwd=tmp_path)
    rows = rows_of(tmp_path / "out.json")
    assert len(rows) == 4 * len(GATES)
    for row in rows:
        assert row["bound"]["by"] in (PEAK, READ)
        assert f"share of it in {OURS}: {row['bound']['share']:.2f}" in shown
    assert re.search(r"^Goals: \d+ of [1-9]\d* met$", shown, re.MULTILINE)
    found = dict(user_cases(["lltm", "lstm", "gru"], [torch.float32]))
    assert len(found) == 2 * (2 * len(USERS) - 1)  # 2 cells, 2 modes; one user has only a GRU


def test_gallery_cells_are_compared_with_loops(tmp_path: Path) -> None:
    """The compiled loop takes minutes and is omitted."""
    options = ["--quick", "--compile", "--cell", "indrnn", "mgu", "--shapes", "101,1,2,3"]
    run_program("custom_cells.py", *options, "--json", "out.json", cwd=tmp_path)
    for row in rows_of(tmp_path / "out.json"):
        assert [*row["seconds"]] == [OURS, custom_cells.LOOP]
        assert row["skipped"] == {custom_cells.COMPILED: "compiling over 100 steps takes too long"}


def test_a_sweep_samples_shapes_and_prints_the_worst_with_their_schedules(tmp_path: Path) -> None:
    shapes = [*sweep.drawn(50, seed=7)]
    assert shapes == [*sweep.drawn(50, seed=7)] != [*sweep.drawn(50, seed=8)]
    for shape in shapes:
        assert all(1 <= size <= most for size, most in zip(shape, sweep.LIMITS, strict=True))
    options = ["--count", "1", "--seed", "39", "--quick", "--cell", "gru", "--dtype", "float32"]
    files = ["--json", "sweep.json", "--plot", "sweep.svg"]
    shown = run_program("sweep.py", *options, *files, cwd=tmp_path)
    titles = [row["title"] for row in rows_of(tmp_path / "sweep.json")]
    assert titles == [
        f"GRU sequence, {kind}, T=4 B=8 I=4 H=16, float32" for kind in ("inference", "training")
    ]
    worst = shown.partition("The ten worst:\n")[2]
    assert len(re.findall(r"^\d+\.\d\d  GRU sequence, ", worst, re.MULTILINE)) == 2
    assert re.findall(r"^      lltm: .*forward: ", worst, re.MULTILINE)
    kinds = {kind for _, _, kind, _ in random_shapes(shown)}
    assert kinds - {"prepacked inference"} == {"inference", "training"}


def test_processes_and_threads_that_share_cores_are_measured(tmp_path: Path) -> None:
    program = str(support.ROOT / "benchmarks/sharing.py")
    options = ("processes", "--quick", "--seconds", "0.01", "--json", "out.json")
    support.run_python(program, *options, cwd=tmp_path, GOMP_SPINCOUNT="9")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = [(row["implementation"], row["processes"], row["GOMP_SPINCOUNT"]) for row in rows]
    assert found == [(name, n, "9") for name in ("torch.nn", OURS) for n in (1, 2)]
    for case, callers in ((sharing.SHARED[-1], 1), (sharing.SHARED[0], 2)):
        for name in sharing.implementations(case):
            times = sharing.calls(case, name, callers, 0.01, threading.Barrier(1))
            assert (len(times), sharing.sample([times])[0] > 0) == (callers, True)


RATIOS = r"([\d.]+) (nn\.\w+|PyTorch reference|ONNX Runtime)(?: \w+ (prepacked))?"


def random_shapes(text: str) -> dict[tuple[str, str, str, str], list[float]]:
    """Printed speedups at random shapes, by cell, dtype, kind and baseline."""
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for alone, cell, rest in re.findall(r"^(1 thread: )?(\w+) [\dx]+; (.*)$", text, re.M):
        for dtype, kind, ratios in re.findall(r"(\w+) (\w+): ([^;]+)", rest):
            for ratio, baseline, packed in re.findall(RATIOS, ratios):
                kinds = " ".join(filter(None, (packed, kind))) + ", 1 thread" * bool(alone)
                found.setdefault((cell, dtype, kinds, baseline), []).append(1 / float(ratio))
    initials = "nPO"  # of the baselines, in the order of the tables
    return dict(sorted(found.items(), key=lambda i: ("1" in i[0][2], initials.index(i[0][3][0]))))


def test_the_page_of_benchmarks_has_the_tables_that_its_commands_print() -> None:
    page = (support.ROOT / "docs/benchmarks.md").read_text()
    command = re.findall(r"^python -m lltm\.benchmark (--shapes .* .*)$", page, re.MULTILINE)[0]
    options = parser("", None).parse_args(command.split())
    stored = samples(CELLS)
    measured = {case: Row(str(case), stored[str(case)], {}, {}) for case in cases(options)}
    assert "\n".join(tables(measured)).strip() in page
    assert "\n".join(sweep.table(random_shapes(SWEEP))) in page


def test_the_figures_of_the_readme_follow_from_the_stored_runs() -> None:
    shapes = [f"{shape}, {{}}" for shape in chart.SHAPES]
    stored, sampled = samples(CELLS), random_shapes(SWEEP)
    for cell in ("GRU", "LSTM"):
        every, some = [], []
        for kind in ("training", "inference"):
            for dtype in ("float32", "bfloat16"):
                titles = (f"{cell} sequence, {kind}, {shape.format(dtype)}" for shape in shapes)
                rows = (Row(title, stored[title], {}, {}) for title in titles)
                found = sorted(row.speedup(f"nn.{cell}") for row in rows)
                every.append(f"{speedup_text(found[0])} to {speedup_text(found[-1])}")
                random = sampled[cell, dtype, kind, f"nn.{cell}"]
                middle, worst = map(speedup_text, (statistics.median(random), min(random)))
                some.append(f"{middle} ({worst})")
                if (kind, dtype) == ("training", "float32"):
                    first = " ".join(README.partition("```")[0].split())
                    assert f"{cell} training is {middle} times as fast as `nn.{cell}`" in first
        assert f"| {cell}, these 4 shapes | {' | '.join(every)} |" in README
        assert f"| {cell}, 60 random shapes | {' | '.join(some)} |" in README
        (picture,) = re.findall(r"!\[(.*?)\]\(docs/speed.png\)", README)
        training, inference = picture.split("Inference: ")
        assert f"{cell} {every[0]}" in training
        assert f"{cell} {every[2]}" in inference


def test_a_chart_has_the_speedups_and_no_background(tmp_path: Path) -> None:
    """Matplotlib names chart elements in comments."""
    pytest.importorskip("matplotlib", reason="part of the bench extra")
    run = samples(CELLS)
    chart.draw(run, tmp_path / "chart.svg")
    picture = (tmp_path / "chart.svg").read_text()
    assert not re.search(r"fill: #(?:f{3}|f{6}|0{3}|0{6})\b", picture)
    shown = re.findall(r"<!-- ([\d.]+)× -->", picture)
    assert shown == [
        speedup_text(speedup)
        for kind in chart.KINDS
        for cell in ("GRU", "LSTM")
        for speedup in chart.speedups(run, cell, kind)
    ]
