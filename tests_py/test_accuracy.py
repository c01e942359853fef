"""The accuracy criterion on fixed random problems (accuracy.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import median

import accuracy
import pytest
import support
import torch


def skip_without_own_gemm() -> None:
    """docs/accuracy.md lists these exceptions: PyTorch's GEMMs add them in longer chains."""
    if not support.HAS_OWN_GEMM:
        pytest.skip("known to be less accurate on this CPU")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_random_problems_meet_the_accuracy_criterion(dtype: torch.dtype, seed: int) -> None:
    problem = accuracy.draw(seed, dtype)
    if (problem.dtype, seed) == (torch.float32, 1):
        skip_without_own_gemm()
    ratio, what = accuracy.worst_ratio(problem)
    assert ratio <= accuracy.LIMIT or not accuracy.is_broken(problem, what), f"{what}, {problem}"


# Each cell with one shape, and each engine with one cell; the others take a minute.
QUICK = {
    *(("lltm", shape) for shape in ((50, 2, 64, 96), (60, 4, 20, 40), (40, 20, 100, 12))),
    *(("lstm", (60, 4, 20, 40)), ("gru", (40, 20, 100, 12))),
    *(("rnn_tanh", (60, 4, 20, 40)), ("rnn_relu", (40, 20, 100, 12))),
}


@pytest.mark.parametrize(
    ("cell", "shape"),
    [
        pytest.param(*case, id=str(case), marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(accuracy.GATES, accuracy.FEW)
    ],
)
def test_small_batches_meet_the_accuracy_criterion(
    cell: str, shape: tuple[int, int, int, int]
) -> None:
    if (cell, shape) == ("lltm", (60, 4, 20, 40)):
        skip_without_own_gemm()
    for what, found in accuracy.distributions(accuracy.of_few(cell, shape)).items():
        assert found.meets_the_rule(), f"{what}: {found.median()}, {found.tail()}"


# (T, B, I, H) with few results, whose rounding errors do not average out.
FEW = ((58, 1, 512, 32), (12, 40, 500, 3), (6, 20, 400, 12))


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_float64_elements_have_the_errors_of_the_reference(
    shape: tuple[int, int, int, int],
) -> None:
    problem = replace(accuracy.of_few("lltm", shape), dtype=torch.float64)
    found = [accuracy.ratios(replace(problem, seed=seed)) for seed in range(96)]
    for name in found[0]:
        assert median(ratios[name] for ratios in found) <= 1.2, name
