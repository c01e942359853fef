"""Computes the wheel's dependency on torch: the minor release it is built against.

A build step, called by scikit-build-core (see [[tool.dynamic-metadata]] in
pyproject.toml); not part of the package. torch's C++ ABI holds for one minor
release, so a library built against torch 2.13.0 declares `torch==2.13.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_state = "wheel"


def build_state(state: str) -> None:
    """Receives what is being built: "sdist", "wheel", "editable" or metadata for one of them."""
    global _state
    _state = state


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Says that a wheel's dependencies are not those of the sdist it is built from."""
    return {"dependencies": True}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of [project] that is computed: `dependencies`."""
    if _state == "sdist":
        return {}
    return {"dependencies": [pin(SpecifierSet(settings["supported"]))]}


def pin(supported: SpecifierSet) -> str:
    """Returns the requirement on torch, from the metadata of the torch that is installed here."""
    try:
        found = Version(version("torch"))
    except PackageNotFoundError:
        raise SystemExit(
            f"lltm is built against an installed torch ({supported}), and none is installed here"
        ) from None
    if not supported.contains(found, prereleases=True):
        raise SystemExit(f"lltm supports torch {supported}, and torch {found} is installed here")
    return f"torch=={found.major}.{found.minor}.*"
