"""The guard that counts instructions: reading callgrind's files, and the verdict."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import support

spec = importlib.util.spec_from_file_location(
    "instructions", support.ROOT / "benchmarks" / "instructions.py"
)
assert spec is not None
assert spec.loader is not None
instructions: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = instructions  # where dataclasses look for it
spec.loader.exec_module(instructions)

# As callgrind writes it: names once, then their numbers; positions absolute and relative. liblltm
# has 100 + 7 + 30 instructions of its own, the program 2, libtorch 1000, and the C library 400.
FILE = """\
# callgrind format
version: 1
creator: callgrind-3.19.0
part: 3

desc: Trigger: Client Request: prepack, f32, I:128,H:256

positions: line
events: Ir
summary: 1539

ob=(1) /somewhere/liblltm.so.0.1.0
fl=(1) ???
fn=(1) lltm::prepack
0 100
+3 7
cob=(2) /elsewhere/libtorch_cpu.so
cfn=(2) at::empty
calls=1 0
0 1400

ob=(2)
fn=(2)
0 1000
cob=(4) /usr/lib/libc.so.6
cfn=(5) malloc
calls=1 0
0 400

ob=(4)
fn=(5)
0 400

ob=(1)
fn=(3) lltm::pack_weights
* 30

ob=(3) /somewhere/lltm_count
fn=(4) main
12 2
cob=(1)
cfn=(1)
calls=1 0
* 1537

totals: 1539
"""


def test_a_file_of_callgrind_is_read() -> None:
    case, counts = instructions.counts_of(FILE, ("liblltm.so", "lltm_count"))
    assert case == "prepack, f32, I:128,H:256"
    assert counts == {"lltm": 139, "all": 1139}


TOOLS = dict.fromkeys(instructions.TOOLS, "1")


def run(tools: dict[str, str] = TOOLS, **cases: int) -> Any:
    counts = {name: {"lltm": count, "all": 1_000_000} for name, count in cases.items()}
    return instructions.Run(tools, counts)


@pytest.mark.parametrize(("count", "status"), [(10_300, 0), (10_301, 1), (9_000, 0)])
def test_more_than_three_percent_above_the_file_fails(count: int, status: int) -> None:
    found, lines = instructions.compare(run(cell=10_000, other=5), run(cell=count, other=5))
    assert found == status
    assert any("FAILED  cell: lltm 10,000 -> 10,301" in line for line in lines) == (status == 1)
    assert any("fewer   cell: lltm 10,000 -> 9,000" in line for line in lines) == (count < 10_000)


def test_all_instructions_are_compared_too() -> None:
    baseline, now = run(cell=10_000), run(cell=10_000)
    now.instructions["cell"]["all"] = 1_031_000
    status, lines = instructions.compare(baseline, now)
    assert status == 1
    assert "FAILED  cell: all 1,000,000 -> 1,031,000 (+3.1%)" in lines


def test_cases_that_one_side_lacks_fail() -> None:
    status, lines = instructions.compare(run(a=1, b=1), run(b=1, c=1))
    assert status == 1
    assert lines[:2] == [
        "FAILED  a: in instructions.json only",
        "FAILED  c: in this run only",
    ]


def test_counts_of_other_tools_are_not_compared() -> None:
    tools = TOOLS | {"compiler": "gcc 13.2.0"}
    status, lines = instructions.compare(run(cell=1), run(tools, cell=2))
    assert status == 77
    assert "  compiler: '1' there, 'gcc 13.2.0' here" in lines
    assert not any("FAILED" in line for line in lines)
