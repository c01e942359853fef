"""Prints the notes of a release: the section of the changelog, with absolute links.

`python/release_notes.py v1.2.3` fails if the version differs. Default: the section "Unreleased".
"""

import re
import sys
from pathlib import Path

from readme import absolute

VERSIONS = {"CMakeLists.txt": r"project\(lltm VERSION (\S+)", "CITATION.cff": r"^version: (\S+)$"}


def main(tag: str = "") -> None:
    for file, pattern in VERSIONS.items():
        (version,) = re.findall(pattern, Path(file).read_text(encoding="utf-8"), re.MULTILINE)
        if tag not in ("", f"v{version}"):
            sys.exit(f"release_notes.py: expected the tag v{version} ({file}), got {tag}")
    heading = rf"\[{version}\] - \d{{4}}-\d\d-\d\d" if tag else r"\[Unreleased\]"
    _, *found = re.split(
        rf"^## {heading}$", Path("CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    if len(found) != 1:
        sys.exit(f"release_notes.py: expected one section {heading} in CHANGELOG.md")
    (repository,) = re.findall(
        r'HOMEPAGE_URL "(.*)"', Path("CMakeLists.txt").read_text(encoding="utf-8")
    )
    print(absolute(found[0].partition("\n## ")[0].strip(), repository, tag or "main"))


if __name__ == "__main__":
    main(*sys.argv[1:])
