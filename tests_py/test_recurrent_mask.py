"""Recurrent masks: a factor of h where the GEMM of every step reads it; recurrent dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from support import DTYPES
from test_reset import CELLS, LAYERS, LENGTHS, SHAPES, Problem, assert_same, check, gradients, own
from torch import Tensor, nn

import lltm

ops = torch.ops.lltm


class Masked(Problem):
    """A problem with a mask, and without resets unless `share` is given."""

    def __init__(
        self,
        cell: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        share: float = -1,
        **options: Any,
    ) -> None:
        super().__init__(cell, shape, dtype, share=share, **options)
        h = self.tensors[1]
        assert h is not None
        self.mask = nn.functional.dropout(torch.ones_like(h), 1 / 3)

    def sequence(self, tensors: list[Tensor | None], checkpoint_steps: int = 0) -> Any:
        options = (self.batch_sizes, self.reverse, self.reset, checkpoint_steps, self.mask)
        return ops.sequence(self.cell, *tensors, *options)

    def rows(self, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
        """The definition: each row alone, with the columns of weight_hh times its mask."""
        x, h, c, weight_ih, weight_hh, *biases = tensors
        assert x is not None
        assert h is not None
        assert weight_hh is not None
        batch, hidden = h.shape
        sizes = [batch] * x.shape[0] if self.batch_sizes is None else self.batch_sizes.tolist()
        offsets = [sum(sizes[:t]) for t in range(len(sizes))]
        flat, resets = x.reshape(-1, x.shape[-1]), self.reset.reshape(-1)
        output, states = torch.zeros(flat.shape[0], hidden, dtype=x.dtype), []
        for b in range(batch):
            own_rows = [offset + b for offset, size in zip(offsets, sizes, strict=True) if b < size]
            of_row, *state = ops.sequence(
                self.cell,
                flat[own_rows].unsqueeze(1),
                h[b : b + 1],
                None if c is None else c[b : b + 1],
                weight_ih,
                weight_hh * self.mask[b].to(x.dtype),
                *biases,
                None,
                self.reverse,
                resets[own_rows].unsqueeze(1),
            )
            output = output.index_copy(0, torch.tensor(own_rows), of_row.squeeze(1))
            states.append(state)
        h_n, c_n = (torch.cat(parts) for parts in zip(*states, strict=True))
        return output.view(*x.shape[:-1], hidden), h_n, c_n


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_each_row_with_weights_of_its_own(cell: str, dtype: torch.dtype) -> None:
    problems = [
        Masked(cell, shape, dtype, reverse=k % 2 == 1, share=0.25 if k > 2 else -1)
        for k, shape in enumerate(SHAPES)
    ]
    problems.append(Masked(cell, LENGTHS, dtype, packed=True))
    problems.append(Masked(cell, LENGTHS, dtype, share=0.25, reverse=True, packed=True))
    for problem in problems:
        leaves64 = problem.leaves(torch.float64)
        exact = problem.rows(leaves64)
        grads = [torch.randn_like(y) for y in exact]
        of_exact = gradients(exact, leaves64, grads)
        with torch.no_grad():
            check(problem.sequence(problem.tensors), exact, dtype)
        for checkpoint_steps in (0, 2):
            leaves = problem.leaves()
            results = problem.sequence(leaves, checkpoint_steps)
            check(results, exact, dtype)
            check(gradients(results, leaves, grads), of_exact, dtype)


def test_a_mask_of_any_strides() -> None:
    for shape in SHAPES:
        problem = Masked("lstm", shape)
        expected = problem.sequence(problem.tensors)
        problem.mask = problem.mask.t().contiguous().t()
        for a, b in zip(problem.sequence(problem.tensors), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_derivatives(cell: str) -> None:
    """Those of the mask too."""
    problem = Masked(cell, (3, 2, 2, 2), torch.float64, share=0.3)
    leaves = problem.leaves()
    given = [t for t in leaves if t is not None]

    def run(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        problem.mask, rest = mask, iter(values)
        results = problem.sequence([None if t is None else next(rest) for t in leaves])
        return tuple(y for y in results if y.numel() > 0)

    for mask in (problem.mask.clone(), torch.randn(2, 2, dtype=torch.float64).requires_grad_()):
        assert torch.autograd.gradcheck(run, (mask, *given), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(run, (mask, *given), fast_mode=True)


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(packed: bool) -> None:
    problem = Masked("gru", LENGTHS if packed else (5, 3, 4, 7), packed=packed)
    masks = torch.rand(4, *problem.mask.shape)

    def run(mask: Tensor) -> Tensor:
        options = (problem.batch_sizes, False, None, 0, mask)
        output: Tensor = ops.sequence(problem.cell, *problem.tensors, *options)[0]
        return output

    expected = torch.stack([run(mask) for mask in masks])
    torch.testing.assert_close(torch.vmap(run)(masks), expected)


def test_autocast() -> None:
    problem = Masked("lstm", (5, 40, 8, 64))
    with torch.autocast("cpu", torch.bfloat16):
        results = problem.sequence(problem.tensors)
    check(results, problem.rows(problem.leaves(torch.float64)), torch.bfloat16)


# ---- modules ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_layers(name: str, p: float) -> None:
    ours, reference = LAYERS[name]
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "recurrent_dropout": p}
    mine, plain = ours(4, 7, **options), reference(4, 7, **options)
    plain.load_state_dict(mine.state_dict())
    x = torch.randn(6, 3, 4)

    def run(layer: Any, seed: int = 1) -> Any:
        torch.manual_seed(seed)
        return layer(x)

    assert_same(run(mine), run(plain))
    assert_same(run(mine), run(mine))
    if p < 1:
        assert not torch.equal(run(mine)[0], run(mine, seed=2)[0])
    without = ours(4, 7, num_layers=2, bidirectional=True)
    without.load_state_dict(mine.state_dict())
    assert not torch.allclose(run(mine)[0], run(without)[0])
    assert_same(run(mine.eval()), run(without))
    assert_same(run(mine.prepack()), run(without))
    assert f"recurrent_dropout={p}" in repr(mine)
    scripted = torch.jit.script(mine.train())
    assert_same(run(scripted), run(mine))
    assert_same(run(scripted.eval()), run(without))


def test_each_row_and_direction_has_a_mask_of_its_own() -> None:
    """Rows and directions that are alike but for that."""
    layer = lltm.GRU(4, 64, bidirectional=True, recurrent_dropout=0.5)
    state = layer.state_dict()
    layer.load_state_dict({name: state[name.removesuffix("_reverse")] for name in state})
    output, _ = layer(torch.ones(3, 2, 4), torch.full((2, 2, 64), 0.5))
    forward, backward = output[0, :, :64], output[-1, :, 64:]
    assert len({row[0].item() for row in (*forward, *backward)}) == 4


def test_layers_of_own_cells() -> None:
    layer = own.Layer(4, 7, recurrent_dropout=1.0)
    x = torch.randn(6, 3, 4)
    dropped, _ = layer(x)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()  # type: ignore[operator]
    expected, _ = layer.eval()(x)
    torch.testing.assert_close(dropped, expected)


def test_the_function_of_the_lltm() -> None:
    a = support.sequence_arguments((6, 3, 4, 7))
    mask, state = torch.rand(3, 7), (a.h, a.c)
    expected = lltm.reference.sequence(a.input, state, a.weights, a.bias, recurrent_mask=mask)
    result = lltm.functional.sequence(a.input, state, a.weights, a.bias, recurrent_mask=mask)
    assert_same(result, expected)


# ---- compilers ----------------------------------------------------------------------


class Model(nn.Module):
    """The operator with a mask, so that what is compared does not depend on a generator."""

    def __init__(self, problem: Masked) -> None:
        super().__init__()
        self.problem = problem
        _, *given = (None if t is None else nn.Parameter(t) for t in problem.tensors)
        self.given = nn.ParameterList([t for t in given if t is not None])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rest = iter(self.given)
        _, *there = (t is not None for t in self.problem.tensors)
        tensors = [next(rest) if is_there else None for is_there in there]
        output: Tensor = ops.sequence(
            self.problem.cell, x, *tensors, None, self.problem.reverse, None, 0, mask
        )[0]
        return output


@pytest.mark.xdist_group("compilers")
class TestGraphs:
    @pytest.mark.slow  # generates C++ of every step
    @pytest.mark.parametrize("cell", CELLS)
    def test_compiled(self, cell: str) -> None:
        problem = Masked(cell, (5, 3, 4, 7))
        model = Model(problem)
        x = problem.tensors[0]
        compiled = torch.compile(model, fullgraph=True, backend=lltm.inductor_decomposed)
        outputs = [m(x, problem.mask) for m in (compiled, model)]
        torch.testing.assert_close(*outputs)
        # Not of a cell's h or c that a program has no product of.
        wanted = [p for p in model.parameters() if p.numel() > 0]
        of_compiled, expected = (
            torch.autograd.grad(y.square().sum(), wanted, allow_unused=True) for y in outputs
        )
        for a, b in zip(of_compiled, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_exported(self, dynamic: bool) -> None:
        problem = Masked("own", (5, 3, 4, 7), reverse=True)
        model, arguments = Model(problem), (problem.tensors[0], problem.mask)
        shapes = ({0: torch.export.Dim("steps", min=2, max=100)}, None) if dynamic else None
        program = torch.export.export(model, arguments, dynamic_shapes=shapes)
        core = program.run_decompositions(support.decompositions())
        assert "lltm" not in str(core.graph)
        torch.testing.assert_close(core.module()(*arguments), model(*arguments))

    def test_layer_compiled(self) -> None:
        layer = lltm.LSTM(4, 7, num_layers=2, recurrent_dropout=1.0)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(6, 3, 4)
        assert_same(compiled(x), layer(x))

    @pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
    def test_onnx_would_write_one_mask_for_good(self) -> None:
        pytest.importorskip("onnxscript")
        layer = lltm.LSTM(4, 7, recurrent_dropout=0.5)
        x = torch.randn(6, 3, 4)
        with pytest.raises(Exception, match="recurrent mask can't be exported"):
            torch.onnx.export(layer, (x,), dynamo=True, verbose=False)
        assert torch.onnx.export(layer.eval(), (x,), dynamo=True, verbose=False) is not None

    def test_opcheck(self) -> None:
        for problem in (Masked("lstm", (4, 3, 2, 5)), Masked("gru", LENGTHS, packed=True)):
            arguments = (problem.cell, *problem.leaves(), problem.batch_sizes, True, problem.reset)
            for checkpoint_steps in (0, 2):
                torch.library.opcheck(
                    ops.sequence.default, (*arguments, checkpoint_steps, problem.mask)
                )


# ---- errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (torch.zeros(3, 7).double(), TypeError, "expected recurrent_mask of dtype float32"),
        (torch.zeros(7), ValueError, r"recurrent_mask of shape \(B, H\)|of shape \(3, 7\)"),
        (torch.zeros(7, 3), ValueError, r"recurrent_mask of shape \(3, 7\), got \(7, 3\)"),
        (torch.zeros(3, 7, device="meta"), RuntimeError, "recurrent_mask on device cpu, got meta"),
        (torch.zeros(3, 7).to_sparse(), RuntimeError, "recurrent_mask of layout Strided"),
        ([[1.0]], TypeError, "expected recurrent_mask to be a tensor"),
    ],
    ids=["dtype", "rank", "shape", "device", "layout", "type"],
)
def test_errors(mask: Any, error: type[Exception], text: str) -> None:
    a = support.sequence_arguments((5, 3, 4, 7))
    with pytest.raises(error, match=f"lltm::sequence: .*({text})"):
        lltm.functional.sequence(a.input, (a.h, a.c), a.weights, a.bias, recurrent_mask=mask)


@pytest.mark.parametrize("make", [lltm.LLTM, lltm.LSTM, lltm.GRU, own.Layer])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_probabilities(make: Callable[..., Any], value: float) -> None:
    with pytest.raises(
        lltm.ArgumentError, match=rf"expected recurrent_dropout to lie in \[0, 1\], got {value}"
    ):
        make(4, 7, recurrent_dropout=value)


def test_a_projection_takes_none() -> None:
    with pytest.raises(lltm.ArgumentError, match="recurrent_dropout to be 0 with proj_size"):
        lltm.LSTM(4, 7, proj_size=3, recurrent_dropout=0.5)
