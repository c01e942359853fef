"""Activation checkpointing and its memory.

Values: tests_cpp/test_cells.cpp for every dtype and direction, test_properties.py for modules.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import lltm
from lltm.benchmark.cases import Case
from lltm.benchmark.memory import peak_memory, saved_for_backward


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_saves_little_more_than_its_output(dtype: torch.dtype, packed: bool) -> None:
    case = Case((64, 16, 8, 32), dtype, training=True, packed=packed)
    rows = sum(case.lengths) / (64 * 16)
    assert saved_for_backward(lltm.LLTM, case) == pytest.approx(5 * rows, abs=0.02)
    checkpointed = partial(lltm.LLTM, checkpoint_steps=8)
    assert saved_for_backward(checkpointed, case) == pytest.approx(rows + 1 / 8, abs=0.02)


def test_neither_forward_nor_backward_stores_the_activations_of_all_steps() -> None:
    """Holds activations of 32 of 1000 steps, 5H values each.

    The other steps need little more than H values.
    """
    case = Case((1000, 16, 8, 128), training=True)
    plain = peak_memory(lltm.LLTM, case)
    assert plain > 1000 * 16 * 4 * 128 * 4
    assert peak_memory(partial(lltm.LLTM, checkpoint_steps=32), case) < plain / 2
