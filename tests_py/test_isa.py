"""Selects and tests the kernels of each instruction set.

Uses separate processes, because libtorch reads ATEN_CPU_CAPABILITY once. oneDNN, which libtorch may
use for GEMMs, has a separate variable.
"""

from __future__ import annotations

import pytest
import support
import torch

ONEDNN = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
IN_ORDER = ("default", "avx2", "avx512")

PROGRAM = """
import sys
import support, lltm

chosen = lltm._C.cpu_kernels()
assert chosen == sys.argv[1], f"{chosen} kernels chosen"
for dtype in support.DTYPES[1:]:
    for shape in ((5, 3, 4, 7), (3, 40, 20, 300)):
        support.check_accuracy(
            support.sequence_outputs, lambda: support.sequence_arguments(shape, dtype)
        )
"""


# Checks only that the environment reaches the library; native tests cover more.
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=() if isa == "avx2" else pytest.mark.slow) for isa in IN_ORDER]
)
def test_the_kernels_of_each_instruction_set_are_chosen_and_right(isa: str) -> None:
    best = torch.backends.cpu.get_cpu_capability().lower()
    if (support.ARM and isa != "default") or (
        best in IN_ORDER and IN_ORDER.index(isa) > IN_ORDER.index(best)
    ):
        pytest.skip(f"this CPU has no {isa}")
    support.run_python(
        "-c",
        PROGRAM,
        support.BASELINE if isa == "default" else isa.upper(),
        ATEN_CPU_CAPABILITY=isa,
        ONEDNN_MAX_CPU_ISA=ONEDNN[isa],
    )
