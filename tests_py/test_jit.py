"""Just-in-time build, in a separate process: operators can be registered only once."""

from __future__ import annotations

import pytest
import support


@pytest.mark.slow
def test_the_example_builds_and_agrees_with_the_reference() -> None:
    run = support.run_python(str(support.ROOT / "examples/jit/build.py"))
    assert "values and gradients agree with the PyTorch reference" in run.stdout
    assert f"CPU kernels in use: {support.BASELINE}" in run.stdout, run.stdout
