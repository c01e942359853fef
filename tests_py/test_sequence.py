"""lltm.functional.sequence: resets and masks.

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
