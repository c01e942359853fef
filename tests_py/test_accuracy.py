"""The rule of accuracy on the same random problems each time (accuracy.py)."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import accuracy
import pytest
import support
import torch


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_the_rule_holds_for_problems_drawn_at_random(dtype: torch.dtype, seed: int) -> None:
    problem = accuracy.draw(seed, dtype)
    ratio, what = accuracy.worst_ratio(problem)
    assert ratio <= accuracy.LIMIT, f"{what}, {problem}"


# (T, B, I, H) of results with few elements: nothing averages their rounding errors out.
FEW = ((58, 1, 512, 32), (12, 40, 500, 3), (6, 20, 400, 12), (40, 3, 500, 60))


def ratios_of_few(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[dict[str, float]]:
    problem = accuracy.Problem(0, dtype, "sequence", *shape, True, False, True)
    return [accuracy.ratios(replace(problem, seed=seed)) for seed in range(7)]


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_elements_of_float32_have_a_fraction_of_the_errors(
    shape: tuple[int, int, int, int],
) -> None:
    """Sums and states are float64. Errors as those of float32 would be 0.3 and more."""
    for ratios in ratios_of_few(shape, torch.float32):
        assert max(ratio for name, ratio in ratios.items() if name.startswith("output")) < 0.2


@pytest.mark.parametrize("shape", FEW[:3], ids=str)
def test_few_elements_of_float64_have_the_errors_of_plain_pytorch(
    shape: tuple[int, int, int, int],
) -> None:
    found = ratios_of_few(shape, torch.float64)
    for name in found[0]:
        assert median(ratios[name] for ratios in found) <= 1.2, name
