"""Benchmarks: implementations, programs, and documented results."""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import bench_cuda
import pytest
import support
import sweep
import torch

from lltm.benchmark import __main__ as program
from lltm.benchmark.cases import GATES, Case
from lltm.benchmark.implementations import OURS, Layer, implementations
from lltm.benchmark.options import cases, finish, numbered, parser
from lltm.benchmark.report import Row, samples, speedup_text
from lltm.benchmark.timing import Sampler, Settings, measure
from lltm.benchmark.user_model import compare_model

RUN = support.ROOT / "benchmarks/results/2026-11-25-epyc-zen5-2-cores"
CELLS = RUN / "layers.json"
TABLES = RUN.with_name("2026-12-01-xeon-amx-2-cores")  # rows of the tables in docs/benchmarks.md
SWEEPS = {  # rows of the README's table
    "Zen 5, 2 cores": RUN,
    "Zen 4, 2 cores": RUN.with_name("2026-11-28-epyc-zen4-2-cores"),
    "Xeon (AMX), 2 cores": TABLES,
}
STEP, SEQUENCE = Case((3, 5, 6)), Case((4, 3, 5, 6))
PACKED, STACK = replace(SEQUENCE, packed=True), replace(SEQUENCE, layers=3, directions=2)
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


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("case", [STEP, SEQUENCE, PACKED, STACK], ids=str)
def test_implementations_with_the_same_parameters_agree(cell: str, case: Case) -> None:
    """Only implementations whose arithmetic matches are compared."""
    case = replace(case, training=True, cell=cell)
    makes = implementations(case, checkpoint_steps=2)
    assert ("lltm, checkpointed" in makes) == (not case.is_step)
    found = {name: Layer(make, case) for name, make in makes.items()}
    ours = found[OURS]
    weights = sum(p.numel() for p in ours.module.parameters() if p.dim() == 2)
    assert case.weights == weights
    passes = 2 if case.is_step else 3
    assert case.flops == passes * 2 * weights * ours.input.shape[:-1].numel()
    for name, layer in found.items():
        layer.backward(layer.forward())
        assert all(parameter.grad is not None for parameter in layer.module.parameters())
        assert (layer.input.grad is None) == case.is_step
        if cell != "lltm" or not name.startswith("nn."):
            layer.module.load_state_dict(ours.module.state_dict())
            torch.testing.assert_close(layer.forward(), ours.forward())


@pytest.mark.parametrize("cell", GATES)
def test_prepacked_implementations_agree(cell: str) -> None:
    case = replace(SEQUENCE, cell=cell)
    makes = implementations(case, prepack=True)
    other = f"nn.{case.baseline}"
    onnx_runtime = partial(sweep.OnnxRuntime, makes[other])
    pairs = [(OURS, makes["lltm, prepacked"], 1e-6), (OURS, makes["lltm, int8"], 0.05)]
    pairs += [(other, makes[f"{other}, int8"], 0.05), (other, onnx_runtime, 1e-6)]
    with torch.no_grad():
        for name, make, atol in pairs:
            expected, layer = Layer(makes[name], case), Layer(make, case)
            layer.input, layer.state = expected.input, expected.state
            torch.testing.assert_close(layer.forward(), expected.forward(), rtol=0, atol=atol)
    assert not {"lltm, prepacked", "lltm, int8"} & {*implementations(STEP, prepack=True)}


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    program = str(support.ROOT / "benchmarks/bench_cuda.py")
    options = ["--device=cpu", "--quick", "--rounds=1", "--cell=gru", "--dtype=float32"]
    options += ["--shapes=4,3,5,8", "--json=out.json", "--form", *bench_cuda.FORMS]
    shown = support.run_forked(program, *options, cwd=tmp_path).stdout
    titles = [row["title"] for row in rows_of(tmp_path / "out.json")]
    endings = ["", ", packed", ", bidirectional", ", 3 layers"]
    assert [title.partition("float32")[2] for title in titles[::2]] == endings
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    assert [[*json.loads(line)] for line in lines] == [[f"{t}: seconds a step"] for t in titles]


SHAPES = ["--quick", "--shapes", "2,3,4", "3,2,3,4", "--dtype", "float32", "--json", "out.json"]


def run_program(*arguments: str, cwd: Path) -> str:
    return support.run_forked("-m", "lltm.benchmark", *arguments, cwd=cwd).stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    assert all(f"\n  {json.dumps(row)}" in text for row in rows), "a row a line"
    return rows


def test_the_benchmark_of_a_user_measures_and_compares_with_an_earlier_run(tmp_path: Path) -> None:
    shown = run_program(*SHAPES, "--cell", "lltm", "gru", cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80, "a terminal"
    draws = find_spec("matplotlib") is not None and "No verdict: the load is" not in shown
    assert (tmp_path / "lltm-benchmark.png").exists() == draws
    rows = rows_of(tmp_path / "out.json")
    beside = {row["title"].split(", ")[0]: [*row["seconds"]][-1] for row in rows}
    assert beside == {
        "LLTM one step": "nn.LSTMCell",
        "LLTM sequence": "nn.LSTM",
        "GRU one step": "nn.GRUCell",
        "GRU sequence": "nn.GRU",
    }
    assert len(rows) == 2 * len(beside)
    assert all(len(row["seconds"][OURS]) == 3 for row in rows)
    again = [*SHAPES[:-1], "new/out.json", "--compare", "out.json", "--cell", "gru"]
    shown = run_program(*again, cwd=tmp_path)
    pattern = r"^  GRU one step, \w+, B=2 I=3 H=4, float32\n    earlier .* speedup +\d"
    assert len(re.findall(pattern, shown, re.MULTILINE)) == 2
    assert rows_of(tmp_path / "new" / "out.json")


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--processes"])
def test_numbers_below_one_and_other_shapes_are_refused(option: str, capsys: Any) -> None:
    for value in ("-3", "0", "1.5", "many"):
        with pytest.raises(SystemExit):
            program.main([option, value])
        assert f"expected an integer of at least 1, got {value}" in capsys.readouterr().err
    for value in ("100,16", "100x16x0x4", "1,2,-3", "a,b,c"):
        with pytest.raises(SystemExit):
            parser("", None).parse_args(["--shapes", value])
        said = f"expected B,I,H for one step, T,B,I,H for a sequence, got {value}"
        assert said in capsys.readouterr().err
    for arguments, said in (
        (["--threads", "1025"], "expected at most 1024 threads, got 1025"),
        (["--json", "/proc/a"], "cannot write /proc/a"),
    ):
        with pytest.raises(SystemExit):
            program.main(arguments)
        assert said in capsys.readouterr().err
    found = parser("", None).parse_args(["--shapes", "2x3x4", "5×2×3×4"]).shapes
    assert found == [(2, 3, 4), (5, 2, 3, 4)]


def test_an_interrupted_run_writes_what_was_measured(tmp_path: Path, capsys: Any) -> None:
    def interrupted() -> Iterator[Row]:
        for title in numbered(["a", "b", "c"]):
            if title == "c":
                raise KeyboardInterrupt
            yield Row(title, {OURS: [1.0]}, {OURS: 1}, {})

    options = argparse.Namespace(compare=None, json=tmp_path / "out.json")
    with pytest.raises(SystemExit, match="130"):
        finish(options, SETTINGS, interrupted())
    assert [row["title"] for row in rows_of(options.json)] == ["a", "b"]
    lines = ["case 1 of 3", "case 2 of 3, about 0 min left", "case 3 of 3, about 0 min left"]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_case_that_exceeds_the_memory_is_named(tmp_path: Path) -> None:
    options = [*SHAPES[:1], "--cell=gru", "--dtype=float32", "--json=out.json"]
    options += ["--shapes", "2,3,4", f"1,{10**7},{10**7}"]
    run = support.run_python("-m", "lltm.benchmark", *options, cwd=tmp_path, check=False)
    assert re.search(r"^GRU one step, inference, B=1 I=10000000 .*memory", run.stderr, re.M)
    assert "Traceback" not in run.stderr
    assert len(rows_of(tmp_path / "out.json")) == 2, "written"


def test_a_busy_system_gets_no_verdict(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--quick", "--shapes", "2,3,4", "--cell", "gru", "--dtype", "float32"]
    options = parser("", None).parse_args(arguments)
    options.plot = tmp_path / "plot.png"
    busy = replace(SETTINGS, rounds=1, load="the load is 9.0 on 2 cores")
    assert len([*program.layers(options, busy)]) == 2
    assert capsys.readouterr().out.endswith("\nNo verdict: the load is 9.0 on 2 cores.\n")
    assert not options.plot.exists()
    assert len([*compare_model(lambda: (torch.nn.GRU(2, 3), torch.randn(4, 2)), busy)]) == 2
    assert "No verdict on training: the load is 9.0 on 2 cores." in capsys.readouterr().out


def test_concurrent_calls_are_counted(tmp_path: Path) -> None:
    """By processes, and by threads of a process."""
    options = ["--quick", "--rounds=1", "--threads=1", "--cell=gru", "--dtype=float32"]
    options = ["-m", "lltm.benchmark", *options, "--shapes=3,2,3,4", "--json=out.json"]
    processes = support.run_python(*options, "--processes", "2", cwd=tmp_path)
    titles = [row["title"].split(", ") for row in rows_of(tmp_path / "out.json")]
    assert [title[1] for title in titles] == ["inference", "training"]
    callers = support.run_python(*options, "--callers", "3", cwd=tmp_path)
    rows = rows_of(tmp_path / "out.json")
    assert [row["title"][-10:] for row in rows] == ["callers: 3"]
    names = [f"{name}{part}" for name in (OURS, "nn.GRU") for part in ("", ", 99th percentile")]
    assert all([*row["seconds"]] == names and not row["skipped"] for row in rows)
    for run, count in ((processes, 4), (callers, 2)):
        shown = re.findall(r"^  (?:lltm|nn\.GRU) +\d+ +[\d.]+ m?u?s ", run.stdout, re.M)
        assert len(shown) == count


def test_memory_is_shown_with_activation_checkpoints(tmp_path: Path) -> None:
    options = ["--quick", "--rounds=1", "--cell=gru", "--dtype=float32", "--shapes=64,4,3,32"]
    options.append("--checkpoint-steps=8")
    shown = support.run_python("-m", "lltm.benchmark", *options, cwd=tmp_path).stdout
    saved = re.findall(r"^  (lltm.*?|nn\.GRU) +([\d.]+) H +\d+ MiB$", shown, re.M)
    assert [name for name, _ in saved] == [OURS, "nn.GRU", "lltm, checkpointed"]
    assert float(saved[2][1]) < float(saved[0][1]) / 2
    assert shown.count("saved for backward") == 1, "only in training"


def test_a_user_s_model_is_timed_before_and_after_replace(tmp_path: Path, capsys: Any) -> None:
    """Includes several inputs and a shared GRU."""
    page = (support.ROOT / "docs/performance.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(# my_model\.py\n.*?)^```", page, re.M | re.S)
    (command,) = re.findall(r"^python -m (lltm\.benchmark --model .*)$", page, re.M)
    (tmp_path / "my_model.py").write_text(shown, encoding="utf-8")
    options = ["--quick", "--rounds", "1", "--threads", "1", "--json", "out.json"]
    printed = support.run_python("-m", *command.split(), *options, cwd=tmp_path).stdout
    assert "\nreplaced: the model\n" in printed
    rows = rows_of(tmp_path / "out.json")
    assert [row["title"] for row in rows] == ["model, inference", "model, training"]
    assert all([*row["seconds"]] == [OURS, "torch.nn"] for row in rows)
    verdict = r"With lltm, \w+ is [\d.]+ times as fast|No verdict on \w+: the load is .*"
    assert len(re.findall(rf"^(?:{verdict})\.$", printed, re.M)) == 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.GRU(3, 4), torch.nn.GRUCell(4, 4)

        def forward(self, x: Any, h: Any, scale: float) -> dict[str, Any]:
            output, h = self.first(x, h)
            return {"last": [scale * self.second(output[-1], h[0])], "length": torch.tensor(5)}

    inputs = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    model = Model()

    def compared(made: Any) -> list[Row]:
        return [*compare_model(lambda: made, replace(SETTINGS, rounds=1))]

    for made in ((model, (*inputs, 2.0)), (model, inputs, {"scale": 2.0})):
        assert len(compared(made)) == 2
        assert type(model.first) is torch.nn.GRU
    assert not compared((torch.nn.Linear(2, 3), torch.randn(2)))
    assert capsys.readouterr().out.endswith("No times: lltm replaces no module of this model.\n")
    for wrong, got in ((model, "Model"), ((inputs[0], model), r"\(Tensor, Model\)")):
        with pytest.raises(SystemExit, match=f"expected a function that returns .*, got {got}$"):
            compared(wrong)
    with pytest.raises(RuntimeError, match=r"input\.size"):  # of torch.nn, not of lltm
        compared((torch.nn.GRU(3, 4), torch.randn(5, 2, 4)))


def lines_of(run: Path) -> list[dict[str, str]]:
    return [*csv.DictReader((run / "sweep.csv").read_text(encoding="utf-8").splitlines())]


def test_the_page_of_benchmarks_has_the_tables_of_the_stored_runs() -> None:
    page = (support.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for usual in (True, False):
        lines = filter(lambda line: sweep.is_usual(line) == usual, lines_of(TABLES))
        assert "\n".join(sweep.table(sweep.speedups(lines, threads="2"))) in page


def test_the_first_page_has_the_speedups_of_usual_shapes() -> None:
    page = (support.ROOT / "README.md").read_text(encoding="utf-8")
    stored = samples(CELLS)
    shapes = ["100,16,32,128", "100,64,128,256", "100,1,128,256", "50,128,512,512"]
    options = parser("", None).parse_args(["--dtype", "float32", "--shapes", *shapes])
    picture = []
    for training, cell in product((True, False), ("gru", "lstm")):
        chosen = (c for c in cases(options) if (c.training, c.cell) == (training, cell))
        rows = (Row("", stored[str(c)], {}, {}) for c in chosen)
        speedups = [row.speedup(f"nn.{cell.upper()}") for row in rows]
        least, most = (speedup_text(limit(speedups)) for limit in (min, max))
        picture.append(f"{cell.upper()} {least} to {most}")
    trained, inferred = (", ".join(picture[k : k + 2]) for k in (0, 2))
    assert f"float32. Training: {trained}. Inference: {inferred}](docs/speed.png)" in page
    for cpu, run in SWEEPS.items():
        usual = [*filter(sweep.is_usual, lines_of(run))]
        for row in sweep.summary(sweep.speedups(usual, threads="2")):
            assert f"| {cpu}, {row}" in page


def test_random_shapes_are_usual_or_small() -> None:
    for usual, multiple in ((True, 1), (True, 8), (False, 1)):
        shapes = [*sweep.drawn(100, 7, usual, multiple)]
        assert shapes == [*sweep.drawn(100, 7, usual, multiple)]
        for t, b, i, h in shapes:
            assert (t >= 10 and i >= 16 and h >= 16) == usual
            assert t <= 500
            assert b <= 256
            assert max(i, h) <= 1024
            assert i % multiple == h % multiple == 0


def test_a_sweep_writes_what_it_shows(tmp_path: Path) -> None:
    program = str(support.ROOT / "benchmarks/sweep.py")
    options = ["--quick", "--rounds=1", "--cell=gru", "--dtype=float32", "--csv=out.csv"]
    shapes = ["--shapes", "10,1,16,16", "11,2,17,16", "3,2,4,5", "3,2,5,4"]
    shown = support.run_forked(program, *options, *shapes, "--json=out.json", cwd=tmp_path).stdout
    assert len(rows_of(tmp_path / "out.json")) == 8
    stored = support.run_forked(program, "--stored=out.csv", cwd=tmp_path).stdout
    assert re.findall(r"^(\w+) shapes, threads: \d+$", stored, re.M) == ["Usual", "Small"]
    assert stored in shown or "No verdict: the load is" in shown
