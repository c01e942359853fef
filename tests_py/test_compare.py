"""The comparison with nn.LSTM and nn.GRU in examples/compare."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor

import lltm

FOLDER = support.ROOT / "examples" / "compare"

needs_extra = support.needs_extra("compare", "sklearn", "statsmodels", "matplotlib")


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the scripts' generic module names afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None)
        if path and path.startswith(str(FOLDER)):
            del sys.modules[name]


module = importlib.import_module


TASKS = [
    "adding-200",
    "characters",
    # Fast, but only `make test-slow` has the extra.
    pytest.param("digits", marks=[needs_extra, pytest.mark.slow]),
    pytest.param("co2", marks=[needs_extra, pytest.mark.slow]),
]


def perfect(task: Any, targets: Tensor) -> Tensor:
    if task.outputs == 1:
        return targets.unsqueeze(1)
    return 1e4 * torch.nn.functional.one_hot(targets, task.outputs).float()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_scores_a_perfect_answer_and_depends_only_on_seed_and_update(name: str) -> None:
    task = module("tasks").task(name)
    for inputs, targets in (task.batch(0, 0), task.batch(1, 7), task.validation, task.test):
        if task.vocabulary is None:
            assert inputs.shape[2:] == (task.input_size,)
        assert targets.shape == inputs.shape[:2] if task.per_step else inputs.shape[1:2]
        best = 100.0 if task.higher_is_better else 0.0
        assert task.score(perfect(task, targets), targets) == pytest.approx(best, abs=1e-4)
    assert torch.equal(task.batch(2, 5)[0], task.batch(2, 5)[0])
    assert not torch.equal(task.batch(2, 5)[0], task.batch(2, 6)[0])
    training = module("training")
    counts = [
        training.Model(task, model, training.hidden_size(name, model)).parameter_count()
        for model in training.MODELS
    ]
    assert max(counts) < 1.022 * min(counts), "of equal parameter count"


def test_the_adding_problem_asks_for_the_sum_of_the_marked_numbers() -> None:
    task = module("tasks").task("adding-200")
    inputs, targets = task.batch(0, 3)
    numbers, marks = inputs.unbind(dim=2)
    for half in marks.chunk(2):
        assert (half.sum(dim=0) == 1).all()
    torch.testing.assert_close(targets, (numbers * marks).sum(dim=0))


def test_a_text_continues_from_batch_to_batch() -> None:
    task = module("tasks").task("characters")
    (first, successors), (second, _) = task.batch(0, 0), task.batch(0, 1)
    assert torch.equal(torch.cat([first[1:], second[:1]]), successors)
    assert [task.continues(update) for update in (0, 1)] == [False, True]
    # The text restarts if the next batch would not fit.
    again = next(update for update in range(1, 10_000) if not task.continues(update))
    assert torch.equal(task.batch(0, again)[0], first)


@pytest.mark.slow
@needs_extra
def test_sets_are_disjoint_and_follow_each_other_in_time() -> None:
    digits, co2 = (module("tasks").task(name) for name in ("digits", "co2"))
    images, tests = (
        {tuple(image.tolist()) for image in inputs.squeeze(2).t()}
        for inputs, _ in (digits._training, digits.test)
    )
    assert len(tests) == 360
    assert not images & tests
    # Each target is the last input of the next window.
    inputs, targets = co2.test
    assert torch.equal(inputs[-1, 1:, 0], targets[:-1])
    assert co2.validation[1][-1] == inputs[-1, 0, 0]
    assert co2._training[1][-1] == co2.validation[0][-1, 0, 0]
    assert co2.score(torch.zeros(len(targets), 1), targets) == pytest.approx(1.0)


@pytest.mark.parametrize("layer", ["lltm.LLTM", "nn.LSTM"])
def test_long_memory_closes_the_input_gates(layer: str) -> None:
    training = module("training")
    task = module("tasks").task("adding-200")
    rnn = training.Model(task, layer + training.LONG_MEMORY, 8).rnn
    bias = rnn.bias_l0 if layer == "lltm.LLTM" else rnn.bias_ih_l0 + rnn.bias_hh_l0
    gates = bias.detach().sigmoid().view(-1, 8)
    # sigmoid(-log u) = 1 / (1 + u)
    assert (gates[0] >= 1 / task.steps).all()
    assert (gates[0] <= 0.5).all()
    if layer == "nn.LSTM":  # the input gate is 1 - the forget gate
        torch.testing.assert_close(gates[1], 1 - gates[0])


def test_a_run_is_reproducible_learns_and_ends_where_the_loss_is_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, task = module("training"), module("tasks").task("adding-200")
    spec = module("results").Spec("adding-200", "lltm.LLTM", 0, 0.003, 4)
    with support.threads(1):
        first, again = training.run(spec), training.run(spec)
    assert first == again
    assert [evaluation.update for evaluation in first.evaluations] == [0, 1, 2, 3, 4]
    assert first.evaluations[-1].validation < first.evaluations[0].validation
    batch = task.batch

    def bad_from_the_third(seed: int, update: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(seed, update)
        return inputs, targets * (math.nan if update == 2 else 1)

    monkeypatch.setattr(task, "batch", bad_from_the_third)
    assert [evaluation.update for evaluation in training.run(spec).evaluations] == [0, 1, 2]


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_replaced_layer_shares_the_runs_of_torchs(cell: str) -> None:
    """Whole updates with carried state must agree."""
    training, results = module("training"), module("results")
    theirs, ours = (
        training.Trainer(results.Spec("characters", results.REPLACED[f"lltm.{cell}"], 0, 3e-3, 4))
        for _ in range(2)
    )
    assert lltm.replace_(ours.model).replaced == ["rnn"]
    for _ in range(4):
        assert ours.update() == pytest.approx(theirs.update(), rel=1e-5)


def sweep(errors: dict[int, float]) -> list[int]:
    """The rates, in order."""
    compare = module("compare")
    tried: list[int] = []
    while new := compare.next_exponents({e: errors[e] for e in tried}, (-6, -5, -4), (-10, -2)):
        tried += new
    return tried


def test_the_sweep_goes_beyond_an_edge_that_is_the_best() -> None:
    assert sweep({-6: 2, -5: 1, -4: 3}) == [-6, -5, -4]
    assert sweep({-8: 4, -7: 1, -6: 2, -5: 3, -4: 4}) == [-6, -5, -4, -7, -8]
    assert sweep({-6: 5, -5: 4, -4: 3, -3: 2, -2: 1}) == [-6, -5, -4, -3, -2]  # the limit


def test_an_interrupted_comparison_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the best validation rate; results are read from the file."""
    compare, results = module("compare"), module("results")
    path = tmp_path / "results.json"
    plan = compare.Plan(seeds=1, exponents=(-6, -5, -4), updates=1)
    errors = {0.001: 0.3, 0.00316: 0.1, 0.01: 0.2}
    started: list[Any] = []

    def do_runs(interrupt_after: float) -> None:
        def run(spec: Any) -> Any:
            if len(started) == interrupt_after:
                raise KeyboardInterrupt
            started.append(spec)
            error = errors[spec.learning_rate]
            values = ((0, 0.5, 0.9), (1, error, 0.7))
            return results.Run(spec, 8, 100, tuple(results.Evaluation(*v) for v in values))

        monkeypatch.setattr(compare, "run", run)
        with ThreadPoolExecutor(1) as pool:
            found = results.Results.load(path)
            compare.do_runs(plan, ["adding-200"], found, path, pool, jobs=1)

    with pytest.raises(KeyboardInterrupt):
        do_runs(interrupt_after=7)
    assert len(results.Results.load(path).runs) == 7
    do_runs(interrupt_after=math.inf)
    assert len(started) == len(set(started)) == 5 * (3 + 1)  # models, rates and the seed
    do_runs(interrupt_after=0)
    read = results.Results.load(path)
    read.tasks["adding-200"] = compare.describe("adding-200", updates=1)
    read.seconds_per_update["adding-200"] = {"nn.GRU": 0.5, "nn.LSTM": 0.25}
    (reported,) = read.reported("adding-200", "nn.GRU")
    assert reported.spec.learning_rate == 0.00316
    assert read.test_values("adding-200", "nn.GRU") == [0.7]
    assert read.test_values("adding-200", "nn.GRU", updates=0.5) == [0.9]
    assert read.equal_seconds("adding-200") == 0.25
    read.save(path)
    assert results.Results.load(path) == read


@pytest.mark.slow
@needs_extra
@pytest.mark.parametrize("names", [["co2"], ["characters", "digits"]], ids="+".join)
def test_the_command_ends_in_pictures_and_a_table(names: list[str], tmp_path: Path) -> None:
    command = [str(FOLDER / "compare.py"), "--quick", "--seeds", "1", "--jobs", "1"]
    # On a busy system, threads wait long for each other.
    support.run_python(
        *command, "--out", str(tmp_path), "--task", *names, timeout_s=300, OMP_NUM_THREADS="1"
    )
    results = module("results").Results.load(tmp_path / "quick" / "results.json")
    table = (tmp_path / "quick" / "summary.md").read_text()
    for name in names:
        assert results.models(name) == [*module("training").MODELS, *module("results").REPLACED]
        assert results.tasks[name].title in table
        assert (tmp_path / "quick" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (["--time", "--task", "adding-200"], "results.json before --time, got none"),
        (["--seeds", "0"], "expected --seeds of at least 1, got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare.py", "--out", str(tmp_path), *options])
        with pytest.raises(SystemExit) as end:
            module("compare").main()
        assert message in f"{end.value.code}{capsys.readouterr().err}"


def test_the_page_shows_the_stored_results() -> None:
    results = module("results").Results.load(FOLDER / "results" / "results.json")
    page = (FOLDER / "README.md").read_text()
    assert module("report").table(results) in page
    plan, training = module("compare").Plan(), module("training")
    for model in training.MODELS:
        assert list(plan.missing(results, "adding-200", model)) == []
        assert len(results.reported("adding-200", model)) == 3


def test_the_code_of_the_page_prints_what_the_page_says() -> None:
    page = (FOLDER / "README.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = "".join(text for language, text in blocks if language == "python")
    run = support.run_forked("-c", code, cwd=FOLDER)
    assert [text for language, text in blocks if language == "text"] == [run.stdout]
