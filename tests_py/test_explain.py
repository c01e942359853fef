"""`python -m lltm.explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support
import torch

from lltm import explain

pytestmark = pytest.mark.xdist_group("compilers")

SMALL = ("--batch", "2", "--input-size", "3", "--hidden-size", "4")


def sections(*options: str) -> dict[str, str]:
    """Output by stage."""
    run = support.run_python("-m", "lltm.explain", *SMALL, *options)
    assert run.stderr == ""
    found = re.findall(r"^==== ([\w-]+): .*\n((?:(?!====).*\n)*)", run.stdout, re.MULTILINE)
    return dict(found)


def test_an_unavailable_device_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    for device in ("nowhere", "cuda:99"):
        options = ("-m", "lltm.explain", "--device", device)
        run = support.run_forked(*options, cwd=tmp_path, check=False)
        assert (run.returncode, run.stdout) == (2, "")
        said = f"error: argument --device: {device} is not an available device"
        assert run.stderr.splitlines()[-1].endswith(said)


@pytest.mark.slow  # compiles without caches
def test_every_stage_of_one_step_is_shown_and_described() -> None:
    found = sections()
    assert list(found) == list(explain.STAGES)
    assert "cpu_backend.cpp" in found["dispatcher"]
    assert "AutogradCPU: registered at" in found["dispatcher"]
    assert "B=2 I=3 H=4, cell: threads 1" in found["schedule"]
    assert "torch.ops.lltm.layer_step(" in found["dynamo"]
    assert "lltm.sequence_forward" in found["joint"]
    assert "lltm.sequence_backward" in found["joint"]
    assert "aten.addmm" in found["core-aten"]
    assert "lltm." not in found["core-aten"].replace("lltm.decompositions()", "")
    assert "lltm.sequence_forward" in found["inductor"]
    assert "lltm.sequence_backward" in found["inductor"]
    assert "tanh()" in found["inductor-decomposed"]
    for text in found.values():
        assert re.match(r"[A-Z](?:.+\n)*.*\.\n\n", text)


@pytest.mark.slow  # two processes trace a loop
def test_a_dynamic_sequence_is_shown_as_a_scan_and_twice_the_same() -> None:
    options = ("--op", "sequence", "--dynamic", "--only", "joint", "core-aten")
    found = sections(*options)
    assert list(found) == ["joint", "core-aten"]
    assert "lltm.sequence_backward" in found["joint"]
    assert "higher_order.scan" in found["core-aten"]
    assert sections(*options) == found


def test_a_long_line_of_the_schedule_is_wrapped() -> None:
    text = explain.schedule(explain.Call("sequence", 10, 16, 32, 128, dynamic=False))
    assert max(map(len, text.splitlines())) < 80
    forward, backward = text.replace("\n  ", " ").splitlines()
    assert forward.startswith("N=160 B=16 I=32 H=128, forward: ")
    assert backward.startswith("N=160 B=16 I=32 H=128, backward: ")


def test_the_steps_of_a_fixed_sequence_are_unrolled() -> None:
    call = explain.Call("sequence", 3, 2, 3, 4, dynamic=False)
    assert explain.core_aten(call).count("aten.elu") == 3
    assert "lltm.layer" in explain.dynamo(call)


def test_explaining_leaves_the_compiler_usable() -> None:
    explain.joint(explain.Call("step", 1, 2, 3, 4, dynamic=True))
    double = torch.compile(lambda x: 2 * x, backend="aot_eager", fullgraph=True)
    assert double(torch.ones(2)).tolist() == [2, 2]
