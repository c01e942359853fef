"""Installed package: versions, paths, contents, links."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

import lltm
from lltm.__main__ import report

PACKAGE = Path(lltm.cmake_prefix_path)
VERSION = re.compile(r"project\(\s*lltm\s+VERSION (\d+\.\d+\.\d+)")


def ldd(library: Path) -> str:
    return support.run(["ldd", library]).stdout


def test_one_version_everywhere() -> None:
    match = VERSION.search((support.ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert match is not None
    header = Path(lltm.include_dir, "lltm", "version.h").read_text(encoding="utf-8")
    config_version = PACKAGE / "lib/cmake/lltm/lltm-config-version.cmake"
    assert lltm.__version__ == match[1]
    assert lltm._C.version() == match[1]
    assert importlib.metadata.version("lltm") == match[1]
    assert f'#define LLTM_VERSION "{match[1]}"' in header
    assert f'set(PACKAGE_VERSION "{match[1]}")' in config_version.read_text(encoding="utf-8")


def test_depends_on_the_minor_release_of_torch_it_was_built_against() -> None:
    requirements = importlib.metadata.requires("lltm")
    assert requirements is not None
    major, minor, *_ = str(torch.__version__).split(".")
    assert [r for r in requirements if "extra" not in r] == [f"torch=={major}.{minor}.*"]


def build_step(name: str = "torch_pin") -> Any:
    """A module in python/ that is not part of the package."""
    spec = importlib.util.spec_from_file_location(name, support.ROOT / f"python/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("found", ["2.10.1", "2.16.0.dev20261101"])
def test_the_build_rejects_a_torch_outside_the_supported_range(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    step = build_step()
    monkeypatch.setattr(step, "version", lambda name: found)
    with pytest.raises(SystemExit, match=f"supports torch .*, and torch {re.escape(found)} is"):
        step.dynamic_metadata({"supported": ">=2.11,<2.16"}, {})


def test_an_sdist_depends_on_no_torch_yet() -> None:
    step = build_step()
    step.build_state("sdist")
    settings = {"supported": ">=2.11,<2.16"}
    assert step.dynamic_metadata(settings, {}) == {}
    assert step.dynamic_wheel(settings) == {"dependencies": True}


def test_both_copies_of_the_supported_range_of_torch_agree() -> None:
    text = (support.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r'"torch(>=[^"]*)"', text)
    supported = re.search(r'^supported = "([^"]*)"', text, re.MULTILINE)
    assert required is not None
    assert supported is not None
    assert required[1] == supported[1]


def test_the_metadata_has_what_a_package_index_shows() -> None:
    metadata = importlib.metadata.metadata("lltm")
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL") or [])
    assert set(urls) == {"Documentation", "Repository", "Issues", "Changelog"}
    assert metadata["License-Expression"] == "BSD-3-Clause AND MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = importlib.metadata.distribution("lltm").read_text("METADATA") or ""
    description = text.partition("\n\n")[2]
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert f"{urls['Repository']}/blob/v{lltm.__version__}/LICENSE" in links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize(
    ("torches", "expected"),
    [
        (["torch==2.13.0"], "torch==2.13.*"),
        (["torch==2.12.1", "torch==2.13.0"], "torch>=2.12,<2.14"),
        (["torch==2.9.1", "torch==2.11.0"], "torch>=2.9,<2.12,!=2.10.*"),
    ],
)
def test_a_merged_wheel_requires_one_of_the_releases_that_it_holds(
    torches: list[str], expected: str
) -> None:
    assert build_step("wheels").requirement(torches) == expected


def test_the_licenses_of_what_is_compiled_in_are_installed() -> None:
    distribution = importlib.metadata.distribution("lltm")
    assert distribution.metadata.get_all("License-File") == ["LICENSE", "LICENSE-THIRD-PARTY"]
    text = distribution.read_text("licenses/LICENSE-THIRD-PARTY") or ""
    for name in ("nlohmann/json", "pybind11", "PyTorch"):
        assert f"\n{name}, https://" in text


def test_every_python_file_of_the_source_is_installed() -> None:
    source = support.ROOT / "python" / "lltm"
    found = (path for path in source.rglob("*") if path.suffix in (".py", ".pyi", ".typed"))
    files = {str(path.relative_to(source)) for path in found}
    package = Path(lltm.__file__).parent
    assert {"__init__.py", "_C.pyi", "py.typed", "benchmark/__main__.py"} <= files
    assert {name for name in files if not (package / name).is_file()} == set()


def test_the_rebuild_of_an_editable_install_installs_the_package(tmp_path: Path) -> None:
    """Runs `cmake --install` without a component.

    Installed files replace the build output.
    """
    settings = SettingsReader.from_file(support.ROOT / "pyproject.toml", state="editable").settings
    defines = [f"-D{name}={value}" for name, value in settings.cmake.define.items()]
    build, package = tmp_path / "build", tmp_path / "lltm"
    source = [f"-S{support.ROOT}", f"-B{build}", "-DLLTM_CUDA=OFF"]
    support.run(["cmake", "-GNinja", *source, *defines])
    shutil.copy2(PACKAGE / "lib/liblltm.so", build / "python/lib")
    shutil.copy2(lltm._C.__file__, build / "python")
    support.run(["cmake", "--install", build, "--prefix", package])
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    expected = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()}
    assert found == {path for path in expected if "__pycache__" not in path.parts}


@pytest.mark.parametrize("name", [*lltm.modules.__all__, "CustomLayer", "CustomCell"])
def test_docstrings_describe_the_constructors_arguments(name: str) -> None:
    cls = getattr(lltm, name)
    described = re.findall(r"^ {8}(\w+) \([\w.]+\): ", cls.__doc__, re.MULTILINE)
    if described or not name.startswith("Prepacked"):  # most refer to PrepackedLSTM
        assert described == [*inspect.signature(cls).parameters]


def test_the_module_links_the_library_of_the_package() -> None:
    linked = ldd(Path(lltm._C.__file__))
    match = re.search(r"liblltm\.so => (\S+)", linked)
    assert match is not None
    assert Path(match[1]).resolve() == (PACKAGE / "lib" / "liblltm.so").resolve()


LIBRARIES = [PACKAGE / "lib" / "liblltm.so", Path(lltm._C.__file__)]


@pytest.mark.skipif(
    Path(torch.__file__).parents[1] != PACKAGE.parent,
    reason="torch is not installed beside lltm, as it is not beside an editable install; there,"
    " importing torch loads its libraries first",
)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_libraries_of_torch_are_found_next_to_the_package(library: Path) -> None:
    assert "not found" not in ldd(library)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_search_path_of_an_installed_library_is_relative(library: Path) -> None:
    run = support.run(["readelf", "--dynamic", library])
    match = re.search(r"R(?:UN)?PATH.*\[(.*)\]", run.stdout)
    assert match is not None
    assert all(part.startswith("$ORIGIN") for part in match[1].split(":")), match[1]


def test_python_m_lltm_reports_on_the_environment() -> None:
    assert f"CPU kernels chosen: {lltm._C.cpu_kernels()}" in report()
    run = support.run_python("-m", "lltm", ATEN_CPU_CAPABILITY="default", GOMP_SPINCOUNT="9")
    assert f"lltm: {lltm.__version__}" in run.stdout
    assert f"torch: {torch.__version__}" in run.stdout
    assert f"CPU kernels chosen: {support.BASELINE}" in run.stdout
    assert "ATEN_CPU_CAPABILITY: default" in run.stdout
    assert sys.executable in run.stdout
    assert re.search(r"^load average: [\d.]+, \d+ cores$", run.stdout, re.MULTILINE)
    assert "GOMP_SPINCOUNT: 9\nOMP_WAIT_POLICY: " in run.stdout


@pytest.mark.parametrize("name", lltm.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(lltm, name)
    assert isinstance(value, str) or value.__doc__


# Run without docstrings and assert statements. DTensor is slow to import.
IMPORT = """
import sys, torch

torch.__version__ = sys.argv[1]
torch.manual_seed(0)
before = torch.random.get_rng_state()
import lltm

if not torch.equal(before, torch.random.get_rng_state()):
    sys.exit("random numbers were drawn")
if "torch.distributed.tensor" in sys.modules:
    sys.exit("distributed tensors were imported")
print(lltm.LSTM.__doc__, lltm.LSTM(3, 5))
"""


def test_the_import_accepts_another_patch_release_and_has_no_side_effects() -> None:
    major, minor, *_ = str(torch.__version__).split(".")
    run = support.run_python("-OO", "-c", IMPORT, f"{major}.{minor}.99")
    assert run.stdout == "None lltm.LSTM(3, 5)\n"
