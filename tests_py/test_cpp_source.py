"""`cell.cpp_source` and `cell.explain()`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor, sigmoid, tanh

import lltm
from lltm.custom.program import Program, evaluate


@lltm.cell(
    gates=("int", "union", "V"),
    reads={"int": "h", "V": "x"},
    states={"double": float("-inf"), "states": 0.5},
    parameters={"saved": 2.0, "dh": lltm.scalar(0.5)},
    bias={"V": False},
    outputs=("states", "h"),
)
def words(
    z: Any, h: Tensor, double: Tensor, states: Tensor, saved: Tensor, dh: Tensor
) -> tuple[Tensor, ...]:
    """A cell whose names collide with C++, cell definitions and math.h."""
    new = sigmoid(z.int * saved) - 0.3 * h
    namespace = torch.where(z.V > 0, torch.clamp(z.union, -1, 1), 2 - new / (new * new + 3))
    logical_and = torch.maximum(double, namespace - (new - h)).detach()
    kSaved = torch.exp(namespace - logical_and)
    dz_int = (kSaved > 0.5) & ~(new == 2)
    return tanh(torch.where(dz_int, kSaved, new * dh)), logical_and, states * new


@lltm.cell(gates=2, name="V")
def linear(z: Any) -> Tensor:
    """Saves only one value and does not read h."""
    y: Tensor = z[0] * 0.5 + z[1] * z[1]
    return y


def cells() -> list[lltm.Cell]:
    of_literature = [getattr(lltm.cells, name) for name in dir(lltm.cells)]
    made = [cell for cell in of_literature if isinstance(cell, lltm.Cell)]
    element_wise = [cell for cell in made if not re.search("= (product|mean) ", cell.text)]
    return [words, linear, *element_wise]


def array(values: Tensor) -> str:
    return ", ".join(repr(x).replace("inf", "HUGE_VAL") for x in values.tolist())


def calls(struct: str, cell: lltm.Cell, numbers: dict[str, Tensor]) -> str:
    """Prints forward and backward results."""
    header = Program.read(cell.text)
    states, own = numbers["states"], numbers["parameters"]
    plain = "StepForward" in cell.cpp_source
    lines = ["{", f"const double z[] = {{{array(numbers['z'])}}};"]
    c, dc = ("c[0]", "dc[0]") if plain else ("c", "dc")
    p = ", p" if header.parameters else ""
    lines += [f"const double c[] = {{{array(states)}}}, dc[] = {{{array(numbers['dc'])}}};"]
    lines += [f"const double p[] = {{{array(own)}}};"] * bool(p)
    lines += [f"const auto y = {struct}::forward<double>(z, {c}{p});"]
    after = "&y.c" if plain else "y.states"
    lines += ["print(&y.h, 1);", f"print({after}, {len(states)});"]
    lines += [f"print(y.saved, {struct}::kSaved);"]
    if plain and not header.states:  # backward receives the whole gradient
        dh = f"{0.75 + numbers['dc'].item()!r}"
        lines += [f"(void)dc;\nconst auto d = {struct}::backward<double>(y.saved, {dh});"]
    else:
        lines += [f"const auto d = {struct}::backward<double>(y.saved{p}, 0.75, {dc});"]
    lines += [f"print(d.dz, {struct}::kSlots);"]
    lines += [f"print(d.dparameters, {len(own)});"] * bool(p)
    lines += [f"print({'&d.dc' if plain else 'd.dstates'}, {len(states)});"]
    lines += [f"static_assert({struct}::kCell.slots == {len(cell.gates)});", "}"]
    narrow = re.sub(r"\bdouble\b", "float", "\n".join(lines))
    return "\n".join([*lines, narrow.replace("print(", "ignore(")])


def test_the_id_is_the_next_after_the_built_in_cells() -> None:
    cells_h = (support.ROOT / "cpp" / "src" / "cell" / "cells.h").read_text()
    (built_in,) = re.findall(r"^using Cells = CellList<(.*)>;", cells_h, re.MULTILINE)
    assert f".id = {len(built_in.split(', '))}," in words.cpp_source


def test_the_cpp_source_computes_the_same_as_the_program(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    includes, statements, expected = [], [], []
    for cell in cells():
        header = Program.read(cell.text)
        states = [*["h"] * (header.reads_h or not header.states), *header.states]
        slots = re.findall(r"kSlots = \d+;  // (.*)", cell.cpp_source)[0].split(", ")
        numbers = {
            name: torch.randn(size, generator=generator, dtype=torch.float64)
            for name, size in (
                ("z", len(slots)),
                ("states", len(states)),
                ("dc", len(states)),
                ("parameters", len(header.parameters)),
            )
        }
        (struct,) = re.findall(r"^struct (\w+) {", cell.cpp_source, re.MULTILINE)
        (tmp_path / f"{struct}.h").write_text(cell.cpp_source)
        includes.append(f'#include "{struct}.h"\n')
        statements.append(calls(struct, cell, numbers))
        for name, blocks in zip("xh", torch.ops.lltm._cell(cell.text), strict=False):
            assert f".{name}_blocks = {{{', '.join(map(str, blocks))}}}" in cell.cpp_source

        given = {f"z.{gate}": x for gate, x in zip(slots, numbers["z"], strict=True)}
        given |= dict(zip(states, numbers["states"], strict=True))
        own = dict(zip(header.parameters, numbers["parameters"], strict=True))
        y = given | own | evaluate(cell.text, "forward", given | own)
        tangents = dict(zip([f"d.{s}'" for s in states], numbers["dc"], strict=True))
        tangents["d.h'"] = 0.75 + tangents.get("d.h'", torch.tensor(0.0).double())
        kept = {name: y[name] for name in header.saved}
        d = evaluate(cell.text, "backward", kept | own | tangents)
        expected += [y["h'"], *(y[f"{s}'"] for s in states), *kept.values()]
        expected += [d[f"d.z.{gate}"] for gate in slots] + [d[f"d.{name}"] for name in own]
        expected += [d.get(f"d.{s}", torch.tensor(0.0)).double() for s in states]
    source = tmp_path / "pages.cpp"
    source.write_text(
        "#include <cmath>\n#include <cstdio>\n"
        + "".join(includes)
        + "void print(const double* x, int n) {\n"
        + '  for (int k = 0; k < n; ++k) std::printf("%.17g\\n", x[k]);\n}\n'
        + "void ignore(const float*, int) {}\n"
        + "using namespace lltm;\nint main() {\n"
        + "\n".join(statements)
        + "\n}\n"
    )
    program = tmp_path / "pages"
    compiler = os.environ.get("CXX", "c++")
    include = support.ROOT / "cpp" / "src"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-parameter"]
    command = [compiler, "-std=c++20", *warnings, f"-I{include}", str(source), "-o", str(program)]
    support.run(command)
    printed = support.run([program]).stdout.splitlines()
    got = torch.tensor([float(line) for line in printed], dtype=torch.float64)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_a_step_that_combines_hidden_units_has_no_cpp_source() -> None:
    for name, got in (("cornn", "the product z.v"), ("dreamer_gru", "a mean over")):
        with pytest.raises(lltm.ArgumentError, match=f"{name}: .* element-wise .* got {got}"):
            _ = getattr(lltm.cells, name).cpp_source
    members = re.findall(r" \.((?:scalars|without|outputs)\w* = .*),", words.cpp_source)
    assert members == ["outputs = 1", "scalars = 2", "without_bias = 1"]
    assert ".given_blocks = {0, 0, 0, 0, 1}" in lltm.cells.augru.cpp_source


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
    assert list(found) == ["cell", "saved", "forward", "backward", "hints", "cpp_source"]
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
    assert found["cpp_source"] + "\n" == cell.cpp_source
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


def test_hints_at_functions_of_only_parameters() -> None:
    @lltm.cell(gates=1, parameters={"decay": 1.0})
    def leaky(z: Any, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        kept = sigmoid(1 - decay)
        v_next = kept * v + z[0]
        return tanh(v_next), v_next

    assert unwrapped(sections(leaky)["hints"]).startswith(
        "kept = sigmoid t1 depends only on parameters, but is computed in each time step."
    )
