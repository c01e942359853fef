"""Lightning training loop: examples/lightning."""

from __future__ import annotations

import re

import pytest
import support

EXAMPLE = support.ROOT / "examples" / "lightning" / "digits.py"


@pytest.mark.slow  # another library's training loop
@support.needs_extra("examples", "pytorch_lightning", "sklearn")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_the_layer_on_digits(precision: str) -> None:
    result = support.run_python(str(EXAMPLE), "--precision", precision, timeout_s=240)
    assert result.returncode == 0, result.stderr
    accuracy = re.search(r"not seen in training: (0\.\d+)", result.stdout)
    assert accuracy is not None, result.stdout
    # Chance is 0.1; rounding affects a few digits.
    assert float(accuracy[1]) > 0.9
