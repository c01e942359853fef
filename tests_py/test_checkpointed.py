"""Activation checkpointing and its memory.

Values: tests_cpp/test_cells.cpp for every dtype and direction, test_properties.py for modules.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import support
import torch
from memory import peak_memory, saved_for_backward
from support import packed_arguments, sequence_arguments
from torch import Tensor

import lltm
from lltm.benchmark.cases import Case


def saved(run: Callable[[], object]) -> list[Tensor]:
    """Excludes parameters and arguments."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return found


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_no_activations_are_saved(kind: str) -> None:
    steps, batch, hidden = 60, 4, 8
    a = (
        sequence_arguments((steps, batch, 3, hidden))
        if kind == "dense"
        else packed_arguments((steps,) * batch, 3, hidden)
    ).leaves()
    given = {tensor.data_ptr() for tensor in a.tensors()}
    tensors = saved(lambda: support.checkpointed_outputs(10, lltm.functional, a))
    sizes = sorted(
        t.numel() for t in tensors if t.data_ptr() not in given and t.is_floating_point()
    )
    assert sizes == [steps // 10 * batch * hidden, steps * batch * hidden]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_saves_little_more_than_its_output(dtype: torch.dtype) -> None:
    case = Case((64, 16, 8, 32), dtype, training=True)
    assert saved_for_backward(lltm.LLTM, case) == pytest.approx(5)
    checkpointed = partial(lltm.LLTM, checkpoint_steps=8)
    assert saved_for_backward(checkpointed, case) == pytest.approx(1 + 1 / 8)


def test_neither_forward_nor_backward_stores_the_activations_of_all_steps() -> None:
    """Holds activations of 32 of 1000 steps, 5H values each.

    The other steps need little more than H values.
    """
    case = Case((1000, 16, 8, 128), training=True)
    plain = peak_memory(case)
    assert plain > 1000 * 16 * 4 * 128 * 4
    assert peak_memory(case, checkpoint_steps=32) < plain / 2


def test_a_layer_calls_the_operators() -> None:
    layer = lltm.LLTM(3, 5, checkpoint_steps=4)
    x = torch.randn(10, 6, 3)
    with support.Operators() as operators:
        layer(x)[0].sum().backward()
    assert operators.ours() == ["sequence_forward", "sequence_backward"]
    with support.Operators() as operators, torch.no_grad():
        layer(x)
    assert operators.ours() == ["sequence"]


def test_a_layer_that_was_pickled_without_the_option_runs() -> None:
    layer = lltm.LLTM(3, 5)
    del layer.checkpoint_steps
    other = pickle.loads(pickle.dumps(layer))
    x = torch.randn(6, 4, 3)
    torch.testing.assert_close(other(x), layer(x))
    assert repr(other) == "lltm.LLTM(3, 5)"


def test_the_option_can_be_changed() -> None:
    layer = lltm.LLTM(3, 5)
    x = torch.randn(12, 6, 3)
    for steps, size in ((0, 12 * 6 * 4 * 5), (4, 3 * 6 * 5)):
        layer.checkpoint_steps = steps
        assert size in [t.numel() for t in saved(lambda: layer(x))]
