"""lltm.functional.sequence, dense and packed, in both directions.

tests_cpp/test_cells.cpp covers more sizes, cells and engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import support
import torch
from support import DTYPES, LENGTHS, SEQUENCE_SHAPES, packed_arguments, sequence_arguments

import lltm


def each(cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Tests each case and each dtype, not all combinations."""
    values = [(case, DTYPES[k % len(DTYPES)]) for k, case in enumerate(cases)]
    return pytest.mark.parametrize(("case", "dtype"), values, ids=str)


each_direction = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


@each_direction
@each(SEQUENCE_SHAPES)
def test_agrees_with_the_reference(
    case: tuple[int, int, int, int], dtype: torch.dtype, reverse: bool
) -> None:
    support.check_accuracy(
        support.sequence_outputs, lambda: sequence_arguments(case, dtype, reverse=reverse)
    )


@each_direction
@each(LENGTHS)
def test_agrees_with_the_reference_when_packed(
    case: Sequence[int], dtype: torch.dtype, reverse: bool
) -> None:
    support.check_accuracy(
        support.sequence_outputs, lambda: packed_arguments(case, dtype=dtype, reverse=reverse)
    )


@each_direction
def test_resets_and_masks_as_the_reference_does(reverse: bool) -> None:
    a = sequence_arguments((6, 4, 3, 5), torch.float64, reverse=reverse)
    reset, mask = torch.rand(6, 4) < 0.4, torch.rand(4, 5, dtype=torch.float64)
    for change in ({"reset": reset}, {"recurrent_mask": mask}):
        changed = replace(a, **change)  # type: ignore[arg-type]
        ours, expected = (
            support.sequence_outputs(implementation, changed)
            for implementation in (lltm.functional, lltm.reference)
        )
        torch.testing.assert_close(ours, expected)
        assert not torch.allclose(ours[0], support.sequence_outputs(lltm.functional, a)[0])


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
