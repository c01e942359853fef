"""Computes the wheel's long description: README.md, whose links lead to the repository.

A build step, called by scikit-build-core (see [[tool.dynamic-metadata]] in pyproject.toml); not
part of the package. A package index shows the text without the files beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
RELATIVE_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of [project] that is computed: `readme`."""
    text = absolute(README.read_text(), project["urls"]["Repository"], f"v{project['version']}")
    return {"readme": {"content-type": "text/markdown", "text": text}}


def absolute(text: str, repository: str, revision: str) -> str:
    """The text with every relative link made one to that revision; images to their bytes."""

    def replace(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{revision}/{path})"

    return RELATIVE_LINK.sub(replace, text)
