"""Configures Sphinx for the documentation site: `make docs`."""

from __future__ import annotations

import importlib.resources
import os
import re
import subprocess
import zlib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

import lltm

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = re.findall(r'HOMEPAGE_URL "(.*)"', (ROOT / "CMakeLists.txt").read_text())[0]

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

highlight_language = "text"  # of literal blocks, which show shapes and formulas

# Formulas by one file that draws with what it holds: nothing is loaded from elsewhere.
MATHJAX = importlib.resources.files("sphinx-mathjax-offline") / "static/mathjax/tex-svg.js"
mathjax_path = MATHJAX.name

html_theme = "furo"
html_title = f"lltm {release}"
html_logo = html_favicon = "static/logo.svg"
html_static_path = ["static", str(MATHJAX)]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3  # as GitHub makes them

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_rtype = False  # "(h', c')" before a result says what it is, and is no type

breathe_default_project = "lltm"
breathe_domain_by_extension = {"h": "cpp", "in": "cpp"}

# `sphinx-build -n` reports every name that it cannot resolve. These are in the inventories of
# Python and PyTorch, which a build without a network does not have, and in C++ libraries that
# have none; or, as StateT, explained in the text.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|typing|collections)\..*"),
    ("py:class", r"lltm\.modules\.State"),
    ("cpp:.*", r"(std|at|c10|torch)(::.*)?"),
    ("cpp:.*", r"int64_t|lltm|StateT"),
]


# ----- What is made before the pages are read ----------------------------------


def run_doxygen(app: Sphinx, config: Config) -> None:
    """Has Doxygen extract the comments of the headers, beside the site's folder."""
    output = app.outdir.parent / "doxygen"
    output.mkdir(parents=True, exist_ok=True)
    settings = f"@INCLUDE = docs/Doxyfile\nOUTPUT_DIRECTORY = {output}\n"
    subprocess.run(["doxygen", "-"], input=settings, text=True, cwd=ROOT, check=True)
    config.breathe_projects = {"lltm": str(output / "xml")}


def find_inventories(app: Sphinx, config: Config) -> None:
    """Names the inventories to link to, each with an empty one where there is no network.

    Sphinx takes the second silently, so that a build looks the same with and without a network,
    but for links to the documentation of Python and PyTorch. With LLTM_DOCS_ONLINE in the
    environment, as in CI, there is no second, and an inventory that cannot be read is a warning.
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
    """Makes blocks of Python of the literal blocks of docstrings that are code."""
    lines = what[-1]
    assert isinstance(lines, list)
    lines[:] = [re.sub(r"^( *)Example::$", r"\1.. code-block:: python", line) for line in lines]


# ----- Links -------------------------------------------------------------------

# The pages are read in the repository too, and link to its files. On the site a link to a file
# that is no page leads to the repository.

# Files outside of this folder that are pages of the site.
PAGES = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CHANGELOG.md": DOCS / "changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
    ROOT / "examples" / "compare" / "README.md": DOCS / "compare.md",
    ROOT / "examples" / "forecast" / "README.md": DOCS / "forecast.md",
}

# The target of a Markdown link or image, up to its anchor; none with a scheme.
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)[^)#\s]+")


def resolve_links(text: str, folder: Path) -> str:
    """Makes the links of a page in `folder` links of the site. Sphinx copies images."""

    def resolve(match: re.Match[str]) -> str:
        path = (folder / match[0]).resolve()
        if not path.exists():  # code, or a dead link: a test looks for those
            return match[0]
        path = PAGES.get(path, path)
        page = path.parent == DOCS and path.suffix in (".md", ".rst")
        if page or path.suffix in (".png", ".svg"):
            return os.path.relpath(path, DOCS)
        kind = "tree" if path.is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}"

    return TARGET.sub(resolve, text)


# ----- Tabs --------------------------------------------------------------------

# Where a page shows the same in both languages, they are tabs on the site, and in the repository
# one after the other, each under its name in bold. The reader's choice holds for every page.
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


def setup(app: Sphinx) -> None:
    app.connect("config-inited", run_doxygen)
    app.connect("config-inited", find_inventories)
    app.connect("autodoc-process-docstring", colour_examples)
    app.connect("source-read", on_source_read)
    app.connect("include-read", on_include_read)
