#!/usr/bin/env python3
"""Prints lines of documentation, comments and docstrings with a word that has a plainer or an
American form; part of `make lint`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILES = ("*.md", "cpp/*.h", "cpp/*.cpp", "python/lltm/*.py", "tests_py/*.py")
FILES += ("tests_cpp/*.py", "tests_cpp/*.h", "tests_cpp/*.cpp")
VERBS = "quanti|initiali|vectori|optimi|normali|speciali|paralleli|seriali|recogni"
AVOIDED = re.compile(
    r"\b(nobody|anew|beside|behind|as they lie|cells? of (your|one's) own|(own|user's) cells?"
    rf"|\w*({VERBS})s(e|ed|es|ing|ation)|(behaviour|colour|favour|neighbour)\w*)\b",
    re.IGNORECASE,
)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields numbered lines of prose: Markdown without code, or comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        code = r"```.*?^ *```|\]\([^)]*\)|https?://\S*|^\S*\{[^}]*\}"
        text = re.sub(code, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)
        yield from enumerate(text.splitlines(), 1)
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
            if token.type == tokenize.COMMENT or is_docstring:
                yield from enumerate(token.string.split("\n"), token.start[0])
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if comment := re.search(r"(?:^|\s)///?(.*)", line):
                yield number, comment[1]


def main() -> int:
    command = ["git", "ls-files", *FILES]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = [
        f"{path}:{number}: {avoided[0]}"
        for path in map(Path, files)
        for number, line in lines_of(path)
        if (avoided := AVOIDED.search(re.sub(r"`[^`]*`", " ", line)))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
