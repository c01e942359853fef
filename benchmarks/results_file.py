"""Writes files of results atomically, so that a killed program leaves no truncated file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)
