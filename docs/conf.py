"""Sphinx configuration of the documentation site (`make docs`)."""

from __future__ import annotations

import html
import importlib.resources
import os
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

import lltm

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = re.findall(
    r'HOMEPAGE_URL "(.*)"', (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
)[0]

project = "lltm"
author = "The LLTM authors"
copyright = "2026, the LLTM authors"
version = release = lltm.__version__

extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]

highlight_language = "text"  # literal blocks contain shapes and formulas

# Renders formulas offline, with a single file: the site loads nothing from other servers.
MATHJAX = importlib.resources.files("sphinx-mathjax-offline") / "static/mathjax/tex-svg.js"
mathjax_path = MATHJAX.name

html_theme = "furo"
html_title = f"lltm {release}"
html_logo = html_favicon = "static/logo.svg"
html_static_path = ["static", str(MATHJAX)]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "static" / "scorer.js")
pygments_dark_style = "github-dark"  # the default underlines imported modules
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3  # the same anchors as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_rtype = False  # "(h', c')" at the start of a result describes it, and is not a type

breathe_default_project = "lltm"
breathe_domain_by_extension = {"h": "cpp", "in": "cpp"}

# Names that `sphinx-build -n` need not resolve. They are in the inventories of Python and PyTorch,
# which offline builds lack, in C++ libraries without an inventory, or (StateT) explained in the
# text.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|typing|collections)\..*"),
    ("py:class", r"Tensor|lltm\.(modules\.State|custom\.program\.Scalar)"),
    ("cpp:.*", r"(std|at|c10|torch)(::.*)?"),
    ("cpp:.*", r"int64_t|size_t|lltm|lltm_realtime|StateT"),
]


# ----- Preparation before the pages are read -----------------------------------


def run_doxygen(app: Sphinx, config: Config) -> None:
    """Extracts the comments of the headers with Doxygen, next to the site's folder."""
    output = app.outdir.parent / "doxygen"
    output.mkdir(parents=True, exist_ok=True)
    settings = f"@INCLUDE = docs/Doxyfile\nOUTPUT_DIRECTORY = {output}\n"
    subprocess.run(["doxygen", "-"], input=settings, text=True, cwd=ROOT, check=True)
    config.breathe_projects = {"lltm": str(output / "xml")}


def find_inventories(app: Sphinx, config: Config) -> None:
    """Sets the inventories of Python and PyTorch, each with an empty inventory as a fallback.

    Sphinx uses the fallback silently if there is no network. The site then only lacks the links
    to the documentation of Python and PyTorch. If LLTM_DOCS_ONLINE is set, as in CI, there is no
    fallback, and Sphinx warns if it cannot read an inventory.
    """
    empty = app.outdir.parent / "empty.inv"
    empty.parent.mkdir(parents=True, exist_ok=True)
    header = b"# Sphinx inventory version 2\n# Project: none\n# Version:\n# zlib:\n"
    empty.write_bytes(header + zlib.compress(b""))
    config.intersphinx_timeout = 5
    inventories = None if "LLTM_DOCS_ONLINE" in os.environ else (None, str(empty))
    config.intersphinx_mapping = {
        "python": ("https://docs.python.org/3", inventories),
        "torch": ("https://docs.pytorch.org/docs/stable", inventories),
    }


def colour_examples(app: Sphinx, *what: object) -> None:
    """Turns the literal blocks after "Example::" in docstrings into Python code blocks."""
    lines = what[-1]
    assert isinstance(lines, list)
    lines[:] = [re.sub(r"^( *)Example::$", r"\1.. code-block:: python", line) for line in lines]


# ----- Links -------------------------------------------------------------------

# The pages are also read in the repository, and link to its files. On the site, links to files
# that are not pages lead to the repository.

# Files outside this folder that are pages of the site.
PAGES = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CHANGELOG.md": DOCS / "changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
}

# Matches the target of a Markdown link or image, without its anchor. Skips URLs with a scheme.
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)[^)#\s]+")


def resolve_links(text: str, folder: Path) -> str:
    """Converts the links of a page in `folder` to links of the site. Sphinx copies images."""

    def resolve(match: re.Match[str]) -> str:
        path = (folder / match[0]).resolve()
        if not path.exists():  # code, or a dead link, which a test finds
            return match[0]
        path = PAGES.get(path, path)
        page = path.parent == DOCS and path.suffix in (".md", ".rst")
        if page or path.suffix in (".png", ".svg"):
            return os.path.relpath(path, DOCS)
        kind = "tree" if path.is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}"

    return TARGET.sub(resolve, text)


# ----- Tabs --------------------------------------------------------------------

# Examples in both languages. On the site they are tabs, and the reader's choice applies to all
# pages. In the repository they follow each other, each after the language's name in bold.
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
LANGUAGE = re.compile(r"^\*\*(Python|C\+\+)\*\*\n", re.MULTILINE)


def make_tabs(text: str) -> str:
    def tab_set(match: re.Match[str]) -> str:
        before, *parts = LANGUAGE.split(match[1])
        assert not before, f"no name of a language before {before}"
        tabs = (
            f"`````{{tab-item}} {name}\n:sync: {name}\n{content}`````\n"
            for name, content in zip(parts[::2], parts[1::2], strict=True)
        )
        return f"``````{{tab-set}}\n:sync-group: language\n{''.join(tabs)}``````"

    return TABS.sub(tab_set, text)


def on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    content[0] = make_tabs(resolve_links(content[0], DOCS))


def on_include_read(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    content[0] = make_tabs(resolve_links(content[0], (DOCS / path).parent))


# ----- Search results ----------------------------------------------------------


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Adds the first paragraph as the page's description, which search engines show."""
    paragraph = next(iter(tree.findall(nodes.paragraph)), None) if tree else None
    if paragraph is not None:
        text = html.escape(" ".join(paragraph.astext().split())[:160])
        context["metatags"] += f'<meta name="description" content="{text}">'


def setup(app: Sphinx) -> None:
    app.connect("config-inited", run_doxygen)
    app.connect("config-inited", find_inventories)
    app.connect("autodoc-process-docstring", colour_examples)
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
    app.connect("html-page-context", describe)
