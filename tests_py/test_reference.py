"""Compares lltm.reference with the oracle and with lltm's modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import support
import torch
from support import LENGTHS, of_cell

import lltm


def assert_equal_to_the_oracle(outputs: support.Outputs, arguments: support.Arguments) -> None:
    with torch.no_grad():
        grads = [torch.randn_like(y) for y in outputs(lltm.reference, arguments)]
    exact = support.exact_results_and_gradients(arguments, grads)
    named = support.results_and_gradients(outputs, lltm.reference, arguments, grads)
    for name, y in named.items():
        np.testing.assert_allclose(
            oracle.array(y).reshape(exact[name].shape),
            exact[name],
            rtol=1e-12,
            atol=1e-12,
            err_msg=name,
        )


each_cell = pytest.mark.parametrize("cell", support.CELLS)


@each_cell
def test_the_cell_equals_the_oracle(cell: str) -> None:
    arguments = of_cell(cell, support.cell_arguments((4, 3, 5), torch.float64))
    assert_equal_to_the_oracle(support.cell_outputs, arguments)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@each_cell
def test_the_sequence_equals_the_oracle(cell: str, reverse: bool) -> None:
    arguments = support.sequence_arguments((6, 4, 3, 5), torch.float64, reverse=reverse)
    arguments = of_cell(cell, arguments)
    assert_equal_to_the_oracle(support.sequence_outputs, arguments)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@each_cell
def test_the_packed_sequence_equals_the_oracle(
    cell: str, lengths: tuple[int, ...], reverse: bool
) -> None:
    arguments = support.packed_arguments(lengths, dtype=torch.float64, reverse=reverse)
    arguments = of_cell(cell, arguments)
    assert_equal_to_the_oracle(support.sequence_outputs, arguments)


@pytest.mark.parametrize(
    ("package", "namespaces"), [(lltm.reference, {"aten"}), (lltm, {"aten", "lltm"})]
)
def test_runs_only_operators_of_pytorch(package: Any, namespaces: set[str]) -> None:
    layer = package.LLTM(3, 5, num_layers=2, bidirectional=True)
    cell = package.LLTMCell(3, 5)
    with support.Operators() as operators:
        layer(torch.randn(6, 4, 3))[0].sum().backward()
        cell(torch.randn(4, 3))[0].sum().backward()
    assert {name.partition(".")[0] for name, _ in operators.called} == namespaces
