"""torch.autocast: lltm's results have its dtype, gradients the parameters' dtype."""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from support import flat
from torch import Tensor

import lltm

LOWER = (torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", LOWER, ids=str)


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


@each_dtype
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("given", [torch.float32, *LOWER], ids=str)
def test_layers_that_concatenate_tensors(
    given: torch.dtype, steps: int, dtype: torch.dtype
) -> None:
    """autocast's own cat raises an error for the other 16-bit dtype."""
    x = torch.randn(steps, 4, 3, dtype=given)
    for layer in (
        lltm.LSTM(3, 40, proj_size=2, bidirectional=True, dtype=given),
        lltm.GRU(3, 5, bidirectional=True, dtype=given),
    ):
        h = torch.randn(2, 4, 2 if layer.proj_size else 5, dtype=given)
        state = (h, torch.randn(2, 4, 40, dtype=given)) if layer.proj_size else h
        with autocast(dtype):
            prepacked = layer.prepack()
            results = [module(x, hx) for module in (layer, prepacked) for hx in (None, state)]
        dtypes = [{y.dtype for y in flat(result)} for result in results]
        assert dtypes == [{dtype}, {dtype}, {given}, {given}]


@each_dtype
@pytest.mark.parametrize("given", [torch.float32, *LOWER], ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_in_a_region_has_the_dtypes_of_forward(
    create_graph: bool, given: torch.dtype, dtype: torch.dtype
) -> None:
    options: Any = {"retain_graph": True, "create_graph": create_graph}
    for layer in (lltm.LLTM(4, 8, dtype=given), lltm.GRU(4, 8, dtype=given)):
        y = layer(torch.randn(9, 40, 4, dtype=given))[0].float().mean()
        expected = torch.autograd.grad(y, list(layer.parameters()), **options)
        with autocast(dtype):
            gradients = torch.autograd.grad(y, list(layer.parameters()), **options)
        torch.testing.assert_close(gradients, expected)


def test_weights_are_cast_once_in_a_region() -> None:
    cell = lltm.LLTMCell(3, 5)
    x = torch.randn(4, 3)
    with support.Operators() as operators, autocast(torch.bfloat16):
        h, c = cell(x)
        for _ in range(3):
            h, c = cell(x, (h, c))
    casts = [shapes for name, shapes in operators.called if name == "aten._to_copy"]
    # Only the initial states are float32.
    assert casts.count((15, 8)) == casts.count((15,)) == 1
    assert casts.count((4, 3)) == 4


def test_disabled_autocast_has_no_effect() -> None:
    cell = lltm.LLTMCell(3, 5)
    with autocast(torch.bfloat16), torch.autocast("cpu", enabled=False):
        h, c = cell(torch.randn(4, 3))
    assert h.dtype == c.dtype == torch.float32


@each_dtype
@pytest.mark.parametrize("module", ["cell", "layer"])
@pytest.mark.parametrize("transform", ["vmap", "ensemble", "grad", "per sample", "jvp", "twice"])
def test_transforms_use_the_dtypes_of_autocast(
    transform: str, module: str, dtype: torch.dtype
) -> None:
    layer = lltm.LLTMCell(3, 5) if module == "cell" else lltm.LLTM(3, 5, num_layers=2)
    x = torch.randn(3, 4, 3) if module == "cell" else torch.randn(3, 6, 4, 3)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    seen: list[Tensor] = []

    def run(parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        results = flat(torch.func.functional_call(layer, parameters, (x,)))
        seen.extend(results)
        return results

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return sum((y.float().square().sum() for y in run(parameters, x)), torch.zeros(()))

    gradients: list[Tensor] = []
    with autocast(dtype):
        if transform == "vmap":
            torch.vmap(run, in_dims=(None, 0))(parameters, x)
        elif transform == "ensemble":
            two = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
            torch.vmap(run, in_dims=(0, None))(two, x[0])
        elif transform == "grad":
            gradients = flat(torch.func.grad(loss)(parameters, x[0]))
        elif transform == "per sample":
            mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
            gradients = flat(mapped(parameters, x))
        elif transform == "jvp":
            torch.func.jvp(lambda x: run(parameters, x), (x[0],), (x[0],))
        else:
            once = torch.autograd.grad(
                loss(dict(layer.named_parameters()), x[0]),
                list(layer.parameters()),
                create_graph=True,
            )
            penalty = sum((g.square().sum() for g in once), torch.zeros(()))
            gradients = list(torch.autograd.grad(penalty, list(layer.parameters())))
    assert {y.dtype for y in seen} == {dtype}
    assert {y.dtype for y in gradients} <= {torch.float32}
