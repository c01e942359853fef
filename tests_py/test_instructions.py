"""Instruction count check: callgrind files and verdicts."""

from __future__ import annotations

import json
from typing import Any

import instructions

# As written by callgrind: each name once, then its number; absolute and relative positions. Costs:
# liblltm 100 + 7 + 30, program 2, libtorch 1000, C library 400.
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


def test_more_than_three_percent_above_the_file_fails() -> None:
    for count, expected in ((10_300, 0), (10_301, 1), (9_000, 0)):
        status, lines = instructions.compare(run(cell=10_000, b=5), run(cell=count, b=5))
        assert status == expected
        assert any("FAILED  cell: lltm 10,000 -> 10,301" in line for line in lines) == expected
    now = run(cell=10_000)
    now.instructions["cell"]["all"] = 1_031_000
    assert instructions.compare(run(cell=10_000), now)[0] == 1


def test_cases_that_one_side_lacks_fail_and_counts_of_other_tools_are_not_compared() -> None:
    status, lines = instructions.compare(run(a=1, b=1), run(b=1, c=1))
    assert status == 1
    assert lines[:2] == ["FAILED  a: in instructions.json only", "FAILED  c: in this run only"]
    status, lines = instructions.compare(run(a=1), run(TOOLS | {"compiler": "2"}, a=2))
    assert status == 77
    assert "  compiler: '1' there, '2' here" in lines


def test_the_file_has_a_case_a_line() -> None:
    text = instructions.BASELINE.read_text()
    assert instructions.as_json(instructions.Run(**json.loads(text))) == text
