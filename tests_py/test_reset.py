"""State resets before a step, and recurrent masks: factors of h in each step's GEMM.

Covers int8 weights, layers of custom cells and derivatives. lltm.testing.check_cell compares resets
of custom cells, test_properties.py those of built-in modules, tests_cpp/test_cells.cpp engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

import lltm
import lltm.testing


@lltm.cell(
    gates=("i", "f", "g"), reads={"i": "x"}, states={"m": 0.5, "n": -0.25}, parameters={"p": 0.1}
)
def own(z: Any, h: Tensor, m: Tensor, n: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two states with nonzero initial values, and elementwise h."""
    i, f, g = torch.sigmoid(z.i), torch.sigmoid(z.f + p * h), torch.tanh(z.g)
    m_next = f * m + i * g
    n_next = 0.5 * n + 0.25 * m_next
    return torch.tanh(m_next - n_next) * f, m_next, n_next


@lltm.cell(gates=("x",), reads={"x": "x"}, parameters={"u": 0.5})
def without_gemm(z: Any, h: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(z.x + u * h)


OWN = {"own": own, "without_gemm": without_gemm}
CELLS = {name: name for name in support.CELLS} | {name: cell.text for name, cell in OWN.items()}
each_cell = pytest.mark.parametrize("cell", CELLS)


@pytest.mark.parametrize("name", OWN)
def test_custom_cells_of_every_engine(name: str) -> None:
    """Small batches, full and partial blocks."""
    with support.threads(1):  # fastest for small layers
        lltm.testing.check_cell(OWN[name], shapes=[(9, 2, 9, 17), (3, 33, 9, 70)], verbose=False)


@pytest.mark.parametrize("cell", [cell for cell in support.CELLS if not cell.endswith("relu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8(cell: str, dtype: torch.dtype) -> None:
    """Results equal separate calls before and after the reset."""
    a = support.of_cell(cell, support.sequence_arguments((8, 5, 12, 40), dtype))
    a.input[2, 1, 3] = 1e6  # not quantizable, so this sequence is recomputed
    reset = torch.zeros(8, 5, dtype=torch.bool)
    reset[5] = True
    packed = lltm.functional.prepack(cell, a.weights, a.weight_hh, torch.qint8)

    def run(**changes: Any) -> tuple[Tensor, ...]:
        return support.sequence_outputs(lltm.functional, replace(a, **changes), packed)

    zeros: dict[str, Any] = {"h": torch.zeros_like(a.h), "c": torch.zeros_like(a.c)}
    output, h_n, *_ = run(reset=reset)
    before, *_ = run(input=a.input[:5])
    after, last, *_ = run(input=a.input[5:], **zeros)
    rows = [0, 2, 3, 4]
    assert torch.equal(output[:5, rows], before[:, rows])
    assert torch.equal(output[5:, rows], after[:, rows])
    assert torch.equal(h_n[rows], last[rows])
    assert torch.allclose(output[5:, 1], after[:, 1], atol=0.05)


def test_layers_of_custom_cells() -> None:
    layer = own.Layer(4, 7, batch_first=True)
    x = torch.randn(3, 6, 4)
    reset = torch.zeros(3, 6, dtype=torch.bool)
    reset[:, 2] = True
    output, states = layer(x, reset=reset)
    before, _ = layer(x[:, :2])
    after, last = layer(x[:, 2:])  # from initial states
    torch.testing.assert_close(output, torch.cat([before, after], dim=1))
    for a, b in zip(states, last, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(layer.prepack()(x, reset=reset)[0], output)
    layer.recurrent_dropout = 1.0
    dropped, _ = layer(x)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()  # type: ignore[operator]
    torch.testing.assert_close(dropped, layer.eval()(x)[0])


def test_masks_are_sampled_in_training_for_each_call_sequence_and_direction() -> None:
    """Sequences and directions are identical except for the mask."""
    layer = lltm.GRU(4, 64, bidirectional=True, recurrent_dropout=0.5)
    state = layer.state_dict()
    layer.load_state_dict({name: state[name.removesuffix("_reverse")] for name in state})
    x, h = torch.ones(3, 2, 4), torch.full((2, 2, 64), 0.5)
    drawn = set()
    for _ in range(2):
        output, _ = layer(x, h)
        forward, backward = output[0, :, :64], output[-1, :, 64:]
        drawn |= {row[0].item() for row in (*forward, *backward)}
    assert len(drawn) == 8
    assert "recurrent_dropout=0.5" in repr(layer)
    without = lltm.GRU(4, 64, bidirectional=True)
    without.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x, h), without(x, h))


def function_of_tensors(cell: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a function of reset, mask and tensors, and the tensors."""
    a = support.sequence_arguments((3, 2, 2, 2), torch.float64)
    a = support.of_cell(CELLS[cell], a).leaves()
    given = [t is not None for t in a.operands()[1:]]

    def run(reset: Any, mask: Any, *values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        operands = [next(rest) if there else None for there in given]
        results = torch.ops.lltm.sequence(a.cell, *operands, None, False, reset, 0, mask)
        return tuple(y for y in results if y.numel() > 0)

    return run, a.tensors()


@each_cell
def test_derivatives(cell: str) -> None:
    run, tensors = function_of_tensors(cell)
    reset = torch.rand(3, 2) < 0.3
    for mask in (None, torch.randn(2, 2, dtype=torch.float64).requires_grad_()):
        arguments: Any = (reset, mask, *tensors)
        assert torch.autograd.gradcheck(run, arguments, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)


@each_cell
def test_third_derivatives(cell: str) -> None:
    """Without a reset or mask."""
    run, tensors = function_of_tensors(cell)

    def slopes(*values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        given = [next(rest) if tensor.numel() > 0 else tensor for tensor in tensors]
        loss = sum(y.square().sum() for y in run(None, None, *given))
        return torch.autograd.grad(loss, values, create_graph=True)

    given = [tensor for tensor in tensors if tensor.numel() > 0]
    assert torch.autograd.gradgradcheck(slopes, given, fast_mode=True)


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, reset: Tensor) -> Tensor:
        output: Tensor = self.layer(x, reset=reset)[0]
        return output


@pytest.mark.xdist_group("compilers")
def test_a_scan_reads_resets_and_masks() -> None:
    model = Layer(own.Layer(4, 7, recurrent_dropout=1.0))  # the mask is zeros
    arguments = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    steps = {0: torch.export.Dim("steps", min=2, max=100)}
    program = torch.export.export(model, arguments, dynamic_shapes=(steps, steps))
    core = program.run_decompositions(support.decompositions())
    assert "lltm" not in str(core.graph)
    torch.testing.assert_close(core.module()(*arguments), model(*arguments))
