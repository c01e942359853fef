"""Computes the wheel's long description: README.md with absolute links to the repository.

scikit-build-core calls this build step ([[tool.dynamic-metadata]] in pyproject.toml). It is not
part of the package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
RELATIVE_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the computed part of [project]: `readme`."""
    text = absolute(
        README.read_text(encoding="utf-8"), project["urls"]["Repository"], f"v{project['version']}"
    )
    return {"readme": {"content-type": "text/markdown", "text": text}}


def absolute(text: str, repository: str, revision: str) -> str:
    """Makes relative links absolute, to this revision. Image links lead to the raw file."""

    def replace(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{revision}/{path})"

    return RELATIVE_LINK.sub(replace, text)
