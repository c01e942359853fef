"""CUDA kernels without a GPU: built and registered."""

from __future__ import annotations

import re

import pytest
import torch

import lltm
import lltm.__main__

KERNELS = dict(line.split(": ", 1) for line in lltm.build_info().splitlines())["CUDA kernels"]
BUILT = not KERNELS.startswith("none")
OPERATORS = (
    "step",
    "step_forward",
    "step_backward",
    "sequence",
    "sequence_forward",
    "sequence_backward",
)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_dispatcher_has_cuda_kernels_if_the_library_has(operator: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{operator}", "CUDA")
    table = torch._C._dispatch_dump_table(f"lltm::{operator}")
    (entry,) = re.findall(r"^CUDA: .*", table, re.MULTILINE)
    assert has_kernel == BUILT
    assert ("backend.cpp" in entry) == BUILT, entry


def test_prepack_has_no_cuda_kernel() -> None:
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("lltm::prepack", "CUDA")


@pytest.mark.skipif(not BUILT, reason="this lltm was built without CUDA kernels")
def test_build_info_names_the_architectures_and_the_toolkit() -> None:
    assert re.fullmatch(r"((sm|compute)_\d+a?, )+CUDA \d+\.\d+", KERNELS), KERNELS
    assert torch.version.cuda is not None
    assert KERNELS.rsplit(" ", 1)[1].split(".")[0] == torch.version.cuda.split(".")[0]


@pytest.mark.parametrize(
    ("kernels", "capability", "chosen"),
    [
        ("sm_80, sm_90, compute_90, CUDA 13.0", (8, 0), "sm_80"),
        ("sm_80, sm_90, compute_90, CUDA 13.0", (8, 9), "sm_80"),
        ("sm_80, sm_90, compute_90, CUDA 13.0", (9, 0), "sm_90"),
        ("sm_80, sm_90, compute_90, CUDA 13.0", (12, 0), "compute_90"),
        ("sm_80, sm_90, compute_90, CUDA 13.0", (7, 5), "none for this device"),
        ("none (ATen operations)", (9, 0), "ATen operations"),
    ],
)
def test_the_report_names_the_kernels_of_a_device(
    kernels: str, capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lltm._C.build_info", lambda: f"a: b\nCUDA kernels: {kernels}\n")
    assert lltm.__main__._cuda_kernels(*capability) == chosen
