"""`make gpu-kit`: what it holds, what its binaries fit, how the Makefile takes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_kit
import pytest
from support import ROOT


@pytest.fixture
def indexes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What the package indexes hold, of so many bytes each."""

    def hold(size: int) -> None:
        def fetch(folder: Path, *_: object) -> None:
            folder.mkdir(parents=True)
            (folder / "source").write_bytes(bytes(size))

        monkeypatch.setattr(gpu_kit, "fetch_googletest", fetch)
        monkeypatch.setattr(gpu_kit, "fetch_packages", fetch)

    return hold


def test_the_kit_is_made_as_a_whole(
    indexes: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build" / "kit"
    indexes(1 << 20)
    gpu_kit.main([str(folder)])
    assert {path.name for path in folder.iterdir()} == {"googletest", "site-packages"}
    assert "2.0 MiB, for Python 3.12" in capsys.readouterr().out
    indexes(26 << 20)
    with pytest.raises(SystemExit, match=r"^52.0 MiB: the kit may have 50 MiB$"):
        gpu_kit.main([str(folder)])
    assert gpu_kit.mebibytes(folder) == 2, "the one before is left as it was"
    indexes(2 << 20)
    gpu_kit.main([str(folder)])
    assert gpu_kit.mebibytes(folder) == 4
    assert [path.name for path in folder.parent.iterdir()] == ["kit"]


def test_the_kit_replaces_no_other_folder(indexes: Callable[[int], None], tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    indexes(1)
    with pytest.raises(SystemExit, match="expected a folder that this script made"):
        gpu_kit.main([str(tmp_path)])
    assert (tmp_path / "precious").exists()


def commands_of_make(target: str, kit: Path) -> str:
    """What make would run."""
    make = shutil.which("make")
    assert make is not None
    command = (make, "--dry-run", target, f"GPU_KIT={kit}", f"PYTHON={sys.executable}")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_makefile_takes_the_kit_by_itself(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    (kit / "googletest").mkdir(parents=True)
    (kit / "site-packages" / "nlohmann_json").mkdir(parents=True)
    for folder, count in ((kit, 3), (tmp_path / "none", 0)):
        commands = commands_of_make("compile-gpu", folder)
        assert commands.count(str(folder)) == count, commands


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources, with a build of them whose programs are scripts, in an environment with torch."""
    root = tmp_path / "tree"
    for name, text in {
        "CMakeLists.txt": "project",
        "cpp/src/a.cpp": "int a;",
        "python/lltm/__init__.py": "here = 'the tree'",
        "site-packages/torch/__init__.py": "",
        "site-packages/torch/version.py": "__version__ = '2.11.0+cu130'",
        "build/kit/site/lltm/__init__.py": "here = 'the build'",
        "build/kit/site/lltm/_C.so": "module",
        "build/kit/liblltm.so.0.1": "library",
        "build/kit/CMakeCache.txt": "not for others",
        "build/kit/benchmarks/lltm_cuda_bench": "#!/bin/sh\n",
        "build/kit/benchmarks/lltm_cuda_sweep": "#!/bin/sh\n[ $1 = --list ]\n",
        "build/kit/tests_cpp/lltm_cuda_tests": "#!/bin/sh\n[ $1 = --gtest_list_tests ]\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setattr(gpu_kit, "ROOT", root)
    monkeypatch.setattr(gpu_kit, "packages_of_torch", lambda: root / "site-packages")
    return root


def packed(tree: Path) -> Path:
    kit = tree / "build" / "gpu-kit"
    kit.mkdir()
    gpu_kit.pack_binaries(kit, tree / "build" / "kit")
    return kit


def test_binaries_of_the_kit_lie_where_they_would_have_been_built(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit, build = packed(tree), tree / "build" / "gpu"
    for _ in range(2):
        gpu_kit.main([str(kit), "--unpack", str(build)])
        assert f"{build}: binaries from {kit}" in capsys.readouterr().out
    for name in ("liblltm.so.0.1", "site/lltm/_C.so", "benchmarks/lltm_cuda_bench"):
        assert (build / name).read_bytes() == (tree / "build" / "kit" / name).read_bytes()
    assert (build / "site/lltm/__init__.py").read_text() == "here = 'the tree'"
    assert (build / "site-packages/torch").is_dir()
    assert not (build / "CMakeCache.txt").exists()


def change(path: Path, text: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def changes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree / path).write_text(text)

    return changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (change(Path("cpp/src/a.cpp"), "long a;"), "they are for sources"),
        (change(Path("cpp/src/b.h"), ""), "they are for sources"),
        (
            change(Path("site-packages/torch/version.py"), "__version__ = '2.12.1+cu130'"),
            "they are for torch 2.11.0+cu130, not 2.12.1+cu130",
        ),
        (
            lambda tree, monkeypatch: monkeypatch.setattr(
                "platform.python_version_tuple", lambda: ("3", "99", "1")
            ),
            "they are for Python 3.1",
        ),
        (
            lambda tree, monkeypatch: (tree / "build/gpu-kit/binaries.json").unlink(),
            "it has none",
        ),
    ],
    ids=["a source", "another source", "torch", "Python", "no binaries"],
)
def test_binaries_of_something_else_are_not_taken(
    changes: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = packed(tree)
    changes(tree, monkeypatch)
    with pytest.raises(SystemExit, match=f"^no binaries from .*: {re.escape(reason)}"):
        gpu_kit.main([str(kit), "--unpack", str(tree / "build" / "gpu")])
    assert not (tree / "build" / "gpu").exists()


def test_binaries_that_do_not_start_are_not_taken(tree: Path) -> None:
    (tree / "build/kit/benchmarks/lltm_cuda_sweep").write_text(
        "#!/bin/sh\necho 'libc.so.6: version GLIBC_2.99 not found' >&2; exit 1\n"
    )
    kit = packed(tree)
    with pytest.raises(SystemExit, match=r"lltm_cuda_sweep: exit status 1: .*GLIBC_2.99 not found"):
        gpu_kit.main([str(kit), "--unpack", str(tree / "build" / "gpu")])


def test_the_python_files_of_the_package_need_no_new_kit(tree: Path) -> None:
    kit = packed(tree)
    (tree / "python/lltm/__init__.py").write_text("here = 'a later tree'")
    gpu_kit.main([str(kit), "--unpack", str(tree / "build" / "gpu")])
    assert "later" in (tree / "build/gpu/site/lltm/__init__.py").read_text()


def test_a_build_that_lacks_something_makes_no_kit(tree: Path) -> None:
    (tree / "build/kit/liblltm.so.0.1").unlink()
    with pytest.raises(SystemExit, match=r"no liblltm\.so\.\*, which the kit needs$"):
        packed(tree)


def test_what_a_kit_is_made_of_names_what_exists() -> None:
    """So that a source that is moved or added does not go unnoticed."""
    for pattern in gpu_kit.SOURCES:
        assert any(ROOT.glob(pattern)), pattern
    sources = {*gpu_kit.files(ROOT, gpu_kit.SOURCES)}
    assert sources >= {*ROOT.glob("cpp/**/*.cu"), *ROOT.glob("cpp/**/*.h")}
    assert ROOT / "tests_cpp/test_cuda.cpp" in sources
    assert not any("build" in path.relative_to(ROOT).parts for path in sources)


def test_what_does_not_fit_is_compiled_without_warnings_as_errors(tmp_path: Path) -> None:
    (preset,) = (
        preset
        for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        if preset["name"] == "gpu"
    )
    assert preset["cacheVariables"] == {
        "CMAKE_COMPILE_WARNING_AS_ERROR": False,
        "CMAKE_CUDA_ARCHITECTURES": "90-real",
        "CMAKE_CUDA_FLAGS": "",
    }
    commands = commands_of_make("build-gpu", tmp_path)
    assert "--unpack build/gpu ||" in commands
    assert "compile-gpu" in commands
