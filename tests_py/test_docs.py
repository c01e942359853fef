"""Documentation: code, commands, links, site."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch.nn.utils.rnn import pack_sequence

import lltm

ROOT = support.ROOT
DOCS = ROOT / "docs"
FORECAST = ROOT / "examples" / "forecast" / "README.md"
PAGES = [*(ROOT / "README.md", ROOT / "CONTRIBUTING.md"), *sorted(DOCS.glob("*.md")), FORECAST]
# Only their links are tested.
OTHER_PAGES = [*sorted({*ROOT.glob("*.md")} - {*PAGES}), *(ROOT / "benchmarks").rglob("*.md")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name)


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Path from the first-line comment, if any."""
        match = re.match(r"(?://|#) ([\w./]+\.\w+)$", self.text, re.MULTILINE)
        return match[1] if match else None


FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@functools.cache
def blocks(page: Path) -> list[Block]:
    return [
        Block(m[2], textwrap.dedent(m[3]))
        for m in FENCED.finditer(page.read_text(encoding="utf-8"))
    ]


def texts(page: Path, language: str) -> list[str]:
    """Blocks that are no files."""
    return [b.text for b in blocks(page) if b.language == language and b.file is None]


@each_page
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    """`text` is not tested; Sphinx directives have braces."""
    for block in blocks(page):
        tested = block.language in ("python", "cpp", "cmake", "sh", "text") or block.file
        assert tested or block.language.startswith("{"), block
    outside = FENCED.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"\n\n {4,}\S", outside), "an indented block: a fence names its language"


# These pages start compilers.
SLOW = {"compile.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=pytest.mark.slow if page.name in SLOW else ())
        for page in PAGES
        if texts(page, "python") and page != FORECAST
    ],
)
def test_the_python_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Runs all blocks as one script, in a separate process, with warnings."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(texts(page, "python")), encoding="utf-8")
    run: Any = support.run_python if page.name in SLOW else support.run_forked
    run(str(script), cwd=tmp_path)


PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(app LANGUAGES CXX)
add_executable(app main.cpp)
"""

FIND_PACKAGE = next(t for p in PAGES for t in texts(p, "cmake") if "find_package(lltm" in t)
CONFIGURE = next(t for p in PAGES for t in texts(p, "sh") if "cmake -S app" in t)


def run_commands(commands: str, folder: Path, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **environment}
    support.run(["bash", "-euxc", commands], env=env, cwd=folder)  # -x prints the commands


def code(language: str) -> list[Any]:
    return [pytest.param(text, id=name(page)) for page in PAGES for text in texts(page, language)]


@pytest.mark.slow
@pytest.mark.parametrize("program", code("cpp"))
def test_a_cpp_block_is_a_program_that_runs(program: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "CMakeLists.txt").write_text(PROJECT + FIND_PACKAGE, encoding="utf-8")
    (app / "main.cpp").write_text(program, encoding="utf-8")
    run_commands(f"{CONFIGURE}\ncmake --build app/build\napp/build/app", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("text", code("cmake"))
def test_a_cmake_block_configures(text: str, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "CMakeLists.txt").write_text(PROJECT + text, encoding="utf-8")
    (app / "main.cpp").touch()
    # This source tree replaces the release.
    run_commands(f"{CONFIGURE.rstrip()} -DFETCHCONTENT_SOURCE_DIR_LLTM='{ROOT}'", tmp_path)


@functools.cache
def source(pattern: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)))


def plain(text: str) -> str:
    """Text without line breaks, quotes and parts that only the source has."""
    return " ".join(re.findall(r"\w+", text))


def is_quoted(message: str, text: str) -> bool:
    """An ellipsis on the page matches variable parts."""
    return all(plain(part) in plain(text) for part in message.split("…"))


class Packing(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):  # type: ignore[no-untyped-def]
        return self.layer(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))


def calls_that_raise() -> Iterator[Callable[[], object]]:
    layer, x, h = lltm.LLTM(8, 16), torch.randn(20, 4, 8), torch.zeros(4, 16)
    prepacked, weights, functional = layer.prepack(), torch.randn(48, 24), lltm.functional
    packed = pack_sequence([torch.randn(n, 8) for n in (5, 3, 2)])
    lstm: Any = torch.nn.LSTM(8, 16)
    wrong: Any = h  # rejected by type checkers too

    def double_backward() -> None:
        compiled = torch.compile(layer, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(compiled(leaf)[0].sum(), leaf, create_graph=True)
        slope.sum().backward()

    yield lambda: layer(torch.randn(4, 20, 7))
    yield lambda: layer(x, (h, h))
    yield lambda: functional.step("lltm", x[0], (h, h), torch.randn(64, 24))
    yield lambda: functional.step("lltm", x[0], (h, h), torch.randn(48, 25))
    yield lambda: functional.step("lltm", x[0], (h, h), weights, bias_ih=torch.randn(1, 48))
    yield lambda: functional.sequence(
        "lltm", packed.data, (h, h), weights, batch_sizes=packed.batch_sizes
    )
    yield lambda: layer(x.double())
    yield lambda: functional.sequence("lltm", x.long(), (h, h), weights)
    yield lambda: layer(x.to("meta"))
    yield lambda: layer.load_state_dict(lstm.state_dict())
    yield lambda: prepacked.load_state_dict(layer.prepack(torch.qint8).state_dict())
    yield lambda: prepacked.double()
    yield lambda: setattr(prepacked, "hidden_size", 8)
    yield lambda: prepacked(x.clone().requires_grad_())[0].sum().backward()
    yield double_backward
    yield lambda: torch.jit.script(Packing(layer))
    yield lambda: layer(x, mask=wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_explained_messages_are_raised(tmp_path: Path) -> None:
    copy = shutil.copy(Path(lltm.cmake_prefix_path, "lib", "liblltm.so"), tmp_path)
    raised = [
        support.run_python("-c", code, cwd=folder, check=False).stderr
        for code, folder in (
            ("import torch; torch.__version__ = '2.99.1'; import lltm", tmp_path),
            ("import lltm", ROOT / "python"),
            (f"import torch, lltm; torch.ops.load_library({str(copy)!r})", tmp_path),
        )
    ]
    for call in calls_that_raise():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        raised.append(str(caught.value))

    explained = texts(DOCS / "errors.md", "text")
    assert [r for r in raised if not any(is_quoted(text, r) for text in explained)] == []
    # Build messages are in build files.
    build = "".join(
        source(p) for p in ("CMakeLists.txt", "cmake/*", "python/*.py", "cpp/src/*/*.cpp")
    )
    sources = [*raised, build]
    assert [text for text in explained if not any(is_quoted(text, s) for s in sources)] == []


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "code", FENCED.sub("", page.read_text(encoding="utf-8")))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Heading anchors as in GitHub and Sphinx."""
    headings = re.findall(
        r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name)
def test_the_links_of_a_page_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"no file {target}"
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), f"no heading {target}"


def test_the_map_of_architecture_links_every_source_file() -> None:
    """Links a file directly, by its header or implementation, or by a folder without subfolders.

    The link test checks the targets.
    """
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = text.partition("\n## Source map")[2].partition("\n## ")[0]
    links = [(DOCS / path).resolve() for path in re.findall(r"\]\(([^)#]+)\)", rows)]
    folders = [link for link in links if link.is_dir() and not [*link.glob("[a-z]*/")]]
    linked = {*links, *(path for folder in folders for path in folder.iterdir())}
    files = {*(ROOT / "cpp").rglob("*.*"), *(ROOT / "python/lltm").rglob("*.py")}

    def stem(path: Path) -> Path:
        return path.with_name(path.name.partition(".")[0])

    stems = {stem(path) for path in linked}
    missing = {name(path) for path in files if stem(path) not in stems}
    assert {path for path in missing if not path.endswith("__init__.py")} == set()


# From the bottom. The CPU and CUDA do not include each other.
LAYERS = (("cell",), ("common",), ("aten",), ("cpu", "cuda"), ("realtime",), ("op",), ("api",))


def test_no_folder_of_sources_includes_a_higher_one() -> None:
    level = {folder: n for n, folders in enumerate(LAYERS) for folder in folders}
    found, folders = set(), ROOT / "cpp" / "src"
    for file in [*folders.rglob("*.h"), *folders.rglob("*.cpp")]:
        folder = file.relative_to(folders).parts[0]
        for included in re.findall(r'^#include "(\w+)/', file.read_text(encoding="utf-8"), re.M):
            found.add(included)
            assert included == folder or level[included] < level[folder], (file, included)
    assert found == set(level)
