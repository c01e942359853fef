"""What the benchmarks compare, and what they do with contenders that fail and with goals; what the
pages show of stored runs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import layers
import own_cells
import pytest
import support
import sweep
import torch
from goals import sequence_goal
from machine import PEAK, READ, bounds, read_weights, weight_passes
from runtimes import ONNX_RUNTIME, RUNTIMES, runtimes
from torch import nn
from users import USERS, user_cases

from lltm.benchmark import __main__ as benchmark
from lltm.benchmark import timing
from lltm.benchmark.__main__ import cases, parser
from lltm.benchmark.cases import GATES, Case
from lltm.benchmark.contenders import OURS, TUTORIAL, Layer, contenders
from lltm.benchmark.report import Row, samples, tables
from lltm.benchmark.timing import Sampler, Settings, measure

RESULTS = support.ROOT / "benchmarks" / "results"
# Of the README: three cells.
CELLS = RESULTS / "2026-11-25-epyc-zen5-2-cores" / "layers.json"

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


# Warming up, counting, the first round, the second: each round with a call before.
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_a_contender_that_fails_is_left_out_with_the_reason(call: int) -> None:
    builds = {"ours": sampler, "bad": lambda: failing_at(call), "theirs": sampler}
    row = measure("title", builds, SETTINGS)
    assert row.seconds == {"ours": [1.0] * 3, "theirs": [1.0] * 3}
    assert row.skipped == {"bad": "of any kind"}
    assert row.iterations.keys() == row.seconds.keys()
    assert "not measured: of any kind" in "\n".join(row.lines())


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_the_first_contender_has_to_run(call: int) -> None:
    with pytest.raises(IndexError):
        measure("title", {"ours": lambda: failing_at(call), "theirs": sampler}, SETTINGS)


@pytest.mark.parametrize("spins", [0.0, 0.035, 1e9])
def test_a_turn_begins_when_no_other_thread_runs(
    spins: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of the test's own; a thread spins for so many seconds of it."""
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux only")
def test_a_thread_that_runs_is_seen() -> None:
    stop = threading.Event()

    def spin() -> None:
        # What a thread does without the interpreter's lock, as those of OpenMP.
        matrix = torch.randn(300, 300)
        while not stop.is_set():
            torch.mm(matrix, matrix)

    def wait_for(expected: bool) -> None:
        deadline = time.monotonic() + 60
        while timing.others_run() != expected:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    wait_for(False)
    thread = threading.Thread(target=spin)
    thread.start()
    wait_for(True)
    stop.set()
    thread.join()
    wait_for(False)


# ----- Other runtimes ------------------------------------------------------------

MODULES = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"}
LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}


@pytest.fixture
def signal_stack() -> Iterator[None]:
    """Restores the stack that signals are handled on: OpenVINO leaves one that it has freed."""
    libc, stack = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # a stack_t
    assert libc.sigaltstack(None, stack) == 0
    yield
    gc.collect()
    assert libc.sigaltstack(stack, None) == 0


@pytest.mark.usefixtures("signal_stack")
@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("shape", [(7, 3, 5, 9), (1, 1, 16, 32), (20, 16, 32, 65)])
def test_a_layer_of_another_runtime_equals_torchs(
    name: str, cell: str, shape: tuple[int, ...]
) -> None:
    for module in ("onnx", MODULES[name]):
        pytest.importorskip(module, reason="part of the bench extra")
    case = Case(shape, cell=cell)
    layer = Layer(runtimes(case)[f"{name} {cell.upper()}"], case)
    theirs: Any = layer.module.layer
    assert type(theirs) is LAYERS[cell]
    with torch.no_grad():
        for input in (layer.input, layer.input, torch.empty_like(layer.input)):
            input.normal_()
            expected, expected_states = theirs(input, layer.state)
            output, states = layer.module(input, layer.state)
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(states, expected_states)


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_is_not_installed_is_left_out_with_a_line_that_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # importing it fails
    case = Case((2, 3, 4, 5))
    made = f"{name} LSTM"
    makes = {OURS: contenders(case)[OURS], made: runtimes(case)[made]}
    row = layers.measure_case("title", case, makes, SETTINGS, lambda case, against: None)
    assert made not in row.seconds
    line = f"{made} not measured: needs {MODULES[name]}: pip install {MODULES[name]}"
    assert line in [" ".join(text.split()) for text in row.lines()]


# ----- The contenders -------------------------------------------------------------

CONTENDERS = [
    pytest.param(case, name, id=f"{case.module}-{name}")
    for cell in GATES
    for case in (
        Case((3, 5, 6), training=True, cell=cell),
        Case((4, 3, 5, 6), training=True, cell=cell),
    )
    for name in contenders(case)
]


@pytest.mark.parametrize(("case", "name"), CONTENDERS)
def test_a_contender_computes_a_case_and_its_gradients(case: Case, name: str) -> None:
    layer = Layer(contenders(case)[name], case)
    results = layer.forward()
    states = 1 if case.cell == "gru" or not case.is_step else 2
    assert [result.shape for result in results] == [(*case.shape[:-2], 6)] * states
    layer.backward(results)
    assert all(parameter.grad is not None for parameter in layer.module.parameters())
    assert (layer.input.grad is None) == case.is_step


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("shape", [(3, 5, 6), (4, 3, 5, 6)])
def test_contenders_with_the_same_parameters_compute_the_same(
    cell: str, shape: tuple[int, ...]
) -> None:
    """Else the ratio says nothing; of the LLTM those of its arithmetic."""
    case = Case(shape, cell=cell)
    ours, *others = (
        Layer(make, case)
        for name, make in contenders(case).items()
        if cell != "lltm" or not name.startswith("nn.")
    )
    assert len(others) == (2 if cell == "lltm" else 1)
    with torch.no_grad():
        for other in others:
            other.module.load_state_dict(ours.module.state_dict())
            torch.testing.assert_close(other.forward(), ours.forward())


def test_the_tutorials_contender_runs_the_tutorials_code() -> None:
    """And not the kernels that its classes inherit."""
    for case in (Case((3, 5, 6)), Case((4, 3, 5, 6))):
        layer = Layer(contenders(case)[TUTORIAL], case)
        with torch.no_grad(), torch.profiler.profile() as profile:
            layer.forward()
        keys = [event.key for event in profile.key_averages()]
        assert "aten::addmm" in keys
        assert not [key for key in keys if key.startswith("lltm::")]


# ----- The shapes of users ----------------------------------------------------------


def test_users_have_the_lstm_and_the_gru() -> None:
    found = dict(user_cases(["lltm", "lstm", "gru"], [torch.float32]))
    assert len(found) == 2 * (2 * len(USERS) - 1)  # both cells in both directions, one GRU alone
    assert {case.cell for case in found.values()} == {"lstm", "gru"}
    assert all(title.startswith(f"{case}, ") for title, case in found.items())
    assert not dict(user_cases(["lltm"], [torch.float32]))
    (taggers,) = (t for t in found if t.endswith("taggers") and "GRU" in t and "training" in t)
    sizes = "T=40 B=32 I=400 H=256, bidirectional, packed"
    assert taggers == f"GRU sequence, training, {sizes}, float32, taggers"


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_case_may_have_layers_directions_and_packed_rows(cell: str) -> None:
    case = Case(
        (9, 3, 5, 6), training=True, cell=cell, num_layers=2, bidirectional=True, packed=True
    )
    assert case.lengths.tolist() == [9, 6, 3]
    ours, theirs = (Layer(make, case) for make in contenders(case).values())
    ours.module.load_state_dict(theirs.module.state_dict())
    rows = int(case.lengths.sum())
    weights = [p for p in theirs.module.parameters() if p.dim() == 2]
    assert case.weights == sum(weight.numel() for weight in weights)
    assert case.flops == 3 * 2 * rows * case.weights
    for layer in (ours, theirs):
        (output,) = layer.forward()
        assert output.shape == (rows, 2 * 6)
        layer.backward((output,))
    torch.testing.assert_close(ours.input.grad, theirs.input.grad)
    assert not runtimes(case)


# ----- What the machine can do at most --------------------------------------------


def test_flops_and_passes_over_the_weights_of_a_case() -> None:
    products = 3 * 5 * (4 + 5)  # multiply-adds of a row, elements of the weights
    step, sequence = (3, 4, 5), (7, 3, 4, 5)
    assert Case(step).flops == 2 * 3 * products
    assert Case(step, training=True).flops == 2 * Case(step).flops
    assert Case(sequence).flops == 7 * Case(step).flops
    assert Case(sequence, training=True).flops == 3 * Case(sequence).flops
    assert weight_passes(Case(step)) == 1
    assert weight_passes(Case(step, training=True)) == 2
    assert weight_passes(Case(sequence)) == pytest.approx((4 + 7 * 5) / 9)
    assert weight_passes(Case(sequence, training=True)) == pytest.approx(2 * (4 + 7 * 5) / 9 + 1)
    assert Case(sequence, cell="gru").flops == Case(sequence).flops
    assert 3 * Case(sequence, cell="lstm").flops == 4 * Case(sequence).flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_as_many_bytes_are_read_as_the_weights_have(dtype: torch.dtype) -> None:
    case = Case((1, 6, 10), dtype)
    read: Any = read_weights(case)
    assert read.args[0].nbytes == dtype.itemsize * 3 * 10 * (6 + 10)
    assert read() == read.args[0].sum()


def test_the_bound_is_the_longer_of_both_times() -> None:
    case = Case((10, 64, 128, 256))
    # Ours takes 4 and 8 seconds; 1024^3 multiply-adds take 100 and 200, a pass 0.1.
    seconds = {OURS: [4.0, 8.0], PEAK: [100.0, 200.0], READ: [0.1, 0.1]}
    found = bounds(Row("title", seconds, {}, {}), case)
    products = 10 * 64 * 3 * 256 * (128 + 256) / 1024**3
    passes = (128 + 10 * 256) / (128 + 256)
    assert found[PEAK].seconds == pytest.approx(products * 150)
    assert found[PEAK].share == pytest.approx(products * 25)
    assert found[READ].seconds == pytest.approx(passes * 0.1)
    assert found[READ].share == pytest.approx(passes / 60)


def test_ratios_and_shares_are_compared_with_goals() -> None:
    goals = {TUTORIAL: 1e9, "nn.LSTM": 1e-9, PEAK: 1e9, READ: 0.0}
    case = Case((3, 2, 3, 4))
    row = layers.measure_case(
        "title", case, contenders(case), SETTINGS, lambda case, against: goals.get(against)
    )
    found = {check.what: check.met for check in row.checks}
    assert found == {
        f"{OURS} / nn.LSTM": False,
        f"{OURS} / {TUTORIAL}": True,
        f"share of the rate of {PEAK}": False,
        f"share of the rate of {READ}": True,
    }
    assert {str(check) for check in row.checks} < {line.strip() for line in row.lines()}


@pytest.mark.parametrize(
    ("case", "against", "limit"),
    [
        (Case((100, 16, 32, 128), cell="gru"), "nn.GRU", 0.18),
        (Case((100, 16, 32, 128), torch.bfloat16, training=True, cell="gru"), "nn.GRU", 0.09),
        (Case((50, 128, 512, 512), torch.bfloat16, training=True, cell="gru"), "nn.GRU", 0.45),
        (Case((1, 1, 128, 256), training=True, cell="gru"), "nn.GRU", 0.80),
        (Case((60, 33, 100, 200), cell="gru"), f"{ONNX_RUNTIME}, opset 22", 0.42),
        (Case((60, 33, 100, 200), torch.bfloat16, cell="gru"), ONNX_RUNTIME, None),
        (Case((60, 33, 100, 200), cell="gru", num_layers=2), "nn.GRU", None),
        (Case((7, 1, 3, 4), training=True, cell="gru"), "nn.GRU", 0.15),
        (Case((7, 2, 3, 4), cell="gru"), "nn.GRU", None),
        (Case((7, 2, 3, 4), cell="lstm"), "nn.LSTM", 1.0),
        (Case((7, 2, 3, 4), cell="lstm"), ONNX_RUNTIME, None),
    ],
    ids=str,
)
def test_goals_of_the_lstm_and_the_gru(case: Case, against: str, limit: float | None) -> None:
    assert sequence_goal(case, against) == limit


# ----- The programs ------------------------------------------------------------

SHAPES = ["--quick", "--shapes", "2,3,4", "3,2,3,4", "--dtype", "float32", "--json", "out.json"]


def run_benchmark(*arguments: str, cwd: Path) -> str:
    run = support.run_forked(*arguments, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_benchmark_of_a_user_measures_and_compares_with_an_earlier_run(tmp_path: Path) -> None:
    shown = run_benchmark("-m", "lltm.benchmark", *SHAPES, cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
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
    again = ["--quick", "--shapes", "2,3,4", "--dtype", "float32", "--compare", "out.json"]
    shown = run_benchmark("-m", "lltm.benchmark", *again, "--cell", "gru", cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80
    assert "LSTM" not in shown
    pattern = r"^  GRU one step, \w+, B=2 I=3 H=4, float32\n    earlier .* now / earlier +\d"
    assert len(re.findall(pattern, shown, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--json", "file/out.json"), "--json: cannot write file/out.json: "),
        (("--json", "folder"), "--json: cannot write folder"),
        (("--plot", "file/out.png"), "--plot: cannot write file/out.png: "),
        (("--compare", "missing.json"), "--compare: cannot read missing.json: "),
        (("--compare", "file"), "--compare: file is no file of --json"),
        (("--compare", "list.json"), "--compare: list.json is no file of --json"),
    ],
)
def test_files_are_refused_before_anything_is_measured(
    tmp_path: Path, option: tuple[str, str], said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("no JSON")
    (tmp_path / "list.json").write_text("[]")
    run = support.run_forked("-m", "lltm.benchmark", *SHAPES, *option, cwd=tmp_path)
    assert run.returncode == 2
    assert "one step, " not in run.stdout
    assert f"error: argument {said}" in run.stderr.splitlines()[-1]


def test_folders_of_results_are_made(tmp_path: Path) -> None:
    options = [*SHAPES[:-1], "results/new/out.json", "--cell", "gru", "--plot", "pictures/out.svg"]
    run_benchmark("-m", "lltm.benchmark", *options, cwd=tmp_path)
    assert json.loads((tmp_path / "results/new/out.json").read_text())["rows"]
    assert (tmp_path / "pictures").is_dir()


def test_a_file_from_before_there_were_other_cells_is_about_the_lltm(tmp_path: Path) -> None:
    titles = ("one step, training, B=1", "sequence, inference, T=1", "threads: sequence, T=1")
    rows = [{"title": title, "seconds": {OURS: [1.0]}} for title in titles]
    (tmp_path / "old.json").write_text(json.dumps({"rows": rows}))
    assert list(samples(tmp_path / "old.json")) == [
        "LLTM one step, training, B=1",
        "LLTM sequence, inference, T=1",
        "threads: sequence, T=1",
    ]


def test_the_readme_has_the_table_that_its_command_prints() -> None:
    """With the figures of the stored run."""
    readme = (support.ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python -m lltm\.benchmark (.*)$", readme, re.MULTILINE)
    options = parser("", None).parse_args(command.split())
    stored = samples(CELLS)
    measured = {case: Row(str(case), stored[str(case)], {}, {}) for case in cases(options)}
    shown = "\n".join(tables(measured)).strip()
    (table,) = re.findall(r"^\| T×B.*?(?=\n\n)", readme, re.MULTILINE | re.DOTALL)
    assert table == shown


def test_the_first_sentences_of_the_readme_have_the_tables_extremes() -> None:
    readme = (support.ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \d+×.*$", readme, re.MULTILINE)
    assert len(rows) == 8

    def extremes(cell: str, kind: int) -> str:
        column = {"GRU": 3, "LSTM": 4}[cell]
        values = [float(row.split("|")[column].split(", ")[kind]) for row in rows]
        return f"{min(values):.2f} to {max(values):.2f}"

    first = " ".join(readme.partition("One line changes")[0].split())
    assert re.findall(r"0\.\d\d to \d\.\d\d", first) == [
        extremes(cell, kind) for kind in (0, 1) for cell in ("GRU", "LSTM")
    ]


def test_tables_say_what_was_not_measured() -> None:
    both = [Case((2, 3, 4), training=training, cell="gru") for training in (False, True)]
    theirs = {OURS: [2.0, 2.0, 2.0], "nn.GRUCell": [1.0, 4.0, 4.0]}
    rows = [Row("", seconds, {}, {}) for seconds in (theirs, {"nn.GRUCell": [1.0]})]
    assert [*tables(dict(zip(both, rows, strict=True)))] == [
        "",
        "| B×I×H |         | GRU     |",
        "| ----- | ------- | ------- |",
        "| 2×3×4 | float32 | -, 0.50 |",
    ]


def test_the_help_of_the_benchmark_fits_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for program in (
        ("-m", "lltm.benchmark"),
        (str(support.ROOT / "benchmarks/layers.py"),),
        (str(support.ROOT / "benchmarks/own_cells.py"),),
    ):
        shown = run_benchmark(*program, "--help", cwd=tmp_path)
        assert max(map(len, shown.splitlines())) <= 80


def test_a_missing_matplotlib_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import runpy, sys\n"
        "sys.modules['matplotlib'] = None\n"
        "runpy.run_module('lltm.benchmark', run_name='__main__')\n"
    )
    shown = run_benchmark("run.py", *SHAPES, cwd=tmp_path)
    assert 0 < shown.index("no picture: it needs matplotlib") < shown.index("one step, ")
    assert "Picture: " not in shown
    assert not (tmp_path / "lltm-benchmark.png").exists()


def test_the_tutorials_table_misses_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    monkeypatch.setattr(benchmark, "tutorial", lambda settings: [])
    monkeypatch.setattr(sys, "argv", ["lltm.benchmark", "--tutorial"])
    benchmark.main()
    shown = capsys.readouterr().out
    assert "threads: " in shown
    assert "picture" not in shown


def test_the_benchmark_of_this_project_states_bounds_and_goals(tmp_path: Path) -> None:
    shown = run_benchmark(str(support.ROOT / "benchmarks/layers.py"), *SHAPES, cwd=tmp_path)
    results = json.loads((tmp_path / "out.json").read_text())
    assert len(results["rows"]) == 4 * len(GATES)
    for row in results["rows"]:
        assert row["bound"]["by"] in (PEAK, READ)
        assert row["bound"]["seconds"] > 0
        assert f"share of it in {OURS}: {row['bound']['share']:.2f}" in shown
    assert f"Goals: {sum(goal['met'] for goal in results['goals'])} of " in shown
    assert len(results["goals"]) > 0


@pytest.mark.parametrize("name", own_cells.NAMES)
def test_the_loop_over_a_cell_of_the_gallery_computes_what_the_layer_does(name: str) -> None:
    cell = own_cells.cell_of(name)
    ours, loop = (
        make(cell, 3, 4, dtype=torch.float64) for make in (own_cells.Ours, own_cells.Loop)
    )
    loop.load_state_dict(ours.state_dict())
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(loop(x, None)[0], ours(x, None)[0])


def test_cells_of_the_gallery_are_measured_beside_loops(tmp_path: Path) -> None:
    """The compiled one would take minutes: it is left out, with the reason."""
    program = str(support.ROOT / "benchmarks/own_cells.py")
    options = ["--quick", "--compile", "--cell", "indrnn", "mgu", "--shapes", "101,1,2,3"]
    shown = run_benchmark(
        program, *options, "--dtype", "float32", "--json", "out.json", cwd=tmp_path
    )
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["title"] for row in rows] == [
        f"{name} sequence, training, T=101 B=1 I=2 H=3, float32" for name in ("INDRNN", "MGU")
    ]
    for row in rows:
        assert [*row["seconds"]] == [OURS, own_cells.LOOP]
        assert row["skipped"] == {own_cells.COMPILED: "compiling over 100 steps takes too long"}


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


BACKGROUND = r"fill: #(?:f{3}|f{6}|0{3}|0{6})\b"


def test_a_chart_has_no_background_and_a_logarithmic_axis(
    chart: ModuleType, tmp_path: Path
) -> None:
    """So it is legible on light and dark pages; here, of a run of one cell."""
    pytest.importorskip("matplotlib", reason="part of the bench extra")
    chart.draw(samples(CELLS), tmp_path / "chart.svg")
    picture = (tmp_path / "chart.svg").read_text()
    assert not re.search(BACKGROUND, picture)
    assert {"0.5", "1"} <= {*re.findall(r"<!-- ([\d.]+) -->\s", picture)}


def test_a_table_has_the_shapes_that_were_measured_in_full(chart: ModuleType) -> None:
    seconds = {"lltm": [0.002, 0.004, 0.006], "nn.LSTM": [0.004, 0.004, 0.004]}
    run = {
        chart.title(kind, "T=2 B=3 I=4 H=5", dtype): seconds
        for kind in chart.KINDS
        for dtype in chart.DTYPES
    }
    run[chart.title("training", "T=3 B=3 I=4 H=5", "float32")] = seconds
    assert chart.table(run).splitlines()[2:] == ["| 2×3×4×5 | 4 | 1.00 | 4 | 1.00 | 1.00 | 1.00 |"]
    gru = {name.replace("LLTM", "GRU"): {"lltm": [1.0], "nn.GRU": [4.0]} for name in run}
    assert chart.table(run | gru, "GRU").splitlines()[2].startswith("| 2×3×4×5 | 1e+03 | 0.25 |")
    slower = {name: {"lltm": [3.0], "nn.LSTM": [2.0]} for name in run}
    assert chart.ratios([run, slower], "bfloat16") == "1.00 to 1.50"


# ----- benchmarks/sweep.py ------------------------------------------------------


def test_a_sweep_draws_the_same_shapes_for_the_same_seed() -> None:
    shapes = [*sweep.drawn(50, seed=7)]
    assert shapes == [*sweep.drawn(50, seed=7)]
    assert shapes != [*sweep.drawn(50, seed=8)]
    for shape in shapes:
        assert all(1 <= size <= most for size, most in zip(shape, sweep.LIMITS, strict=True))
        assert Case(shape, cell="lstm").flops <= 2 * sweep.LARGEST


def test_a_sweep_prints_what_the_worst_rows_chose_and_draws_all(tmp_path: Path) -> None:
    seed = 39  # of a small shape
    options = ["--count", "1", "--seed", f"{seed}", "--quick", "--cell", "gru"]
    options += ["--dtype", "float32"]
    program = str(support.ROOT / "benchmarks" / "sweep.py")
    files = ["--json", "sweep.json", "--plot", "sweep.svg"]
    shown = run_benchmark(program, *options, *files, cwd=tmp_path)
    results = json.loads((tmp_path / "sweep.json").read_text())
    assert results["seed"] == seed
    assert [row["title"] for row in results["rows"]] == [
        f"GRU sequence, {kind}, T=4 B=8 I=4 H=16, float32" for kind in ("inference", "training")
    ]
    worst = shown.partition("The ten worst:\n")[2]
    assert len(re.findall(r"^\d+\.\d\d  GRU sequence, ", worst, re.MULTILINE)) == 2
    assert re.findall(r"^      lltm: .*forward: ", worst, re.MULTILINE)
    if importlib.util.find_spec("matplotlib") is None:
        assert not (tmp_path / "sweep.svg").exists()
    else:
        picture = (tmp_path / "sweep.svg").read_text()
        assert "<!-- GRU, float32 -->" in picture
        assert not re.search(BACKGROUND, picture)
