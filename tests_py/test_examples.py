"""examples/replace: lltm.replace_ is the only change."""

from __future__ import annotations

import re

import pytest
import support

EXAMPLE = support.ROOT / "examples" / "replace" / "forecast.py"


def test_a_model_trains_alike_with_its_layers_replaced() -> None:
    small = ("--epochs", "3", "--hidden-size", "12", "--sites", "8")
    result = support.run_forked(str(EXAMPLE), *small, cwd=EXAMPLE.parent)
    assert result.stdout.startswith("replaced: 'gru'\n")
    rows = re.findall(r"^ +\d +(\S+) +\S+ s +(\S+) +\S+ s$", result.stdout, re.MULTILINE)
    theirs, ours = ([float(losses[k]) for losses in rows] for k in (0, 1))
    assert len(theirs) == 3
    assert theirs[2] < theirs[0]
    assert ours == pytest.approx(theirs, abs=1.01e-4)  # rounding may move the last digit
    assert re.search(r"^lltm.replace_ took \d+\.\d\d of the time$", result.stdout, re.MULTILINE)
