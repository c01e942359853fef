"""The rule of accuracy on the same random problems each time (accuracy.py)."""

from __future__ import annotations

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


def sequence_of(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> accuracy.Problem:
    """Of (T, B, I, H), as a layer without an initial state computes it."""
    return accuracy.Problem(
        seed, dtype, "sequence", *shape, bias=True, reverse=False, zero_state=True
    )


# T, B, I, H: few rows that follow their own trajectory for many steps.
FEW_ROWS = (
    (33, 2, 256, 49),
    (100, 1, 128, 256),
    (50, 1, 300, 96),
    (20, 3, 515, 130),
    (100, 1, 16, 32),
    (60, 4, 20, 40),
)


@pytest.mark.parametrize("shape", FEW_ROWS, ids=str)
def test_the_rule_holds_for_few_rows_with_every_seed(shape: tuple[int, int, int, int]) -> None:
    for seed in range(5):
        problem = sequence_of(shape, torch.float32, seed)
        ratio, what = accuracy.worst_ratio(problem)
        assert ratio <= accuracy.LIMIT, f"{what}, {problem}"


# (T, B, I, H) of results with few elements: nothing averages their rounding errors out.
FEW = ((58, 1, 512, 32), (12, 40, 500, 3), (6, 20, 400, 12), (40, 3, 500, 60))


def ratios_of_few(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[dict[str, float]]:
    return [accuracy.ratios(sequence_of(shape, dtype, seed)) for seed in range(7)]


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_elements_of_float32_have_a_fraction_of_the_errors(
    shape: tuple[int, int, int, int],
) -> None:
    """Sums and states are float64. Errors as those of float32 would be 0.3 and more.

    These have more steps or more rows than take float32 operands, and less than 512 KiB of weights.
    """
    for ratios in ratios_of_few(shape, torch.float32):
        assert max(ratio for name, ratio in ratios.items() if name.startswith("output")) < 0.2


@pytest.mark.parametrize("shape", FEW[:3], ids=str)
def test_few_elements_of_float64_have_the_errors_of_plain_pytorch(
    shape: tuple[int, int, int, int],
) -> None:
    found = ratios_of_few(shape, torch.float64)
    for name in found[0]:
        assert median(ratios[name] for ratios in found) <= 1.2, name
