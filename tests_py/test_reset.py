"""Resets inside a sequence: the state of a row starts anew before a step."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import DTYPES
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm

ops = torch.ops.lltm


@lltm.cell(
    gates=("i", "f", "g"), reads={"i": "x"}, states={"m": 0.5, "n": -0.25}, parameters={"p": 0.1}
)
def own(z: Any, h: Tensor, m: Tensor, n: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two states that do not begin with zero, and h element by element."""
    i, f, g = torch.sigmoid(z.i), torch.sigmoid(z.f + p * h), torch.tanh(z.g)
    m_next = f * m + i * g
    n_next = 0.5 * n + 0.25 * m_next
    return torch.tanh(m_next - n_next) * f, m_next, n_next


@lltm.cell(gates=("x",), reads={"x": "x"}, parameters={"u": 0.5})
def without_gemm(z: Any, h: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(z.x + u * h)


CELLS = {
    "lltm": "lltm",
    "lstm": "lstm",
    "gru": "gru",
    "own": own.text,
    "without_gemm": without_gemm.text,
}

# (T, B, I, H): one step; few rows, of few steps and of many; blocks; rows and units that fill none.
SHAPES = (
    (1, 3, 4, 5),
    (1, 40, 8, 96),
    (5, 3, 4, 7),
    (34, 2, 9, 17),
    (7, 70, 20, 64),
    (4, 33, 9, 130),
)
LENGTHS = (9, 7, 7, 4, 3, 3, 1)

# Of the largest value; results of one formula in another order.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 6e-2,
    torch.float16: 8e-3,
}


class Problem:
    """Arguments of `sequence`, those of a PackedSequence where `shape` are lengths."""

    def __init__(
        self,
        cell: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        reverse: bool = False,
        packed: bool = False,
        share: float = 0.25,
    ) -> None:
        torch.manual_seed(0)
        self.cell, self.reverse = CELLS[cell], reverse
        x_blocks, h_blocks, self.first, _, parameters, _ = ops._cell(self.cell)
        of_x, of_h = (sum(block >= 0 for block in blocks) for blocks in (x_blocks, h_blocks))
        if packed:
            sizes = [sum(n > t for n in shape) for t in range(max(shape))]
            self.batch_sizes: Tensor | None = torch.tensor(sizes)
            batch, inputs, hidden = len(shape), 6, 20
            rows: tuple[int, ...] = (sum(shape),)
        else:
            self.batch_sizes = None
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

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        return [
            None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
            for t in self.tensors
        ]

    def sequence(self, tensors: list[Tensor | None], checkpoint_steps: int = 0) -> Any:
        return ops.sequence(
            self.cell, *tensors, self.batch_sizes, self.reverse, self.reset, checkpoint_steps
        )

    def steps(self, tensors: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """The definition: a step each, of a state that was set to what it begins with."""
        x, h, c, *parameters = tensors
        assert x is not None
        assert h is not None
        rows = [x.shape[1]] * x.shape[0] if self.batch_sizes is None else self.batch_sizes.tolist()
        inputs, resets = x.reshape(-1, x.shape[-1]).split(rows), self.reset.reshape(-1).split(rows)
        outputs: list[Any] = [None] * len(rows)
        times = range(len(rows))
        for t in reversed(times) if self.reverse else times:
            anew = resets[t].unsqueeze(1)
            before_h, before_c = h[: rows[t]].masked_fill(anew, 0), None
            if c is not None:
                states = c[: rows[t]].chunk(len(self.first), dim=1)
                filled = (s.masked_fill(anew, v) for s, v in zip(states, self.first, strict=True))
                before_c = torch.cat(list(filled), dim=1)
            outputs[t], c_next = ops.step(self.cell, inputs[t], before_h, before_c, *parameters)
            h = torch.cat([outputs[t], h[rows[t] :]])
            c = None if c is None else torch.cat([c_next, c[rows[t] :]])
        output = torch.cat(outputs).view(*x.shape[:-1], h.shape[1])
        return output, h, output.new_empty(0) if c is None else c


def gradients(
    results: tuple[Tensor, ...], leaves: list[Tensor | None], grads: list[Tensor]
) -> list[Tensor]:
    given = [(y, g.to(y.dtype)) for y, g in zip(results, grads, strict=True) if y.requires_grad]
    outputs, of_outputs = zip(*given, strict=True)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return list(torch.autograd.grad(outputs, wanted, of_outputs, materialize_grads=True))


def check(mine: Any, exact: Any, dtype: torch.dtype) -> None:
    for k, (y, expected) in enumerate(zip(mine, exact, strict=True)):
        assert y.dtype == dtype
        if expected.numel() > 0:
            error = (y.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            assert error < TOLERANCE[dtype], k


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_its_steps_with_states_that_were_set(
    cell: str, dtype: torch.dtype, reverse: bool
) -> None:
    problems = [Problem(cell, shape, dtype, reverse) for shape in SHAPES]
    problems.append(Problem(cell, LENGTHS, dtype, reverse, packed=True))
    problems.append(Problem(cell, (5, 3, 4, 7), dtype, reverse, share=1.1))
    for problem in problems:
        leaves64 = problem.leaves(torch.float64)
        exact = problem.steps(leaves64)
        grads = [torch.randn_like(y) for y in exact]
        of_exact = gradients(exact, leaves64, grads)
        with torch.no_grad():
            check(problem.sequence(problem.tensors), exact, dtype)
        for checkpoint_steps in (0, 2):
            leaves = problem.leaves()
            results = problem.sequence(leaves, checkpoint_steps)
            check(results, exact, dtype)
            check(gradients(results, leaves, grads), of_exact, dtype)


@pytest.mark.parametrize("cell", CELLS)
def test_a_mask_without_resets_changes_nothing(cell: str) -> None:
    for shape in SHAPES:
        problem = Problem(cell, shape, share=-1)
        with_mask = problem.sequence(problem.tensors)
        without = ops.sequence(problem.cell, *problem.tensors)
        for a, b in zip(with_mask, without, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_that_was_before_shows(cell: str) -> None:
    """Not even NaN."""
    for shape in ((6, 3, 4, 7), (6, 40, 9, 64)):
        problem = Problem(cell, shape, share=-1)
        problem.reset[3] = True
        output, *states = problem.sequence(problem.tensors)
        spoilt = [None if t is None else t.clone() for t in problem.tensors]
        for tensor in spoilt[1:3]:
            if tensor is not None:
                tensor.fill_(math.nan)
        other, *others = problem.sequence(spoilt)
        assert other[:3].isnan().any()
        assert torch.equal(output[3:], other[3:])
        assert all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


def test_no_gradient_goes_further_back() -> None:
    for shape in ((6, 3, 4, 7), (6, 40, 9, 64), (1, 40, 9, 64)):
        problem = Problem("lstm", shape, share=-1)
        problem.reset[shape[0] // 2] = True
        leaves = problem.leaves()
        results = problem.sequence(leaves)
        x, h, c, *_ = gradients(results, leaves, [torch.zeros_like(results[0]), *results[1:]])
        assert not any(g.any() for g in (x[: shape[0] // 2], h, c))
        assert x[shape[0] // 2 :].any()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_prepacked(cell: str, dtype: torch.dtype) -> None:
    problems = [Problem(cell, shape, dtype) for shape in SHAPES]
    for problem in [*problems, Problem(cell, LENGTHS, dtype, reverse=True, packed=True)]:
        x, h, c, weight_ih, weight_hh, *biases = problem.tensors
        packed = ops.prepack(problem.cell, weight_ih, weight_hh)
        results = ops.sequence_prepacked(
            problem.cell,
            x,
            h,
            c,
            packed,
            *biases,
            problem.batch_sizes,
            problem.reverse,
            problem.reset,
        )
        check(results, problem.steps(problem.leaves(torch.float64)), dtype)


@pytest.mark.parametrize("cell", ["lltm", "lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8(cell: str, dtype: torch.dtype) -> None:
    """The steps before a reset and those from it on, each alone."""
    problem = Problem(cell, (8, 5, 12, 40), dtype, share=-1)
    problem.reset[5] = True
    x, h, c, weight_ih, weight_hh, *biases = problem.tensors
    assert x is not None
    assert h is not None
    x[2, 1, 3] = 1e6  # a row that cannot be quantised is computed once more
    packed = ops.prepack(problem.cell, weight_ih, weight_hh, dtype=torch.qint8)

    def run(part: Tensor, h: Tensor, c: Tensor | None, reset: Tensor | None = None) -> Any:
        return ops.sequence_prepacked(problem.cell, part, h, c, packed, *biases, reset=reset)

    output, h_n, _ = run(x, h, c, problem.reset)
    before, *_ = run(x[:5], h, c)
    after, last, _ = run(x[5:], torch.zeros_like(h), None if c is None else torch.zeros_like(c))
    rows = [0, 2, 3, 4]
    assert torch.equal(output[:5, rows], before[:, rows])
    assert torch.equal(output[5:, rows], after[:, rows])
    assert torch.equal(h_n[rows], last[rows])
    assert torch.allclose(output[5:, 1], after[:, 1], atol=0.05)


# ---- modules ------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "LLTM": (lltm.LLTM, lltm.reference.LLTM),
    "LSTM": (lltm.LSTM, lltm.reference.LSTM),
    "GRU": (lltm.GRU, lltm.reference.GRU),
}


def pair_of(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    ours, reference = LAYERS[name]
    mine, plain = ours(4, 7, **options), reference(4, 7, **options)
    plain.load_state_dict(mine.state_dict())
    return mine, plain


def flat(results: Any) -> list[Tensor]:
    output, state = results
    states = [state] if isinstance(state, Tensor) else list(state)
    return [output.data if isinstance(output, PackedSequence) else output, *states]


def assert_same(mine: Any, plain: Any) -> None:
    for a, b in zip(flat(mine), flat(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    mine, plain = pair_of(name, num_layers=2, bidirectional=True)
    x, reset = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    assert_same(mine(x, reset=reset), plain(x, None, reset))
    assert_same(mine.prepack()(x, reset=reset), plain(x, None, reset))
    assert_same(mine(x[:, 0], reset=reset[:, 0]), plain(x[:, 0], reset=reset[:, 0]))
    with torch.no_grad():
        assert_same(mine(x, reset=reset), plain(x, reset=reset))
    packed = pack_padded_sequence(x, torch.tensor([2, 6, 5]), enforce_sorted=False)
    mask = pack_padded_sequence(reset, torch.tensor([2, 6, 5]), enforce_sorted=False).data
    assert_same(mine(packed, reset=mask), plain(packed, reset=mask))


@pytest.mark.parametrize("name", LAYERS)
def test_batch_first(name: str) -> None:
    mine, plain = pair_of(name, batch_first=True)
    x, reset = torch.randn(3, 6, 4), torch.rand(3, 6) < 0.3
    assert_same(mine(x, reset=reset), plain(x, reset=reset))


def test_layers_of_own_cells() -> None:
    layer = own.Layer(4, 7, batch_first=True)
    x = torch.randn(3, 6, 4)
    reset = torch.zeros(3, 6, dtype=torch.bool)
    reset[:, 2] = True
    output, states = layer(x, reset=reset)
    before, _ = layer(x[:, :2])
    after, last = layer(x[:, 2:])  # from the states' initial values
    torch.testing.assert_close(output, torch.cat([before, after], dim=1))
    for a, b in zip(states, last, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(layer.prepack()(x, reset=reset)[0], output)


def test_the_functions_of_the_lltm() -> None:
    a = support.sequence_arguments((6, 3, 4, 7))
    reset = torch.rand(6, 3) < 0.3
    state = (a.h, a.c)
    expected = lltm.reference.sequence(a.input, state, a.weights, a.bias, reset=reset)
    assert_same(lltm.functional.sequence(a.input, state, a.weights, a.bias, reset=reset), expected)
    packed = lltm.functional.prepack(a.weights)
    result = lltm.functional.sequence_prepacked(a.input, state, packed, a.bias, reset=reset)
    assert_same(result, expected)


# ---- transforms, compilers ----------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_derivatives(cell: str) -> None:
    problem = Problem(cell, (3, 2, 2, 2), torch.float64, share=0.3)
    leaves = problem.leaves()
    given = [t for t in leaves if t is not None]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        results = problem.sequence([None if t is None else next(rest) for t in leaves])
        return tuple(y for y in results if y.numel() > 0)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("packed", [False, True])
def test_vmap(packed: bool) -> None:
    problem = Problem("gru", LENGTHS if packed else (5, 3, 4, 7), packed=packed)
    masks = torch.rand(4, *problem.reset.shape) < 0.3
    x = problem.tensors[0]
    assert x is not None
    inputs = torch.stack([x, 2 * x, -x, x / 2])

    def run(x: Tensor, reset: Tensor) -> Tensor:
        output: Tensor = ops.sequence(
            problem.cell, x, *problem.tensors[1:], problem.batch_sizes, False, reset
        )[0]
        return output

    for dims in ((0, 0), (None, 0), (0, None)):
        arguments = [a if dim == 0 else a[0] for a, dim in zip((inputs, masks), dims, strict=True)]
        mapped = torch.vmap(run, dims)(*arguments)
        for k in range(4):
            each = [a[k] if dim == 0 else a for a, dim in zip(arguments, dims, strict=True)]
            torch.testing.assert_close(mapped[k], run(*each))
    grad = torch.func.grad(lambda x: run(x, masks[0]).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(leaf, masks[0]).square().sum(), leaf)
    torch.testing.assert_close(grad, expected)


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = own.Layer(4, 7) if name == "own" else LAYERS[name][0](4, 7)

    def forward(self, x: Tensor, reset: Tensor) -> Tensor:
        output: Tensor = self.layer(x, reset=reset)[0]
        return output


@pytest.mark.xdist_group("compilers")
class TestGraphs:
    x, reset = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3

    @pytest.mark.parametrize("name", [*LAYERS, "own"])
    @pytest.mark.parametrize(
        "backend",
        [
            pytest.param("aot_eager", id="aot"),
            # Generates C++ of every step.
            pytest.param(lltm.inductor_decomposed, id="ours", marks=pytest.mark.slow),
        ],
    )
    def test_compiled(self, name: str, backend: Any) -> None:
        model = Model(name)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(self.x, self.reset), model(self.x, self.reset))
        losses = [m(self.x, self.reset).square().sum() for m in (compiled, model)]
        parameters = list(model.parameters())
        of_compiled, expected = (torch.autograd.grad(loss, parameters) for loss in losses)
        for a, b in zip(of_compiled, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["LLTM", "GRU", "own"])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_exported(self, name: str, dynamic: bool) -> None:
        model = Model(name)
        steps = {0: torch.export.Dim("steps", min=2, max=100)} if dynamic else None
        program = torch.export.export(
            model, (self.x, self.reset), dynamic_shapes=(steps, steps) if dynamic else None
        )
        expected = model(self.x, self.reset)
        torch.testing.assert_close(program.module()(self.x, self.reset), expected)
        core = program.run_decompositions(support.decompositions())
        assert "lltm" not in str(core.graph)
        torch.testing.assert_close(core.module()(self.x, self.reset), expected)

    def test_scripted(self) -> None:
        for name in LAYERS:
            model = Model(name)
            scripted = torch.jit.script(model)
            expected = model(self.x, self.reset)
            torch.testing.assert_close(scripted(self.x, self.reset), expected)
            file = io.BytesIO()
            torch.jit.save(scripted, file)
            file.seek(0)
            loaded = torch.jit.load(file)
            torch.testing.assert_close(loaded(self.x, self.reset), expected)

    def test_traced_by_fx(self) -> None:
        model = Model("GRU")
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(traced(self.x, self.reset), model(self.x, self.reset))

    def test_opcheck(self) -> None:
        for problem in (Problem("lstm", (4, 3, 2, 5)), Problem("gru", LENGTHS, packed=True)):
            arguments = (problem.cell, *problem.leaves(), problem.batch_sizes, True, problem.reset)
            for checkpoint_steps in (0, 2):
                torch.library.opcheck(ops.sequence.default, (*arguments, checkpoint_steps))


@pytest.mark.xdist_group("compilers")
def test_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="part of the test extra")
    onnxruntime = pytest.importorskip("onnxruntime", reason="part of the test extra")
    model = Model("GRU").eval()
    x, reset = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    program = torch.onnx.export(model, (x, reset), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [i.name for i in session.get_inputs()]
    (output,) = session.run(None, dict(zip(names, (x.numpy(), reset.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(output), model(x, reset))


# ---- errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reset", "error", "text"),
    [
        (torch.zeros(5, 3), TypeError, "expected reset of dtype bool, got float32"),
        (torch.zeros(5, dtype=torch.bool), ValueError, r"reset of shape \(5, 3\), got \(5,\)"),
        (torch.zeros(3, 5, dtype=torch.bool), ValueError, r"of shape \(5, 3\), got \(3, 5\)"),
        (
            torch.zeros(5, 3, dtype=torch.bool, device="meta"),
            RuntimeError,
            "expected reset on device cpu, got meta",
        ),
        (torch.zeros(5, 3, dtype=torch.bool).to_sparse(), RuntimeError, "of layout Strided"),
        ([[True]], TypeError, "expected reset to be a tensor"),
    ],
    ids=["dtype", "rank", "shape", "device", "layout", "type"],
)
def test_errors(reset: Any, error: type[Exception], text: str) -> None:
    a = support.sequence_arguments((5, 3, 4, 7))
    with pytest.raises(error, match=f"lltm::sequence: .*{text}"):
        lltm.functional.sequence(a.input, (a.h, a.c), a.weights, a.bias, reset=reset)
    where = "LLTM"
    with pytest.raises(error, match=f"lltm::{where}: .*{text}"):
        lltm.LLTM(4, 7)(a.input, reset=reset)
    with pytest.raises(error):
        lltm.reference.LLTM(4, 7)(a.input, reset=reset)


def test_errors_of_packed_rows() -> None:
    a = support.packed_arguments((4, 2, 1))
    reset = torch.zeros(4, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"expected reset of shape \(7,\), got \(4, 3\)"):
        lltm.functional.sequence(
            a.input, (a.h, a.c), a.weights, a.bias, batch_sizes=a.batch_sizes, reset=reset
        )


def test_no_steps_and_no_rows() -> None:
    for shape in ((0, 3, 4, 7), (5, 0, 4, 7)):
        for cell in CELLS:
            problem = Problem(cell, shape)
            leaves = problem.leaves()
            output, h_n, _ = results = problem.sequence(leaves)
            assert output.shape == (*shape[:2], 7)
            assert torch.equal(h_n, leaves[1])  # type: ignore[arg-type]
            gradients(results, leaves, [torch.ones_like(y) for y in results])
