"""Fills a folder with what `make first-contact` needs and a machine with a GPU may lack.

    python benchmarks/gpu_kit.py build/gpu-kit

Such a machine often reaches no network. The folder holds sources of GoogleTest, from Debian's
package index, and Python packages for the interpreter there, from pip's; the targets of the
Makefile for a GPU take it by themselves. It is made anew as a whole or not at all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST_MIB = 30
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


def mebibytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the machine's")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    if folder.exists() and not (folder / GOOGLETEST).is_dir():
        raise SystemExit(f"{folder}: expected a folder that this script made or none, got another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, folder.name)
        fetch_googletest(made / GOOGLETEST)
        fetch_packages(made / "site-packages", PACKAGES, options.python)
        size = mebibytes(made)
        if size > MOST_MIB:
            raise SystemExit(f"{size:.1f} MiB: the kit may have {MOST_MIB} MiB")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    print(f"{folder}: {size:.1f} MiB, for Python {options.python}")
    for part in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        print(f"  {part.relative_to(folder)}: {mebibytes(part):.1f} MiB")


if __name__ == "__main__":
    main()
