"""Cells from the literature: examples/cells."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import support
import torch

import lltm.testing

FOLDER, NAMES = support.GALLERY, support.GALLERY_CELLS

# Small and large batches use different engines; odd sizes.
SHAPES = [(6, 3, 4, 5), (5, 40, 24, 72)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

OWN_GRADIENT = {"lif", "rsynaptic"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fastest for small layers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_agrees_with_its_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = support.gallery_cell(name, monkeypatch)
    lltm.testing.check_cell(cell, shapes=SHAPES, dtypes=DTYPES)
    assert ("\nown_gradient\n" in cell.text) == (name in OWN_GRADIENT)


@pytest.mark.parametrize("name", NAMES)
def test_a_bounded_cell_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other cells do exceed 1, so that the list is complete."""
    cell = support.gallery_cell(name, monkeypatch)
    layer = cell.Layer(8, 16, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(8)
        output, _ = layer(4 * torch.randn(50, 20, 8, dtype=torch.float64))
    assert (output.abs().max().item() <= 1) == ("\nbounded\n" in cell.text)


def rows_of_the_table() -> dict[str, tuple[str, ...]]:
    lines = (FOLDER / "README.md").read_text().splitlines()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("| [")]
    return {re.sub(r"\[(\w+)\].*", r"\1", cell): tuple(rest) for cell, *rest in rows}


def test_the_table_describes_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows_of_the_table()
    assert sorted(table) == NAMES
    for name, (paper, *row) in table.items():
        cell = support.gallery_cell(name, monkeypatch)
        weights = [re.findall(rf"^weight_{k}h( .*)?$", cell.text, re.MULTILINE)[0] for k in "ih"]
        (saved,) = re.findall(r"^save(.*)$", cell.text, re.MULTILINE)
        of_x, of_h = map(str.split, weights)
        gates = [
            gate
            + (" (only x)" if gate not in of_h else "")
            + (" (only h)" if gate not in of_x else "")
            for gate in cell.gates
        ]
        columns = [", ".join(names) for names in (gates, cell.states, cell.parameters)]
        assert row == [*columns, str(len(saved.split()))], name
        source = (FOLDER / f"{name}.py").read_text()
        year = re.findall(r"\d{4}", paper)[0]
        assert re.search(rf"{re.split(' et al|,| ', paper)[0]}.*{year}", source, re.DOTALL), name


def test_the_slstm_learns_as_well_as_the_lstm() -> None:
    script, small = str(FOLDER / "train.py"), ("--steps", "6", "--updates", "200")
    results = [support.run_forked(script, *small, cwd=FOLDER) for _ in range(2)]
    tables = []
    for result in results:
        assert result.returncode == 0, result.stderr
        table, _, seconds = result.stdout.partition("seconds")
        assert re.fullmatch(r"( +\d+\.\d){2}\n", seconds)
        tables.append(table)
    assert tables[0] == tables[1]
    assert tables[0].startswith("updates     sLSTM      LSTM\n")
    rows = [[float(x) for x in line.split()] for line in tables[0].splitlines()[1:]]
    assert [row[0] for row in rows] == [40, 80, 120, 160, 200]
    assert max(rows[-1][1:]) < 0.08  # half the loss of always answering 1
