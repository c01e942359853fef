"""T = 0: every result depends on every argument, as those of torch.nn.functional.linear do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import support
import torch
from support import Arguments
from torch import Tensor

import lltm


def arguments(kind: str) -> Arguments:
    a = support.sequence_arguments((0, 4, 3, 5), torch.float64, reverse=kind == "reverse")
    if kind != "packed":
        return a
    none = torch.zeros(0, dtype=torch.int64)
    return replace(a, input=a.input.flatten(0, 1), batch_sizes=none)


each_kind = pytest.mark.parametrize("kind", ["dense", "reverse", "packed"])
each_implementation = pytest.mark.parametrize(
    "implementation", [lltm.functional, lltm.reference], ids=["lltm", "reference"]
)
each_saving = pytest.mark.parametrize("checkpoint_steps", [0, 2])


@each_kind
@each_implementation
@each_saving
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_depend_on_every_argument(
    kind: str, implementation: Any, checkpoint_steps: int, device: str
) -> None:
    a = arguments(kind).map(lambda tensor: tensor.to(device))
    for name in support.NAMES:
        leaf = getattr(a, name).clone().requires_grad_()
        run = partial(support.checkpointed_outputs, checkpoint_steps, implementation)
        for k, y in enumerate(run(a.with_argument(name, leaf))):
            assert y.requires_grad, (name, k)
            (gradient,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            expected = torch.full_like(leaf, float((name, k) in {("h", 1), ("c", 2)}))
            if device == "cpu":
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
            assert gradient.shape == leaf.shape


@each_kind
@each_implementation
@each_saving
def test_so_they_do_inside_of_a_transform(
    kind: str, implementation: Any, checkpoint_steps: int
) -> None:
    """Which runs the composite path."""
    a = arguments(kind)
    weights = a.weights.clone().requires_grad_()
    run = partial(support.checkpointed_outputs, checkpoint_steps, implementation)

    def of_h(h: Tensor) -> tuple[Tensor, ...]:
        return run(a.with_argument("h", h).with_argument("weights", weights))

    results, pull_back, *_ = torch.func.vjp(of_h, a.h)
    for y in results:
        assert y.requires_grad
        (gradient,) = torch.autograd.grad(y.sum(), weights, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(weights))
    (gradient,) = pull_back(tuple(torch.ones_like(y) for y in results))
    assert torch.equal(gradient, torch.ones_like(a.h))


@each_saving
@pytest.mark.parametrize("module", [lltm.LLTM, lltm.reference.LLTM], ids=["lltm", "reference"])
def test_a_layer_has_zero_gradients(module: type[lltm.LLTM], checkpoint_steps: int) -> None:
    layer = module(3, 5, num_layers=2, bidirectional=True, checkpoint_steps=checkpoint_steps)
    output, (h_n, c_n) = layer(torch.randn(0, 4, 3))
    for y in (output, h_n, c_n):
        assert y.requires_grad
    (output.sum() + h_n.sum() + c_n.sum()).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
