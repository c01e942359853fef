"""CUDA kernels without a GPU: registration, CUDA's functions, and the gallery's cells."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import support
import torch

import lltm
import lltm.cells

KERNELS = dict(line.split(": ", 1) for line in lltm.build_info().splitlines())["CUDA kernels"]
BUILT = "LLTM_CUDA is OFF" not in KERNELS
COMPILER = shutil.which("cc")
PROGRAMS = os.environ.get("LLTM_TEST_PROGRAMS")  # folder, in make check-cuda-build
ALL_KERNELS = "LLTM_COMPILE_ALL_KERNELS" in os.environ
OPERATORS = ["sequence", "sequence_forward", "sequence_backward"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_dispatcher_has_cuda_kernels_if_the_library_has(operator: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{operator}", "CUDA")
    table = torch._C._dispatch_dump_table(f"lltm::{operator}")
    (entry,) = re.findall(r"^CUDA: .*", table, re.MULTILINE)
    assert has_kernel == BUILT
    assert ("cuda_backend.cpp" in entry) == BUILT, entry


def test_prepack_has_no_cuda_kernel() -> None:
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("lltm::prepack", "CUDA")


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch has no CUDA")
@pytest.mark.skipif(COMPILER is None, reason="the driver's substitute needs a C compiler")
@pytest.mark.parametrize("missing", [None, "cuLaunchKernel"])
def test_cuda_functions_are_found(missing: str | None, tmp_path: Path) -> None:
    """With a substitute for the driver's library, whose functions nothing calls."""
    source = (support.ROOT / "cpp" / "src" / "cuda" / "functions.cpp").read_text(encoding="utf-8")
    names = set(re.findall(r"LLTM_FIND\(driver, (\w+)\)", source)) - {missing}
    machine = subprocess.run([str(COMPILER), "-dumpmachine"], capture_output=True, text=True).stdout
    if not machine.startswith(platform.machine()):
        pytest.skip(f"the C compiler is for {machine.strip()}, and Python is emulated")
    driver = tmp_path / "libcuda.so.1"
    code = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names)
    command = [str(COMPILER), "-shared", "-x", "c", "-", "-o", str(driver)]
    subprocess.run(command, input=code, text=True, check=True)
    # Without a driver, PyTorch's library that loads NVRTC cannot be loaded.
    load = "import ctypes, glob, os, torch; site = os.path.dirname(torch.__path__[0])\n"
    load += "for name in sorted(glob.glob(site + '/nvidia/**/libnvrtc*.so.1?*', recursive=True)):\n"
    load += "    ctypes.CDLL(name, ctypes.RTLD_GLOBAL)\n"
    result = support.run_python(
        *("-c", f"{load}import lltm; print(lltm.build_info())"),
        LD_LIBRARY_PATH=str(tmp_path),
        LLTM_CACHE_DIR=str(tmp_path / "cache"),
    )
    if missing:
        expected = f"none \\(CUDA has no function {missing}\\)\n"
    else:
        expected = ".*/lib/lltm-kernels, others " if PROGRAMS else ""
        expected += r"compiled by NVRTC \d+\.\d+ at their first use\nCUDA kernel cache: "
        expected += re.escape(f"{tmp_path}/cache\n")
    assert re.search(f"^CUDA kernels: {expected}", result.stdout, re.MULTILINE), result.stdout


# Device operations of a step in float32, in forward and in backward.
OPERATIONS = {
    "layernorm_lstm": "10 6",
    "keras_gru": "4 4",
    "dreamer_gru": "6 4",
}
# make check-cuda-build executes the kernels of these cells: an interpreter of PTX takes up to a
# minute per cell. .ci/nightly executes all.
EXECUTED = {*OPERATIONS, "block_gru", "cornn", "exprnn", "slstm"}


@pytest.mark.skipif(not PROGRAMS, reason="needs the native tests of make check-cuda-build")
# The derived parameter of rg_lru is negative, unlike the random ones of the native tests.
@pytest.mark.parametrize("name", sorted({*support.GALLERY_CELLS} - {"rg_lru"}))
def test_a_cell_of_the_gallery(name: str, tmp_path: Path) -> None:
    """Its kernels compile without spills; in an interpreter, they agree with float64."""
    cell = tmp_path / "cell"
    cell.write_text(getattr(lltm.cells, name).text, encoding="utf-8")

    def output_of(program: str, tests: str) -> str:
        command = [f"{PROGRAMS}/{program}", f"--gtest_filter={tests}"]
        return support.run(command, env=os.environ | {"LLTM_TEST_CELL": str(cell)}).stdout

    output_of("lltm_nvrtc_tests", f"Cells/*{'' if ALL_KERNELS else 'float16'}")
    if name not in EXECUTED and not ALL_KERNELS:
        return
    output = output_of("lltm_cuda_host_tests", "Texts/*.Values*_float16:Texts/*.Operations*")
    if name in OPERATIONS:
        assert f"operations: {OPERATIONS[name]}\n" in output, output
