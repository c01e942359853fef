"""`cell.explain()`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, sigmoid, tanh

import lltm
from lltm.custom.program import Program


def sections(cell: lltm.Cell) -> dict[str, str]:
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
    found = sections(cell)
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
    assert sections(lltm.cells.slstm)["hints"] == "none"

    @lltm.cell(gates=("i", "f", "z", "o"), states={"m": -torch.inf})
    def whole(z: Any, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        kept = torch.nn.functional.logsigmoid(z.f) + m
        m_next = torch.maximum(kept, z.i)
        f, i = torch.exp(kept - m_next), torch.exp(z.i - m_next)
        c_next, n_next = f * c + i * tanh(z.z), f * n + i
        return sigmoid(z.o) * c_next / n_next, c_next, n_next, m_next

    hints = unwrapped(sections(whole)["hints"])
    assert re.search(r"save 1 additional value\. .* call detach\(\) on it", hints)


def test_functions_of_only_parameters_are_computed_once() -> None:
    @lltm.cell(gates=1, parameters={"decay": 1.0})
    def leaky(z: Any, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        kept = sigmoid(1 - decay)
        v_next = kept * v + z[0]
        return tanh(v_next), v_next

    assert sections(leaky)["cell"].endswith("bounded     no\ncomputed once kept")
