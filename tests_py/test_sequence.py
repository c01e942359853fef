"""lltm.functional.sequence, dense and packed, in both directions.

tests_cpp/test_cells.cpp covers more sizes, cells and engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import support
import torch
from support import DTYPES, LENGTHS, SEQUENCE_SHAPES, packed_arguments, sequence_arguments

import lltm


@pytest.mark.parametrize("shape", SEQUENCE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Covers each shape and each dtype, not all combinations."""
    reverse = (SEQUENCE_SHAPES.index(shape) + DTYPES.index(dtype)) % 2 == 1
    support.check_accuracy(
        support.sequence_outputs, lambda: sequence_arguments(shape, dtype, reverse=reverse)
    )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference_when_packed(
    dtype: torch.dtype, lengths: Sequence[int], reverse: bool
) -> None:
    support.check_accuracy(
        support.sequence_outputs, lambda: packed_arguments(lengths, dtype=dtype, reverse=reverse)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_without_sequences_add_nothing_to_gradients(dtype: torch.dtype) -> None:
    """The batch is large enough for separate chunks."""
    a = support.sequence_arguments((1, 600, 5, 16), dtype)
    x = torch.randn(1200, 5, dtype=dtype)
    gradients = []
    for sizes in ([600, 600], [600, 600, 0]):
        leaves = replace(a, input=x, batch_sizes=torch.tensor(sizes)).leaves()
        output, *_ = support.sequence_outputs(lltm.functional, leaves)
        gradients.append(torch.autograd.grad(output.sum(), leaves.tensors()))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_turning_onednn_off_changes_nothing() -> None:
    layer = lltm.LLTM(32, 64, dtype=torch.bfloat16)
    x = torch.randn(5, 40, 32, dtype=torch.bfloat16, requires_grad=True)

    def results() -> tuple[torch.Tensor, ...]:
        output, _ = layer(x)
        return output, *torch.autograd.grad(output.sum(), (x, *layer.parameters()))

    expected = results()
    with torch.backends.mkldnn.flags(enabled=False):
        assert all(map(torch.equal, results(), expected))
