"""The comparison with nn.LSTM and nn.GRU: examples/compare."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
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
    """The scripts of the example can be imported, and leave no module with so general a name."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None)
        if path and path.startswith(str(FOLDER)):
            del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


# ---- the tasks ----------------------------------------------------------------

TASKS = [
    "adding-200",
    "adding-750",
    "characters",
    # Slow not in themselves: `make test-slow` has the extra.
    pytest.param("digits", marks=[needs_extra, pytest.mark.slow]),
    pytest.param("co2", marks=[needs_extra, pytest.mark.slow]),
]


def perfect(name: str, targets: Tensor) -> Tensor:
    """The outputs of a model that knows the answer."""
    task = module("tasks").task(name)
    if task.outputs == 1:
        return targets.unsqueeze(1)
    return 1e4 * torch.nn.functional.one_hot(targets, task.outputs).float()


@pytest.mark.parametrize("name", TASKS)
def test_shapes_and_the_score_of_a_perfect_answer(name: str) -> None:
    task = module("tasks").task(name)
    for inputs, targets in (task.batch(0, 0), task.batch(1, 7), task.validation, task.test):
        rows = inputs.shape[1]
        if task.vocabulary is None:
            assert inputs.shape[2:] == (task.input_size,)
        else:
            assert inputs.max() < task.vocabulary
        assert targets.shape == (inputs.shape[:2] if task.per_step else (rows,))
        best = 100.0 if task.higher_is_better else 0.0
        assert task.score(perfect(name, targets), targets) == pytest.approx(best, abs=1e-4)
    inputs, _ = task.batch(0, 0)
    assert inputs.shape[:2] == (task.steps, task.batch_size)


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_seed_and_update_alone(name: str) -> None:
    task = module("tasks").task(name)
    for a, b in zip(task.batch(2, 5), task.batch(2, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(task.batch(2, 5)[0], task.batch(2, 6)[0])
    if name != "characters":  # a text is read in its order
        assert not torch.equal(task.batch(2, 5)[0], task.batch(3, 5)[0])


@pytest.mark.parametrize("name", ["adding-200", pytest.param("adding-750", marks=pytest.mark.slow)])
def test_the_adding_problem_asks_for_the_sum_of_the_marked_numbers(name: str) -> None:
    task = module("tasks").task(name)
    inputs, targets = task.batch(0, 3)
    numbers, marks = inputs.unbind(dim=2)
    half = task.steps // 2
    assert (marks[:half].sum(dim=0) == 1).all()
    assert (marks[half:].sum(dim=0) == 1).all()
    torch.testing.assert_close(targets, (numbers * marks).sum(dim=0))
    # Answering 1 costs the variance of the sum; over 100,000 sums it is known to 1 %.
    _, many = task.draw(100_000, torch.Generator().manual_seed(0))
    level = task.levels["always answering 1"]
    assert task.score(torch.ones(len(many), 1), many) == pytest.approx(level, rel=0.01)


def test_a_text_goes_on_from_batch_to_batch() -> None:
    task = module("tasks").task("characters")
    (first, successors), (second, _) = task.batch(0, 0), task.batch(0, 1)
    torch.testing.assert_close(successors[-1], second[0], rtol=0, atol=0)
    torch.testing.assert_close(successors[:-1], first[1:], rtol=0, atol=0)
    assert not task.continues(0)
    assert task.continues(1)
    # The text begins again where the next batch would not fit.
    again = next(update for update in range(1, 10_000) if not task.continues(update))
    torch.testing.assert_close(task.batch(0, again)[0], first, rtol=0, atol=0)


def test_bits_per_character_of_guessing() -> None:
    task = module("tasks").task("characters")
    _, targets = task.test
    guessing = torch.zeros(*targets.shape, task.outputs)
    assert task.score(guessing, targets) == pytest.approx(math.log2(task.outputs), rel=1e-5)
    assert 0 < task.levels["character frequencies"] < math.log2(task.outputs)


@pytest.mark.slow
@needs_extra
def test_digits_are_split_into_disjoint_sets() -> None:
    task = module("tasks").task("digits")
    sets = (task.test, task.validation, task._training)
    assert [inputs.shape[1] for inputs, _ in sets] == [360, 300, 1137]
    # One epoch shows different images only; an image is its 64 pixels.
    updates = range(1137 // task.batch_size)
    epoch = torch.cat([task.batch(0, update)[0] for update in updates], dim=1).squeeze(2).t()
    images = {tuple(image.tolist()) for image in epoch}
    assert len(images) == len(epoch)
    assert not images & {tuple(image.tolist()) for image in task.test[0].squeeze(2).t()}
    guess = torch.zeros(360, 10)
    guess[:, 3] = 1
    share = (task.test[1] == 3).float().mean().item()
    assert task.score(guess, task.test[1]) == pytest.approx(100 * share)


@pytest.mark.slow
@needs_extra
def test_the_series_is_scored_against_the_last_value() -> None:
    task = module("tasks").task("co2")
    inputs, targets = task.test
    assert task.score(torch.zeros(len(targets), 1), targets) == pytest.approx(1.0)
    assert task.score(2 * targets.unsqueeze(1), targets) == pytest.approx(1.0)
    # The sets follow each other in time: what one predicts is the next one's last input.
    torch.testing.assert_close(inputs[-1, 1:, 0], targets[:-1], rtol=0, atol=0)
    assert task.validation[1][-1] == inputs[-1, 0, 0]
    assert task._training[1][-1] == task.validation[0][-1, 0, 0]
    assert 0.5 < task.levels["linear regression"] < 1.0


# ---- models and runs ----------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_no_hidden_size_brings_the_parameter_counts_closer(name: str) -> None:
    tasks, training = module("tasks"), module("training")
    task = tasks.task(name)

    def count(model: str, size: int) -> int:
        with torch.device("meta"):
            parameters: int = training.Model(task, model, size).parameter_count()
        return parameters

    target = count("nn.LSTM", task.lstm_size)
    for model in training.MODELS:
        size = training.hidden_size(name, model)
        off = abs(count(model, size) - target)
        assert off < 0.011 * target
        assert off < abs(count(model, size - 1) - target)
        assert off < abs(count(model, size + 1) - target)


@pytest.mark.parametrize("layer", ["lltm.LLTM", "nn.LSTM"])
def test_long_memory_closes_the_input_gates(layer: str) -> None:
    tasks, training = module("tasks"), module("training")
    task = tasks.task("adding-200")
    size = 8
    rnn = training.Model(task, layer + training.LONG_MEMORY, size).rnn
    bias = rnn.bias_l0 if layer == "lltm.LLTM" else rnn.bias_ih_l0 + rnn.bias_hh_l0
    gates = bias.detach().sigmoid().view(-1, size)
    # sigmoid(-log u) = 1 / (1 + u)
    assert (gates[0] >= 1 / task.steps).all()
    assert (gates[0] <= 0.5).all()
    if layer == "nn.LSTM":  # what is let in is what is forgotten
        torch.testing.assert_close(gates[1], 1 - gates[0])


def test_a_run_is_reproducible_and_learns_from_its_batches() -> None:
    results, training = module("results"), module("training")
    spec = results.Spec("adding-200", "lltm.LLTM", 0, 0.003, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, again = training.run(spec), training.run(spec)
    finally:
        torch.set_num_threads(threads)
    assert first == again
    assert [evaluation.update for evaluation in first.evaluations] == [0, 1, 2, 3, 4]
    assert first.evaluations[-1].validation < first.evaluations[0].validation


def test_a_run_ends_where_the_loss_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    results, tasks, training = module("results"), module("tasks"), module("training")
    task = tasks.task("adding-200")
    batch = task.batch

    def bad_from_the_third(seed: int, update: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(seed, update)
        return inputs, targets * (math.nan if update == 2 else 1)

    monkeypatch.setattr(task, "batch", bad_from_the_third)
    run = training.run(results.Spec("adding-200", "lltm.LLTM", 0, 0.003, 10))
    assert [evaluation.update for evaluation in run.evaluations] == [0, 1, 2]


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_replaced_layer_shares_the_runs_of_torchs(cell: str) -> None:
    """Because it computes the same: whole updates, with the state that they carry on."""
    training, results = module("training"), module("results")
    theirs, ours = (
        training.Trainer(results.Spec("characters", results.REPLACED[f"lltm.{cell}"], 0, 3e-3, 4))
        for _ in range(2)
    )
    assert lltm.replace_(ours.model).replaced == ["rnn"]
    for _ in range(4):
        assert ours.update() == pytest.approx(theirs.update(), rel=1e-5)


# ---- the sweep, and what is stored --------------------------------------------


def sweep(errors: dict[int, float]) -> tuple[int, list[int]]:
    """Runs a sweep to its end; returns its choice and everything tried, in order."""
    next_exponents = module("compare").next_exponents
    known: dict[int, float] = {}
    while exponents := next_exponents(known, (-6, -5, -4), (-8, -2)):
        for exponent in exponents:
            assert exponent not in known
            known[exponent] = errors[exponent]
    return min(known, key=lambda exponent: known[exponent]), list(known)


def test_the_sweep_takes_the_best_and_goes_beyond_an_edge() -> None:
    assert sweep({-6: 2, -5: 1, -4: 3}) == (-5, [-6, -5, -4])
    assert sweep({-8: 4, -7: 1, -6: 2, -5: 3, -4: 4}) == (-7, [-6, -5, -4, -7, -8])
    assert sweep({-6: 5, -5: 4, -4: 3, -3: 3.5}) == (-4, [-6, -5, -4, -3])
    assert sweep({-6: 5, -5: 4, -4: 3, -3: 2, -2: 1}) == (-2, [-6, -5, -4, -3, -2])  # the limit


def fake_run(spec: Any, errors: dict[float, float]) -> Any:
    results = module("results")
    value = errors[spec.learning_rate]
    evaluations = tuple(results.Evaluation(update, value, value) for update in (0, 1))
    return results.Run(spec, 8, 100, evaluations)


def test_the_reported_seeds_run_at_the_rate_that_was_chosen() -> None:
    compare, results = module("compare"), module("results")
    plan = compare.Plan(seeds=2, exponents=(-6, -5, -4), updates=1)
    found = results.Results()
    errors = {0.001: 0.3, 0.00316: 0.1, 0.01: 0.2}
    order = []
    while specs := list(plan.missing(found, "adding-200", "nn.GRU")):
        order += [(spec.seed, spec.learning_rate) for spec in specs]
        found.runs |= {spec: fake_run(spec, errors) for spec in specs}
    swept = [(results.SWEEP_SEED, rate) for rate in errors]
    assert order == [*swept, (0, 0.00316), (1, 0.00316)]


def test_an_interrupted_comparison_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            return fake_run(spec, errors)

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


def test_results_are_stored_and_read_back(tmp_path: Path) -> None:
    results = module("results")
    path = tmp_path / "results.json"
    assert results.Results.load(path) == results.Results()
    spec = results.Spec("digits", "nn.GRU", 0, 0.001, 2)
    evaluations = tuple(results.Evaluation(u, 50.0 + u, 40.0 + u) for u in (0, 1, 2))
    stored = results.Results(
        tasks={
            "digits": results.Description("Digits", 2, "accuracy, %", True, False, {"guess": 10})
        },
        runs={spec: results.Run(spec, 64, 17_000, evaluations)},
        machine={"cpu": "a", "threads": 2},
        seconds_per_update={"digits": {"nn.GRU": 0.5}},
    )
    stored.save(path)
    read = results.Results.load(path)
    assert read == stored
    assert read.test_values("digits", "nn.GRU") == [42.0]
    assert read.test_values("digits", "nn.GRU", updates=1.9) == [41.0]
    assert read.equal_seconds("digits") == 1.0
    # A run of another length is not one of those that are reported.
    other = results.Spec("digits", "nn.GRU", 1, 0.001, 1)
    read.runs[other] = results.Run(other, 64, 17_000, evaluations[:2])
    assert read.test_values("digits", "nn.GRU") == [42.0]


def test_the_validation_set_selects_the_checkpoint() -> None:
    results = module("results")
    values = [(0, 3.0, 9.0), (1, 1.0, 5.0), (2, 2.0, 4.0)]
    run = results.Run(None, 8, 100, tuple(results.Evaluation(*value) for value in values))
    assert run.selected(higher_is_better=False).test == 5.0
    assert run.selected(higher_is_better=True).test == 9.0
    assert run.selected(higher_is_better=False, updates=0.5).test == 9.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--time", "--task", "adding-200"], "results.json before --time, got none"),
        (["--seeds", "0"], "expected --seeds of at least 1, got 0"),
        (["--jobs", "-1"], "expected --jobs of at least 1, got -1"),
        (["--task", "sums"], "invalid choice: 'sums'"),
    ],
)
def test_bad_options_are_named(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as end:
        module("compare").main()
    assert end.value.code != 0
    assert message in f"{end.value.code}{capsys.readouterr().err}"


def test_the_best_median_is_bold() -> None:
    report, results = module("report"), module("results")
    task = results.Description("", 1, "", False, False, {})
    columns = [[1.0, 2.0, 3.0], [2.5, 4.0, 5.0], [3.5, 4.0, 4.5]]
    assert report.figures(task, columns) == [
        "**2.00** (1.00 to 3.00)",
        "4.00 (2.50 to 5.00)",
        "4.00 (3.50 to 4.50)",
    ]


# ---- the command --------------------------------------------------------------


@pytest.mark.slow
@needs_extra
@pytest.mark.parametrize(
    "names",
    [
        ["co2"],
        ["characters", "digits", "adding-200", "adding-750"],
    ],
    ids="+".join,
)
def test_the_command_ends_in_pictures_and_a_table(names: list[str], tmp_path: Path) -> None:
    command = [str(FOLDER / "compare.py"), "--quick", "--seeds", "1", "--jobs", "1"]
    # One thread, because threads wait long for each other on a machine that is busy.
    run = support.run_python(
        *command, "--out", str(tmp_path), "--task", *names, timeout_s=300, OMP_NUM_THREADS="1"
    )
    assert run.returncode == 0, run.stderr
    results = module("results").Results.load(tmp_path / "quick" / "results.json")
    table = (tmp_path / "quick" / "summary.md").read_text()
    for name in names:
        assert results.models(name) == [*module("training").MODELS, *module("results").REPLACED]
        assert all(seconds > 0 for seconds in results.seconds_per_update[name].values())
        assert results.tasks[name].title in table
        assert (tmp_path / "quick" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for model in ("nn.GRU", "lltm.GRU"):
        assert table.count(f"| {model} |") == len(names)


# ---- the page -----------------------------------------------------------------


def test_the_page_shows_the_stored_results() -> None:
    results = module("results").Results.load(FOLDER / "results" / "results.json")
    page = (FOLDER / "README.md").read_text()
    assert module("report").table(results) in page
    for name in results.tasks:
        assert f"results/{name}.png" in page
        assert (FOLDER / "results" / f"{name}.png").exists()


def test_the_code_of_the_page_prints_what_the_page_says() -> None:
    page = (FOLDER / "README.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = "".join(text for language, text in blocks if language == "python")
    run = support.run_forked("-c", code, cwd=FOLDER)
    assert run.returncode == 0, run.stderr
    assert [text for language, text in blocks if language == "text"] == [run.stdout]


@pytest.mark.slow
@needs_extra
def test_the_stored_results_are_those_of_the_plan() -> None:
    """All of them, for the tasks as they stand, and nothing else."""
    compare, tasks, training = module("compare"), module("tasks"), module("training")
    results = module("results").Results.load(FOLDER / "results" / "results.json")
    assert list(results.tasks) == list(tasks.TASKS)
    for name, description in results.tasks.items():
        assert description == compare.describe(name)
        for model in training.MODELS:
            assert list(compare.Plan().missing(results, name, model)) == []
            (rate,) = {run.spec.learning_rate for run in results.reported(name, model)}
            assert len(results.reported(name, model)) == 3
            assert rate > 0
            for run in results.reported(name, model):
                assert run.spec.updates == tasks.task(name).updates
                assert run.hidden_size == training.hidden_size(name, model)
