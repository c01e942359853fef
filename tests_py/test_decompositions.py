"""lltm.decompositions(): values and exported programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attack
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


def without_steps(call: dict[str, Any]) -> dict[str, Any]:
    by_steps = ("input", "reset", "output", "saved", "grad_output")
    return {k: x[:0] if k in by_steps and x is not None else x for k, x in call.items()}


@pytest.mark.parametrize("cell", [*attack.CELLS, OUTPUTS.text], ids=lambda cell: cell.split()[0])
def test_decomposed_operators_agree_with_the_operators(cell: str) -> None:
    table, parameters = support.decompositions(), torch.ops.lltm._cell(cell)[4]
    for name, values in attack.calls_of(cell, dtype=torch.float64):
        if not name.startswith("sequence"):
            continue
        op = getattr(torch.ops.lltm, name).default
        call = dict(zip(attack.names_of(name), values, strict=True))
        left = call["batch_sizes"] is not None or call["weight_ih"].dtype == torch.uint8
        left |= name != "sequence" and call["checkpoint_steps"] > 0
        if left:
            assert table[op](**call) is NotImplemented
            continue
        calls = [call, {**call, "reverse": not call["reverse"]}]
        if call["input"].dim() == 3:
            calls.append(without_steps(call))
        if name == "sequence_backward":  # some gradients, of some results
            for wanted in (0, 1):
                mask = [want and k % 2 == wanted for k, want in enumerate(call["output_mask"])]
                given = "grad_output" if wanted else "grad_h_n"
                calls.append({**call, given: None, "output_mask": mask})
        elif parameters == 0:
            calls.append({**call, "bias_ih": None, "bias_hh": None})
        for arguments in calls:
            found, expected = ([*run(**arguments)] for run in (table[op], op))
            if name == "sequence_forward" and " mean " in cell:
                found, expected = found[:3], expected[:3]  # kernels save one value of a row's mean
            for y, z in zip(found, expected, strict=True):
                assert y is z is None or torch.allclose(y, z, 1e-7, 1e-7), name


@pytest.mark.parametrize("steps", [1, 0])
def test_decomposed_operators_return_no_argument(steps: int) -> None:
    table, ops = support.decompositions(), torch.ops.lltm
    a = support.sequence_arguments((steps, 4, 3, 5))
    results = table[ops.sequence.default](*a.operands())
    places = [tensor.untyped_storage().data_ptr() for tensor in (a.h, a.c, *results[1:])]
    assert len(set(places)) == len(places)


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
