"""Each folder of sources includes only lower ones (docs/architecture.md)."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "cpp/src"
# From the bottom. The CPU and CUDA do not include each other.
LAYERS = (("cell",), ("common",), ("aten",), ("cpu", "cuda"), ("realtime",), ("op",), ("api",))


def test_no_source_includes_upward() -> None:
    level = {folder: n for n, folders in enumerate(LAYERS) for folder in folders}
    found = set()
    for file in [*SOURCE.rglob("*.h"), *SOURCE.rglob("*.cpp")]:
        folder = file.relative_to(SOURCE).parts[0]
        for included in re.findall(r'^#include "(\w+)/', file.read_text(encoding="utf-8"), re.M):
            found.add(included)
            assert included == folder or level[included] < level[folder], (file, included)
    assert found == set(level)
