"""`python -m lltm.explain`, and `cell.explain()`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor, sigmoid, tanh

import lltm
from lltm import explain
from lltm.custom.program import Program

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


def test_the_short_stages_of_a_cell_are_shown(tmp_path: Path) -> None:
    """Of a built-in cell, of lltm.cells, and of a file; with more states or gates in the input."""
    lltm.cells.t_lstm.save(tmp_path / "my cell")
    of_custom = ["cell", "saved", "hints"]
    for cell, stages in {
        "gru": [],
        "slstm": of_custom,
        str(tmp_path / "my cell"): of_custom,
    }.items():
        for op in ("step", "sequence"):
            run = support.run_python("-m", "lltm.explain", *SMALL, "--cell", cell, "--op", op)
            shown = run.stdout.splitlines()
            assert len(shown) <= 45
            heads = [line for line in shown if line.startswith("====")]
            assert all(len(line) < 80 for line in shown if line not in heads)
            names = [*(stages or ["dispatcher"]), "schedule"]
            sizes = f"{cell}, {op}, {'T=3 ' * (op == 'sequence')}B=2 I=3 H=4"
            assert heads == [f"==== {name}: {sizes}" for name in names]
            assert "More with --all, or with --only: " in run.stdout


def test_cells_and_stages_that_do_not_exist_are_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "damaged").write_text("hello", encoding="utf-8")
    for arguments, said in {
        ("--cell", "cifgg"): "cifgg is not a file, and not one of lltm, lstm, gru, rnn, alif, ",
        ("--cell", str(tmp_path / "damaged")): f"cannot load {tmp_path / 'damaged'}: ",
        ("--cell", str(tmp_path)): f"cannot load {tmp_path}: ",
        ("--cell", "gru", "--only", "saved"): "saved: only of a custom cell, not of gru",
        ("--batch", "x"): "argument --batch: expected an integer of at least 1, got x",
    }.items():
        with pytest.raises(SystemExit):
            explain.main(arguments)
        assert said in capsys.readouterr().err


def test_a_call_that_exceeds_the_memory_is_an_error_of_one_line(tmp_path: Path) -> None:
    options = ("-m", "lltm.explain", "--only", "schedule", "--hidden-size", "10000000")
    run = support.run_python(*options, cwd=tmp_path, check=False)
    assert run.returncode == 1
    assert re.fullmatch(r"lltm, step, .* failed: RuntimeError: .*memory.*\n", run.stderr)


@pytest.mark.slow  # compiles without caches
def test_every_stage_of_one_step_is_shown_and_described() -> None:
    found = sections("--all")
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


def test_explaining_leaves_the_compiler_usable() -> None:
    explain.joint(explain.Call("step", 1, 2, 3, 4, dynamic=True))
    double = torch.compile(lambda x: 2 * x, backend="aot_eager", fullgraph=True)
    assert double(torch.ones(2)).tolist() == [2, 2]


def explained(cell: lltm.Cell) -> dict[str, str]:
    """Texts without the first sentence."""
    form = r"^==== (\w+): (\w+)\n(.*?)\n\n(.*?)\n(?=\n====|\Z)"
    found = re.findall(form, cell.explain(), re.MULTILINE | re.DOTALL)
    assert {name for _, name, _, _ in found} == {cell.name}
    assert all(re.match(r"[A-Z].*\.$|.*text\.$", s, re.DOTALL) for _, _, s, _ in found)
    return {title: text for title, _, _, text in found}


def unwrapped(text: str) -> str:
    """Joins wrapped prose; checks its width."""
    assert max(map(len, text.splitlines())) < 80
    return text.replace("\n  ", " ")


def test_explains_saved_values_and_instructions() -> None:
    cell = lltm.cells.peephole_lstm
    found = explained(cell)
    assert list(found) == ["cell", "saved", "forward", "backward", "hints"]
    assert unwrapped(found["cell"]).splitlines() == [
        "gates       i (x, h), f (x, h), g (x, h), o (x, h)",
        "states      c = 0.0",
        "parameters  p_i, p_f, p_o",
        f"bounded     {'yes' if 'bounded' in cell.text else 'no'}",
    ]
    *values, total = unwrapped(found["saved"]).splitlines()
    assert [value.split(" ")[0] for value in values] == list(Program.read(cell.text).saved)
    assert re.fullmatch(
        r"6 values, 24 bytes per hidden unit, sequence and time step in float32; in a Python loop"
        r" autograd saves (\d+) bytes",
        total,
    )
    for name in ("forward", "backward"):
        *lines, count = found[name].splitlines()
        assert "\n".join(lines) in cell.text
        executed = torch.ops.lltm._instructions(cell.text)[name == "backward"]
        assert count == f"{len(lines)} instructions, {executed} executed"
    assert lltm.Cell(cell.text).explain().count("autograd saves") == 0  # without its function


def test_hints_at_a_stabilizer_with_a_derivative() -> None:
    assert explained(lltm.cells.slstm)["hints"] == "none"

    @lltm.cell(gates=("i", "f", "z", "o"), states={"m": -torch.inf})
    def whole(z: Any, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        kept = torch.nn.functional.logsigmoid(z.f) + m
        m_next = torch.maximum(kept, z.i)
        f, i = torch.exp(kept - m_next), torch.exp(z.i - m_next)
        c_next, n_next = f * c + i * tanh(z.z), f * n + i
        return sigmoid(z.o) * c_next / n_next, c_next, n_next, m_next

    hints = unwrapped(explained(whole)["hints"])
    assert re.search(r"save 1 additional value\. .* call detach\(\) on it", hints)


def test_functions_of_only_parameters_are_computed_once() -> None:
    @lltm.cell(gates=1, parameters={"decay": 1.0})
    def leaky(z: Any, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        kept = sigmoid(1 - decay)
        v_next = kept * v + z[0]
        return tanh(v_next), v_next

    assert explained(leaky)["cell"].endswith("bounded     no\ncomputed once kept")
