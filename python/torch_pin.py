"""Computes the wheel's dependency on torch: the minor release it is built against.

scikit-build-core calls this build step ([[tool.dynamic-metadata]] in pyproject.toml). It is not
part of the package. torch's C++ ABI is stable only within a minor release, so a library built
against torch 2.13.0 declares `torch==2.13.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_state = "wheel"


def build_state(state: str) -> None:
    """Receives the build state: "sdist", "wheel", "editable", or the metadata of one of them."""
    global _state
    _state = state


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Declares that the dependencies of a wheel may differ from its sdist."""
    return {"dependencies": True}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the computed part of [project]: `dependencies`."""
    if _state == "sdist":
        return {}
    return {"dependencies": [pin(SpecifierSet(settings["supported"]))]}


def pin(supported: SpecifierSet) -> str:
    """Returns the requirement on torch, from the metadata of the installed torch."""
    try:
        found = Version(version("torch"))
    except PackageNotFoundError:
        raise SystemExit(
            f"lltm is built against an installed torch ({supported}), and none is installed here"
        ) from None
    if not supported.contains(found, prereleases=True):
        raise SystemExit(f"lltm supports torch {supported}, and torch {found} is installed here")
    return f"torch=={found.major}.{found.minor}.*"
