"""The Python code in the documents runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support

PAGES = [support.ROOT / "README.md", *sorted((support.ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = {page.name: BLOCK.findall(page.read_text()) for page in PAGES}


def test_the_documents_have_code() -> None:
    assert {name for name, blocks in SCRIPTS.items() if blocks} >= {
        "README.md",
        "compile.md",
        "derivatives.md",
        "explain.md",
        "export.md",
        "onnx.md",
        "training.md",
    }


# These start compilers, and what they show is tested by itself too.
SLOW = {"compile.md", "export.md", "onnx.md"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name, blocks in SCRIPTS.items()
        if blocks
    ],
)
def test_the_code_of_a_document_runs(name: str, tmp_path: Path) -> None:
    """All blocks of a page are one script; in a process of its own, warnings and all."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(SCRIPTS[name]))
    run = support.run_python(str(script), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
