"""CUDA kernels without a GPU: registered."""

from __future__ import annotations

import re

import pytest
import torch

import lltm

KERNELS = dict(line.split(": ", 1) for line in lltm.build_info().splitlines())["CUDA kernels"]
BUILT = "LLTM_CUDA is OFF" not in KERNELS
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
