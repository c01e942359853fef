"""The rule of accuracy on the same random problems each time (accuracy.py)."""

from __future__ import annotations

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
