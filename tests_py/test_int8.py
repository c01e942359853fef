"""Weights prepacked with dtype=torch.qint8."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import Arguments, flat
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import lltm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Includes layer sizes, K that is not a multiple of 4, and partial panels.
SHAPES = [
    *((10, 16, 32, 128), (1, 1, 1, 1), (5, 3, 4, 7), (33, 2, 9, 17), (4, 70, 65, 64)),
    *((3, 40, 20, 300), (20, 1, 128, 256), (12, 6, 33, 100), (3, 130, 30, 200)),
]


def quantized(a: Arguments) -> tuple[Tensor, ...]:
    packed = lltm.functional.prepack(a.cell, a.weights, a.weight_hh, torch.qint8)
    return support.sequence_outputs(lltm.functional, a, packed)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Computes in float64."""
    rounded = (x.double() / scale).round()
    return torch.where(scale == 0, 0.0, rounded * scale)


def by_rows(x: Tensor, least: float = 0.0) -> Tensor:
    return quantize(x, x.double().abs().amax(-1, keepdim=True).clamp(min=least) / 127)


def weights_by_rows(x: Tensor) -> Tensor:
    """17-bit scales make products exact."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return quantize(x, (scale.view(torch.int32) & ~0x7F).view(torch.float32).double())


def emulated(a: Arguments, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and gates are float64. Each step reads h of the step before from `read`."""
    hidden, dtype = a.h.shape[1], a.input.dtype
    w_h, w_x = (weights_by_rows(w) for w in (a.weights[:, :hidden], a.weights[:, hidden:]))
    bias = 0 if a.bias is None else a.bias.double()
    one = torch.ones((), dtype=torch.float64)
    h, c = by_rows(a.h, least=1.0), a.c.double()
    outputs = [a.h] * len(a.input)
    steps = range(len(a.input))
    for t in reversed(steps) if a.reverse else steps:
        i, o, g = (by_rows(a.input[t]) @ w_x.T + h @ w_h.T + bias).chunk(3, 1)
        c = (c + i.sigmoid() * torch.nn.functional.elu(g)).to(dtype).double()
        outputs[t] = (c.tanh() * o.sigmoid()).to(dtype)
        h = quantize(read[t], one / 127)
    last = outputs[0 if a.reverse else -1]
    return torch.stack(outputs), last, c.to(dtype)


def is_emulated(a: Arguments) -> None:
    # Near a quantizer threshold, the last float32 bit changes x by a step: few elements differ.
    # Later steps would amplify such a step of h, so the emulation reads the h of the kernels.
    eps = torch.finfo(a.input.dtype).eps
    flip = a.weights.double().abs().max().item() / 127
    results = quantized(a)
    for ours, expected in zip(results, emulated(a, results[0]), strict=True):
        assert ours.dtype == expected.dtype
        difference = (ours.double() - expected.double()).abs()
        assert difference.max().item() <= 4 * flip + 4 * eps * expected.double().abs().max().item()
        if a.input.dtype == torch.float32:
            assert (difference > 100 * eps).double().mean().item() <= 0.05
        else:
            assert difference.mean().item() <= 2 * eps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_computes_the_quantized_sequence(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Covers each shape and each dtype, not all combinations."""
    reverse = (SHAPES.index(shape) + DTYPES.index(dtype)) % 2 == 1
    is_emulated(support.sequence_arguments(shape, dtype, reverse=reverse))


BAD = (math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max)


def spoilt(a: Arguments, rows: list[int], argument: str, value: float) -> Arguments:
    """Changes the last input step."""
    tensor = getattr(a, argument).clone()
    for row in rows:
        if argument != "input":
            tensor[row, 3] = value
        elif a.batch_sizes is None:
            tensor[-1, row, 3] = value
        else:
            steps = [t for t, size in enumerate(a.batch_sizes.tolist()) if size > row]
            tensor[int(a.batch_sizes[: steps[-1]].sum()) + row, 3] = value
    return a.with_argument(argument, tensor)


def only(a: Arguments, rows: list[int], sequence: Tensor) -> Tensor:
    if a.batch_sizes is None:
        return sequence[:, rows].flatten(0, 1)
    begins = (a.batch_sizes.cumsum(0) - a.batch_sizes).tolist()
    steps = zip(begins, a.batch_sizes.tolist(), strict=True)
    return sequence[[begin + row for begin, size in steps for row in rows if row < size]]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (partial(support.sequence_arguments, (5, 1, 9, 35)), [0]),
        (partial(support.sequence_arguments, (5, 3, 9, 35)), [0, 1, 2]),
        (partial(support.sequence_arguments, (5, 40, 9, 100)), [1, 17, 39]),
        (partial(support.sequence_arguments, (5, 40, 9, 100), torch.bfloat16), [0]),
        (partial(support.sequence_arguments, (5, 6, 9, 35), torch.float16), [2]),
        (partial(support.packed_arguments, (7, 5, 5, 2, 1), 9, 35), [0]),
        (partial(support.packed_arguments, (7, 5, 5, 2, 1), 9, 35), [1, 3]),
        (partial(support.packed_arguments, (7, 5, 5, 2, 1), 9, 35), [4]),
    ],
    ids=lambda value: str(value if isinstance(value, list) else value.args),
)
def test_values_that_cannot_be_quantized_affect_only_their_sequences(
    problem: Callable[..., Arguments], rows: list[int], reverse: bool
) -> None:
    a = problem(reverse=reverse)
    others = [row for row in range(len(a.h)) if row not in rows]
    good = quantized(a)
    tolerance = max(1e-5, 2 * torch.finfo(a.input.dtype).eps)
    for argument, value in itertools.product(("input", "h", "c"), BAD):
        bad = spoilt(a, rows, argument, value)
        output, h_n, c_n = quantized(bad)
        assert torch.equal(only(a, others, output), only(a, others, good[0]))
        assert torch.equal(h_n[others], good[1][others])
        assert torch.equal(c_n[others], good[2][others])
        if math.isfinite(value) or (argument == "c" and math.isinf(value)):
            continue  # large values may be quantized; c never is
        hidden = a.h.shape[1]
        parts = (a.weights[:, :hidden], a.weights[:, hidden:])
        stood_for = torch.cat([weights_by_rows(part) for part in parts], 1)
        expected = support.sequence_outputs(
            lltm.functional, bad.with_argument("weights", stood_for.to(a.weights.dtype))
        )
        torch.testing.assert_close(
            (only(a, rows, output), h_n[rows], c_n[rows]),
            (only(a, rows, expected[0]), expected[1][rows], expected[2][rows]),
            atol=tolerance,
            rtol=tolerance,
            equal_nan=True,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [lltm.LLTM, lltm.LSTM, lltm.GRU, lltm.RNN])
def test_a_sequence_in_chunks_is_the_whole_sequence(module: Any, dtype: torch.dtype) -> None:
    int8 = module(24, 40, num_layers=2, dtype=dtype).prepack(torch.qint8)
    x = torch.randn(12, 9, 24, dtype=dtype)
    expected, state = int8(x)[0], None
    for chunk, part in zip(x.split(5), expected.split(5), strict=True):
        output, state = int8(chunk, state)
        assert torch.equal(output, part)


def test_states_above_one_are_accepted() -> None:
    a = support.sequence_arguments((3, 4, 5, 20))
    is_emulated(a.with_argument("h", a.h * 50))


def test_inputs_and_weights_of_zeros_are_accepted() -> None:
    a = support.sequence_arguments((3, 4, 5, 20))
    weights, x = a.weights.clone(), a.input.clone()
    weights[7] = 0
    weights[9, :20] = 0
    x[1] = 0
    a = a.with_argument("weights", weights).with_argument("input", x)
    is_emulated(a.with_argument("h", torch.zeros_like(a.h)))


def layer(**options: Any) -> lltm.LLTM:
    torch.manual_seed(0)
    return lltm.LLTM(24, 96, **options).eval()


def test_its_weights_need_a_quarter_of_the_bytes() -> None:
    float32 = lltm.LLTM(256, 512)
    (packed,) = (b for name, b in float32.prepack(torch.qint8).named_buffers() if "weights" in name)
    assert packed.dtype == torch.uint8
    # One byte per weight; a scale and a sum per row, for x and for h.
    header, rows, columns = 64, 3 * 512, 256 + 512
    assert packed.numel() == header + rows * (columns + 2 * 8)
    assert packed.numel() < 0.26 * 4 * next(float32.parameters()).numel()


@pytest.mark.parametrize(
    "cell",
    [
        *(partial(layer, 24, 70) for layer in (lltm.LLTM, lltm.LSTM, lltm.GRU)),
        *(partial(lltm.cells.cifg.Layer, 24, size, heads=5) for size in (70, 160)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_weights_are_packed_again_bitwise_identically(
    cell: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    make = partial(cell, num_layers=2, bidirectional=True, dtype=dtype)
    float_layer: Any = make()
    with torch.no_grad():  # rows without a scale; scales that float32 rounds
        for parameter in float_layer.parameters():
            parameter.mul_(torch.rand(parameter.shape[0]).reshape(-1, *[1] * (parameter.dim() - 1)))
            parameter[3] = 0
    int8 = float_layer.prepack(torch.qint8)
    loaded: Any = make().prepack(torch.qint8)
    torch.save(int8.state_dict(), tmp_path / "int8.pt")
    loaded.load_state_dict(torch.load(tmp_path / "int8.pt", weights_only=True))
    for module in (copy.copy(int8), copy.deepcopy(int8), pickle.loads(pickle.dumps(int8)), loaded):
        assert dict(module.named_buffers()).keys() == dict(int8.named_buffers()).keys()
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, int8.get_buffer(name))


@pytest.mark.parametrize("shape", [(5, 3, 9, 96), (1, 1, 4, 64), (7, 40, 20, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_compute_as_a_matrix_with_zeros(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    steps, batch, inputs, hidden = shape
    make = partial(lltm.cells.cifg.Layer, inputs, hidden, bidirectional=True, dtype=dtype)
    layer, dense = make(heads=hidden // 32), make()
    state_dict = layer.state_dict()
    for name in [name for name in state_dict if "weight_hh" in name]:
        blocks = state_dict[name].unflatten(1, (-1, 32)).movedim(1, 0)
        state_dict[name] = torch.cat([torch.block_diag(*gate) for gate in blocks])
    dense.load_state_dict(state_dict)
    x, reset = torch.randn(steps, batch, inputs, dtype=dtype), torch.rand(steps, batch) < 0.2
    packed = pack_padded_sequence(x, torch.arange(batch) % steps + 1, enforce_sorted=False)
    hx = torch.rand(2, 2, batch, hidden, dtype=dtype).unbind()
    for arguments in ({"input": x, "hx": hx, "reset": reset}, {"input": packed}):
        ours, theirs = (flat(m.prepack(torch.qint8)(**arguments)) for m in (layer, dense))
        assert all(map(torch.equal, ours, theirs))
    of_heads, of_zeros = (
        m.prepack(torch.qint8).get_buffer("packed_weights_l0").numel() for m in (layer, dense)
    )
    # Without zeros; the same scales and sums.
    assert of_zeros - of_heads == 3 * hidden * (hidden - 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_gates_are_computed_as_a_parameter_of_each_step(dtype: torch.dtype) -> None:
    def function(z: Any, m: Tensor) -> Tensor:
        return torch.tanh(z.a) * m

    parameters = {"m": torch.nn.init.uniform_}
    fixed = lltm.cell(gates=("a",), parameters=parameters, bounded=True)(function)
    options: dict[str, Any] = {"reads": {"m": "input"}, "bounded": True, "name": "given"}
    given = lltm.cell(gates=("a", "m"), **options)(lambda z: function(z, z.m))
    layer: Any = given.Layer(9 + 35, 35, dtype=dtype)
    int8, outputs, state = layer.prepack(torch.qint8), [], None
    x = torch.randn(6, 5, 9, dtype=dtype)
    steps: list[Any] = [fixed.Layer(9, 35, dtype=dtype) for _ in x]
    for step, input in zip(steps, x.split(1), strict=True):
        step.load_state_dict(layer.state_dict(), strict=False)
        output, state = step.prepack(torch.qint8)(input, state)
        outputs.append(output)
    m = torch.stack([step.m_l0.expand(5, -1) for step in steps])
    assert torch.equal(int8(torch.cat([x, m], -1))[0], torch.cat(outputs))


def test_weights_and_scales_are_saved() -> None:
    float32: Any = layer()
    weights = float32.weights_l0.detach()
    state_dict = float32.prepack(torch.qint8).state_dict()
    for name, part in (("weight_hh", weights[:, :96]), ("weight_ih", weights[:, 96:])):
        rows, scales = state_dict[f"{name}_int8_l0"], state_dict[f"{name}_scales_l0"]
        assert rows.dtype == torch.int8
        torch.testing.assert_close(scales, part.abs().amax(1) / 127, rtol=2**-16, atol=0)
        assert torch.equal(rows, (part.double() / scales.double()[:, None]).round().to(torch.int8))
    assert torch.equal(state_dict["bias_l0"], float32.bias_l0)
    assert len(state_dict) == 5


def test_other_dtypes_are_rejected() -> None:
    expected = "lltm::prepack: expected weights to be torch.qint8 or None, got"
    for dtype in (torch.int8, "qint8"):
        with pytest.raises(TypeError, match=f"{expected} {dtype!r}"):
            layer().prepack(dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bfloat16 or float16 to quantize, got float64"):
        layer(dtype=torch.float64).prepack(torch.qint8)


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_weights_that_are_not_finite_are_rejected(value: float) -> None:
    for place in ((0, 0), (95, 119), (287, 96)):
        bad = layer()
        with torch.no_grad():
            next(bad.parameters())[place] = value
        with pytest.raises(lltm.ArgumentError, match="finite weights to quantize, got inf or nan"):
            bad.prepack(torch.qint8)


def test_sizes_whose_sums_could_overflow_are_rejected() -> None:
    weights = torch.zeros(3, 1 + 65537)
    with pytest.raises(lltm.ArgumentError, match="at most 65536 to quantize, got 1 and 65537"):
        lltm.functional.prepack("lltm", weights, dtype=torch.qint8)
    a = support.sequence_arguments((1, 2, 65536, 1))
    is_emulated(a)
