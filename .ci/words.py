#!/usr/bin/env python3
"""Checks the words of documentation, comments and docstrings; part of `make lint`.

Prints each word that is used more often than its limit, per 1,000 words of a part, and each line
with a word that has a plainer or an American form.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PARTS = {
    "docs": ("*.md", "docs/*.md", "examples/*.md"),
    "python": ("python/lltm/*.py",),
    "cpp": ("cpp/*.h", "cpp/*.cpp", "cpp/*.cu"),
    "tests": ("tests_py/*.py", "tests_cpp/*.py", "tests_cpp/*.h", "tests_cpp/*.cpp"),
}
# Per 1,000 words. In sources "one" is nearly always a number: one step, one GEMM.
LIMITS = {"what": (1, PARTS), "one": (3, ("docs", "python")), "of": (33, PARTS)}
VERBS = "quanti|initiali|vectori|optimi|normali|speciali|paralleli|seriali|recogni"
AVOIDED = re.compile(
    r"\b(nobody|anew|beside|behind|as they lie|cells? of (your|one's) own|(own|user's) cells?"
    rf"|\w*({VERBS})s(e|ed|es|ing|ation)|(behaviour|colour|favour|neighbour)\w*)\b",
    re.IGNORECASE,
)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields numbered lines of prose: Markdown without code, or comments and docstrings."""
    text = path.read_text()
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
    failed = False
    for part, patterns in PARTS.items():
        command = ["git", "ls-files", *patterns]
        files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        words: list[str] = []
        for path in map(Path, files):
            for number, line in lines_of(path):
                prose = re.sub(r"`[^`]*`", " ", line)
                words += re.findall(r"[a-z']+", prose.lower())
                if avoided := AVOIDED.search(prose):
                    print(f"{path}:{number}: {avoided[0]}")
                    failed = True
        for word, (limit, parts) in LIMITS.items():
            share = 1000 * words.count(word) / len(words)
            if part in parts and share > limit:
                print(f"{part}: {share:.1f} times '{word}' in 1,000 words, more than {limit}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
