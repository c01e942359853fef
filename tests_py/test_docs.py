"""The Python of the pages on derivatives and training runs as it stands there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import support


@pytest.mark.parametrize("page", ["derivatives", "training"])
def test_the_examples_of_a_page_run(page: str) -> None:
    text = (support.ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:  # one after another, as a reader would type them
        exec(block, names)
