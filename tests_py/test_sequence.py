"""lltm.functional.sequence: resets, masks, oneDNN.

test_accuracy.py and tests_cpp/test_cells.cpp test sizes, dtypes and engines.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import support
import torch
from support import sequence_arguments

import lltm


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
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
