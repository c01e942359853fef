"""State resets before a step, and recurrent masks: factors of h in each step's GEMM.

Covers custom cells, int8 weights and derivatives of masks. See test_properties.py for built-in
modules, tests_cpp/test_cells.cpp for engines.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import support
import torch
from support import DTYPES
from torch import Tensor, nn

import lltm
import lltm.testing

ops = torch.ops.lltm


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


OWN = {"own": own.text, "without_gemm": without_gemm.text}
EQUATIONS = {cell.text: lltm.testing._equations(cell) for cell in (own, without_gemm)}
CELLS = {**{name: name for name in support.CELLS}, **OWN}
each_cell = pytest.mark.parametrize("cell", CELLS)
each_custom_cell = pytest.mark.parametrize("cell", OWN)

# (T, B, I, H): one step; small batches; full and partial blocks; empty.
SHAPES = (
    *((1, 3, 4, 5), (1, 40, 8, 96), (5, 3, 4, 7), (34, 2, 9, 17)),
    *((7, 70, 20, 64), (4, 33, 9, 130), (0, 3, 4, 7), (5, 0, 4, 7)),
)
LENGTHS = (9, 7, 7, 4, 3, 3, 1)

# Relative to the largest value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


class Problem:
    """Resets are random; packed if `shape` is LENGTHS."""

    def __init__(
        self,
        cell: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        reverse: bool = False,
        share: float = 0.25,
        masked: bool = False,
    ) -> None:
        torch.default_generator.manual_seed(0)
        self.cell, self.reverse = CELLS[cell], reverse
        x_blocks, h_blocks, self.first, _, parameters, *_ = ops._cell(self.cell)
        of_x, of_h = (sum(block >= 0 for block in blocks) for blocks in (x_blocks, h_blocks))
        self.batch_sizes: Tensor | None = None
        if shape == LENGTHS:
            sizes = [sum(n > t for n in shape) for t in range(max(shape))]
            self.batch_sizes = torch.tensor(sizes)
            batch, inputs, hidden = len(shape), 6, 20
            rows: tuple[int, ...] = (sum(shape),)
        else:
            steps, batch, inputs, hidden = shape
            rows = (steps, batch)

        def random(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(sizes, dtype=torch.float64) * scale).to(dtype)

        c = random(batch, len(self.first) * hidden) if self.first else None
        self.tensors: list[Tensor | None] = [
            random(*rows, inputs),
            random(batch, hidden).tanh(),
            c,
            random(of_x * hidden, inputs, scale=1 / math.sqrt(inputs)),
            random(of_h * hidden, hidden, scale=1 / math.sqrt(hidden)),
            random((of_x + parameters) * hidden, scale=0.5),
            random(of_h * hidden, scale=0.5),
        ]
        self.reset = torch.rand(rows) < share
        drawn = nn.functional.dropout(torch.ones(batch, hidden, dtype=dtype), 1 / 3)
        self.mask = drawn if masked else None

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        return [
            None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
            for t in self.tensors
        ]

    def sequence(self, tensors: list[Tensor | None], checkpoint_steps: int = 0) -> Any:
        options = self.batch_sizes, self.reverse, self.reset, checkpoint_steps, self.mask
        return ops.sequence(self.cell, *tensors, *options)

    def prepacked(self) -> Any:
        x, h, c, weight_ih, weight_hh, *biases = self.tensors
        packed = ops.prepack(self.cell, weight_ih, weight_hh)
        options = self.batch_sizes, self.reverse, self.reset
        return ops.sequence(self.cell, x, h, c, packed, None, *biases, *options)

    def steps(self, tensors: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Results of the reference's loop over steps."""
        x, h, c, weight_ih, weight_hh, bias_ih, bias_hh = tensors
        assert x is not None
        assert h is not None
        assert weight_ih is not None
        assert bias_ih is not None
        if (cell := EQUATIONS.get(self.cell)) is None:
            cell = lltm.reference._EQUATIONS[self.cell]._replace(joined=False)
        rows, hidden = len(weight_ih), h.shape[1]
        states = [h] if c is None else [h, *c.split(hidden, 1)]
        parameters = [hidden] * ((len(bias_ih) - rows) // hidden)
        bias_ih, *others = bias_ih.split([rows, *parameters])
        given = weight_ih, weight_hh, bias_ih, bias_hh, *others
        mask = None if self.mask is None else self.mask.to(x.dtype)
        options = self.batch_sizes, self.reverse, self.reset, mask
        output, (h, *others) = lltm.reference._steps(cell, x, states, given, *options)
        return output, h, torch.cat(others, 1) if others else output.new_empty(0)


def gradients(
    results: tuple[Tensor, ...], leaves: list[Tensor | None], grads: list[Tensor]
) -> list[Tensor]:
    given = [(y, g.to(y.dtype)) for y, g in zip(results, grads, strict=True) if y.requires_grad]
    outputs, of_outputs = zip(*given, strict=True)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return list(torch.autograd.grad(outputs, wanted, of_outputs, materialize_grads=True))


def check(mine: Any, exact: Any, dtype: torch.dtype) -> None:
    for k, (y, expected) in enumerate(zip(mine, exact, strict=True)):
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        if expected.numel() > 0:
            error = (y.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            assert error < TOLERANCE[dtype], k


@each_custom_cell
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resets_and_masks_equal_those_of_the_reference(cell: str, dtype: torch.dtype) -> None:
    kinds = [(shape, k % 2 == 1, 0.25) for k, shape in enumerate((*SHAPES, LENGTHS))]
    kinds += [(LENGTHS, True, 0.25), ((5, 3, 4, 7), False, 1.1), ((5, 3, 4, 7), True, -1)]
    for shape, reverse, share in kinds:
        for masked in (False, True):
            problem = Problem(cell, shape, dtype, reverse, share, masked)
            leaves64 = problem.leaves(torch.float64)
            exact = problem.steps(leaves64)
            grads = [torch.randn_like(y) for y in exact]
            of_exact = gradients(exact, leaves64, grads)
            with torch.no_grad():
                check(problem.sequence(problem.tensors), exact, dtype)
                if not masked:
                    check(problem.prepacked(), exact, dtype)
            for checkpoint_steps in (0, 2):
                leaves = problem.leaves()
                results = problem.sequence(leaves, checkpoint_steps)
                check(results, exact, dtype)
                check(gradients(results, leaves, grads), of_exact, dtype)


@pytest.mark.parametrize("cell", [cell for cell in support.CELLS if not cell.endswith("relu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8(cell: str, dtype: torch.dtype) -> None:
    """Results equal separate calls before and after the reset."""
    problem = Problem(cell, (8, 5, 12, 40), dtype, share=-1)
    problem.reset[5] = True
    x, h, c, weight_ih, weight_hh, *biases = problem.tensors
    assert x is not None
    assert h is not None
    x[2, 1, 3] = 1e6  # not quantizable, so this sequence is recomputed
    packed = ops.prepack(problem.cell, weight_ih, weight_hh, dtype=torch.qint8)

    def run(part: Tensor, h: Tensor, c: Tensor | None, reset: Tensor | None = None) -> Any:
        return ops.sequence(problem.cell, part, h, c, packed, None, *biases, reset=reset)

    output, h_n, _ = run(x, h, c, problem.reset)
    before, *_ = run(x[:5], h, c)
    after, last, _ = run(x[5:], torch.zeros_like(h), None if c is None else torch.zeros_like(c))
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


@each_cell
def test_derivatives(cell: str) -> None:
    problem = Problem(cell, (3, 2, 2, 2), torch.float64, share=0.3, masked=True)
    leaves = problem.leaves()
    given = [t for t in leaves if t is not None]

    def run(mask: Any, *values: Tensor) -> tuple[Tensor, ...]:
        problem.mask, rest = mask, iter(values)
        results = problem.sequence([None if t is None else next(rest) for t in leaves])
        return tuple(y for y in results if y.numel() > 0)

    drawn = torch.randn(2, 2, dtype=torch.float64).requires_grad_()
    masks: tuple[Any, ...] = (None, drawn)
    for mask in masks:
        assert torch.autograd.gradcheck(run, (mask, *given), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(run, (mask, *given), fast_mode=True)


@each_cell
def test_third_derivatives(cell: str) -> None:
    """Without a reset or mask."""
    problem = Problem(cell, (3, 2, 2, 2), torch.float64, share=0)
    leaves = problem.leaves()
    given = [t for t in leaves if t is not None and t.numel() > 0]

    def slopes(*values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        tensors = [t if t is None or t.numel() == 0 else next(rest) for t in leaves]
        loss = sum(y.square().sum() for y in ops.sequence(problem.cell, *tensors))
        return torch.autograd.grad(loss, values, create_graph=True)

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
