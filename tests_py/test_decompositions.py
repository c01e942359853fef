"""lltm.decompositions(): values and exported programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import support
import torch

import lltm

pytestmark = pytest.mark.xdist_group("compilers")


def test_the_table_adds_every_lltm_operator_to_the_default() -> None:
    table = lltm.decompositions()
    default = torch.export.default_decompositions()
    assert set(default) <= set(table)
    # Operators on prepacked weights have no decomposition: only lltm's kernels can read these
    # weights.
    names = {
        name.removeprefix("lltm::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("lltm::") and "pack" not in name
    }
    assert {op for op in table if getattr(op, "namespace", "") == "lltm"} == {
        getattr(torch.ops.lltm, name).default for name in names
    }


OUTPUTS = lltm.cell(gates=("a", "b"), outputs=("c",), name="outputs")(
    lambda z, c: (torch.tanh(z.a) * c, torch.sigmoid(z.b) + 0.5 * c)
)
each_cell = pytest.mark.parametrize("cell", [*support.CELLS, pytest.param(OUTPUTS.text, id="own")])
# Required gradients of input, h, c, weight_ih, weight_hh, bias_ih, bias_hh.
SOME = (True, False, True, False, True, True, False)
MASKS = ((True,) * 7, SOME, tuple(not wanted for wanted in SOME))


def check_gradients(op: Any, arguments: tuple[Any, ...], mask: list[bool]) -> None:
    """Unrequested gradients are None."""
    ours = support.decompositions()[op.default](*arguments, mask)
    assert [y is not None for y in ours] == mask
    torch.testing.assert_close(list(ours), list(op(*arguments, mask)))


@each_cell
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_decomposed_step_agrees_with_the_operator(bias: bool, cell: str) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    a = support.of_cell(cell, support.cell_arguments((4, 3, 5), torch.float64, bias))
    arguments = a.operands()
    output, *states = table[ops.sequence.default](*arguments)
    torch.testing.assert_close((output, *states), ops.sequence(*arguments))
    torch.testing.assert_close(tuple(states), ops.step(*arguments))


@each_cell
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("steps", [6, 1, 0])
def test_decomposed_sequences_agree_with_the_operators(
    steps: int, reverse: bool, cell: str
) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    plain = support.of_cell(
        cell, support.sequence_arguments((steps, 4, 3, 5), torch.float64, reverse=reverse)
    )
    for a in (plain, support.with_masks(plain)):
        arguments = (*a.operands(), None, reverse, a.reset, 0, a.recurrent_mask)
        torch.testing.assert_close(
            table[ops.sequence.default](*arguments), ops.sequence(*arguments)
        )
        results = ops.sequence_forward(*arguments)
        torch.testing.assert_close(table[ops.sequence_forward.default](*arguments), results)
        output, h_n, c_n, activations = results
        for grads, mask in zip(
            ((output, h_n, c_n), (None, h_n, None), (output, None, c_n)), MASKS, strict=True
        ):
            backward = (*arguments, output, activations, *grads)
            check_gradients(ops.sequence_backward, backward, a.wanted(mask))


@pytest.mark.parametrize("steps", [1, 0])
def test_decomposed_operators_return_no_argument(steps: int) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    a = support.sequence_arguments((steps, 4, 3, 5))
    results = table[ops.sequence.default](*a.operands())
    places = [tensor.untyped_storage().data_ptr() for tensor in (a.h, a.c, *results[1:])]
    assert len(set(places)) == len(places)


def test_training_with_checkpoints_is_not_decomposed() -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    a = support.sequence_arguments((4, 2, 3, 5))
    arguments = (*a.operands(), None, False, None, 2, None)
    assert table[ops.sequence_forward.default](*arguments) is NotImplemented
    output, h_n, c_n, saved = ops.sequence_forward(*arguments)
    grads = (output, h_n, c_n)
    backward = (*arguments, output, saved, *grads, a.wanted())
    assert table[ops.sequence_backward.default](*backward) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decompositions_meet_the_accuracy_criterion(dtype: torch.dtype) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    ours, eager = support.Errors(), support.Errors()
    for _ in range(4):
        a = support.sequence_arguments((10, 16, 32, 64), dtype)
        grads = [torch.randn_like(y) for y in support.sequence_outputs(lltm.functional, a)]
        exact = support.exact_results_and_gradients(a, grads)
        arguments = (*a.operands(), None, False, None, 0, None)
        *results, activations = table[ops.sequence_forward.default](*arguments)
        gradients = table[ops.sequence_backward.default](
            *arguments, results[0], activations, *grads, a.wanted()
        )
        gradients = [y for y in gradients if y is not None]
        for k, y in enumerate(results):
            ours.add(f"output {k}", y, exact[f"output {k}"])
        for name, y in zip(support.NAMES, gradients, strict=True):
            ours.add(f"grad of {name}", y, exact[f"grad of {name}"])
        plain = support.results_and_gradients(support.sequence_outputs, lltm.reference, a, grads)
        for name, y in plain.items():
            eager.add(name, y, exact[name])
    eps = torch.finfo(dtype).eps
    for name in eager.names():
        assert ours.relative(name) <= 2 * max(eager.relative(name), 4 * eps), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_decomposed_step_accumulates_its_pre_activations_in_float32(dtype: torch.dtype) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    a = support.cell_arguments((64, 128, 256), dtype)
    exact = support.cell_outputs(lltm.reference, a.to(torch.float64))
    _, *cell = table[ops.sequence.default](*a.operands())
    _, *states = table[ops.sequence.default](*replace(a, input=a.input[None]).operands())
    for ours, y in zip((*cell, *states), (*exact, *exact), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), y, rtol=0.51 * eps, atol=1e-5)
