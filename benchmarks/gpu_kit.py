"""Fills a folder with what `make first-contact` needs and a machine with a GPU may lack.

    python benchmarks/gpu_kit.py build/gpu-kit --build build/kit     of `make gpu-kit`
    python benchmarks/gpu_kit.py build/gpu-kit --unpack build/gpu    of `make build-gpu`, there

Such a machine often reaches no network, and to compile takes it minutes. The folder holds sources
of GoogleTest, from Debian's package index, and Python packages for the interpreter there, from
pip's; and the binaries of a build, for the release of PyTorch and of Python that it was made with.
The targets of the Makefile for a GPU take it by themselves. It is made anew as a whole or not at
all.

--unpack lays the binaries where CMake would have built them, if they are of these sources, for this
environment, and start; if not, the exit status is 1, and they have to be compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from results_file import write_json

ROOT = Path(__file__).resolve().parents[1]
MOST_MIB = 50  # of the 64 that may travel with the sources to some machines
# Of a build: with the sources that they are made of. The Python files of the package are not among
# these, because those of the tree are taken.
BINARIES = (
    *("site/lltm/**/*", "liblltm.so.*", "tests_cpp/lltm_cuda_tests"),
    *("benchmarks/lltm_cuda_bench", "benchmarks/lltm_cuda_sweep"),
)
SOURCES = (
    *("CMakeLists.txt", "CMakePresets.json", "cmake/*", "cpp/**/*", "python/*"),
    *("tests_cpp/CMakeLists.txt", "tests_cpp/testing.*", "tests_cpp/properties.*"),
    *("tests_cpp/test_cuda.cpp", "benchmarks/CMakeLists.txt", "benchmarks/*.cpp"),
    "benchmarks/*.h",
)
PACKAGE = Path("python", "lltm")
ARCHIVE, MANIFEST = "binaries.tar.xz", "binaries.json"
# What the tests of CUDA import, and the headers that the build needs; pip adds what they need.
PACKAGES = ("expecttest", "hypothesis", "nlohmann_json>=3.11", "pybind11>=3.0", "pytest>=8.0")
# Wheels for any recent Linux on x86-64.
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
GOOGLETEST = "googletest"  # Debian's package of the sources, and its folder in the kit
GOOGLETEST_FOLDER = Path("usr", "src", "googletest")


def run(*command: str, cwd: Path | None = None) -> None:
    """Runs a command, and ends this program with what it printed where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")


def fetch_googletest(folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise SystemExit(
            f"the sources of GoogleTest come from Debian's package {GOOGLETEST}: no apt-get here"
        )
    with tempfile.TemporaryDirectory() as temporary:
        run("apt-get", "--quiet", "download", GOOGLETEST, cwd=Path(temporary))
        (package,) = Path(temporary).glob("*.deb")
        run("dpkg-deb", "--extract", str(package), temporary)
        shutil.copytree(Path(temporary, GOOGLETEST_FOLDER), folder)


def fetch_packages(folder: Path, packages: Sequence[str], python: str) -> None:
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"),
        *("--target", str(folder), "--only-binary", ":all:"),
        *("--implementation", "cp", "--python-version", python),
        *(f"--platform={platform}" for platform in PLATFORMS),
        *packages,
    )


# ---- binaries ----------------------------------------------------------------


def files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """In an order that depends on their names alone; without what Python has compiled."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return (path for path in sorted(found) if "__pycache__" not in path.parts)


def packages_of_torch() -> Path | None:
    """The folder of this environment that holds torch."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def fits() -> dict[str, str]:
    """What binaries of these sources, made in this environment, are for."""
    digest = hashlib.sha256()
    for path in files(ROOT, SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    packages = packages_of_torch()
    version = "none"
    if packages is not None:
        version = runpy.run_path(str(packages / "torch" / "version.py"))["__version__"]
    return {
        "sources": digest.hexdigest(),
        "torch": str(version),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
    }


def pack_binaries(folder: Path, build: Path) -> None:
    """The archive and what it is for."""
    found = list(files(build, BINARIES))
    with tarfile.open(folder / ARCHIVE, "w:xz") as archive:
        for path in found:
            archive.add(path, path.relative_to(build))
    names = {path.name for path in found}
    for pattern in BINARIES[1:]:
        if not any(Path(name).match(Path(pattern).name) for name in names):
            raise SystemExit(f"{build}: no {pattern}, which the kit needs")
    write_json(folder / MANIFEST, fits())


def why_not(kit: Path) -> str | None:
    """Why the binaries of a kit are of no use here."""
    if not (kit / MANIFEST).is_file():
        return "it has none"
    made_for, here = json.loads((kit / MANIFEST).read_text()), fits()
    differ = [
        f"{what} {made_for.get(what)}, not {is_here}"
        for what, is_here in here.items()
        if made_for.get(what) != is_here
    ]
    return f"they are for {'; '.join(differ)}" if differ else None


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Python 3.11.3, of Debian 12 say, and older releases know no filters."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def unpack_binaries(kit: Path, build: Path) -> str | None:
    """Lays the binaries where CMake would have; returns why that was of no use."""
    if (reason := why_not(kit)) is not None:
        return reason
    build.mkdir(parents=True, exist_ok=True)
    with tarfile.open(kit / ARCHIVE) as archive:
        extract(archive, build)
    python = shutil.ignore_patterns("__pycache__", "*.in")
    shutil.copytree(ROOT / PACKAGE, build / "site/lltm", ignore=python, dirs_exist_ok=True)
    # Where the programs look for torch and CUDA's libraries.
    link = build / "site-packages"
    link.unlink(missing_ok=True)
    link.symlink_to(packages_of_torch() or "none", target_is_directory=True)
    path = os.pathsep.join([str((build / "site").resolve()), os.environ.get("PYTHONPATH", "")])
    for command in (
        (str(build / "benchmarks/lltm_cuda_sweep"), "--list"),
        (str(build / "tests_cpp/lltm_cuda_tests"), "--gtest_list_tests"),
        (sys.executable, "-c", "import lltm"),
    ):
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=90, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if run.returncode != 0:
            last = (run.stdout + run.stderr).strip().splitlines()[-1:]
            return f"{command[0]}: exit status {run.returncode}: {''.join(last)}"
    return None


# ---- the program -------------------------------------------------------------


def mebibytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine's")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="whose binaries to take")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="where to lay the binaries")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    if options.unpack is not None:
        if (reason := unpack_binaries(folder, options.unpack)) is not None:
            raise SystemExit(f"no binaries from {folder}: {reason}")
        print(f"{options.unpack}: binaries from {folder}")
        return
    if folder.exists() and not (folder / GOOGLETEST).is_dir():
        raise SystemExit(f"{folder}: expected a folder that this script made or none, got another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, folder.name)
        fetch_googletest(made / GOOGLETEST)
        fetch_packages(made / "site-packages", PACKAGES, options.python)
        if options.build is not None:
            pack_binaries(made, options.build)
        size = mebibytes(made)
        if size > MOST_MIB:
            raise SystemExit(f"{size:.1f} MiB: the kit may have {MOST_MIB} MiB")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    print(f"{folder}: {size:.1f} MiB, for Python {options.python}")
    for part in sorted(folder.iterdir()):
        size = mebibytes(part) if part.is_dir() else part.stat().st_size / 2**20
        print(f"  {part.name}: {size:.1f} MiB")


if __name__ == "__main__":
    main()
