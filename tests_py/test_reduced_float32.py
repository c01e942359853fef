"""PyTorch's precision switch: float32 layers that multiply in bfloat16 on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import support
import torch
from support import Arguments, relative_errors
from test_reset import CELLS
from torch import Tensor

import lltm

RNN = torch.backends.mkldnn.rnn  # type: ignore[attr-defined]

SHAPE = (6, 40, 24, 96)  # blocked; padded operands, unpadded below
PADDED = (5, 33, 9, 70)

# Where the GEMM in bfloat16 is faster than in float32: AMX, AMD's AVX512-BF16, BFMMLA.
HAS_PRODUCTS = "micro-kernel: float32, bfloat16" in lltm.build_info()
needs_products = pytest.mark.skipif(not HAS_PRODUCTS, reason="no products of bfloat16 here")


@contextlib.contextmanager
def precision(place: Any, value: str) -> Iterator[None]:
    place.fp32_precision = value
    try:
        yield
    finally:
        place.fp32_precision = "none"  # inherits the outer setting, not its previous value


# Pre-activation errors move the jumps of a derivative to other elements.
WITHOUT_JUMPS = [cell for cell in CELLS if not cell.endswith("relu")]


def problem_of(cell: str, shape: Any, dtype: torch.dtype = torch.float32) -> Arguments:
    return support.of_cell(CELLS[cell], support.sequence_arguments(shape, dtype))


def sequence(a: Arguments) -> tuple[Tensor, ...]:
    return support.sequence_outputs(lltm.functional, a)


def results_of(a: Arguments, grads: Sequence[Tensor]) -> list[Tensor]:
    """Results, and all gradients."""
    grads = [grad.to(a.input.dtype) for grad in grads]
    outputs = support.sequence_outputs
    return [*support.results_and_gradients(outputs, lltm.functional, a, grads).values()]


@needs_products
@pytest.mark.parametrize("cell", WITHOUT_JUMPS)
@pytest.mark.parametrize("shape", [SHAPE, PADDED], ids=str)
def test_gemms_are_the_same_as_in_bfloat16(cell: str, shape: tuple[int, ...]) -> None:
    """Errors are as large as in bfloat16; results are float32."""
    a = problem_of(cell, shape)
    grads = [torch.randn_like(y) for y in sequence(a)]
    exact = results_of(a.to(torch.float64), grads)

    def run() -> tuple[list[float], list[float]]:
        """Errors of results and of gradients."""
        found = results_of(a, grads)
        assert all(y.dtype == torch.float32 for y in found)
        errors = relative_errors(found, exact)
        return errors[: len(grads)], errors[len(grads) :]

    with precision(RNN, "bf16"):
        reduced = run()
    usual = run()
    for part in usual:
        assert max(part) < 2e-5
    for part in reduced:
        assert 1e-4 < max(part) < 6e-2


def run_layer(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return lltm.LSTM(24, 96)(x)[0]  # type: ignore[no-any-return]


_WITHOUT_PRODUCTS = """
import torch, lltm

layer, x = lltm.LSTM(24, 96), torch.randn(6, 40, 24)
usual = layer(x)[0]
torch.backends.mkldnn.rnn.fp32_precision = "bf16"
assert torch.equal(layer(x)[0], usual)
"""


@pytest.mark.parametrize("capability", ["avx512", pytest.param("avx2", marks=pytest.mark.slow)])
def test_a_cpu_without_bfloat16_gemms_is_unaffected(capability: str) -> None:
    if reason := support.cannot_run(capability):
        pytest.skip(reason)
    support.run_python("-c", _WITHOUT_PRODUCTS, ATEN_CPU_CAPABILITY=capability)


@needs_products
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # mkldnn.flags
def test_where_it_is_set() -> None:
    x = torch.randn(6, 40, 24)
    usual = run_layer(x)
    with precision(RNN, "bf16"):
        reduced = run_layer(x)
    assert not torch.equal(usual, reduced)
    with precision(torch.backends.mkldnn, "bf16"):
        assert torch.equal(run_layer(x), reduced)
    with precision(torch.backends, "bf16"):
        assert torch.equal(run_layer(x), reduced)
        with precision(RNN, "ieee"):
            assert torch.equal(run_layer(x), usual)
    # TF32 is more exact than bfloat16.
    with precision(RNN, "tf32"):
        assert torch.equal(run_layer(x), usual)
    with precision(RNN, "bf16"), torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(run_layer(x), usual)
    assert torch.equal(run_layer(x), usual)


@pytest.mark.parametrize("shape", [(20, 1, 12, 40), (20, 4, 12, 40), (1, 30, 12, 40)], ids=str)
def test_small_batches_and_single_steps_are_unaffected(shape: tuple[int, ...]) -> None:
    a = problem_of("lstm", shape)
    grads = [torch.randn_like(y) for y in sequence(a)]
    usual = results_of(a, grads)
    with precision(RNN, "bf16"):
        assert all(map(torch.equal, results_of(a, grads), usual))


def test_float64_and_prepacked_weights_are_unaffected() -> None:
    wide, a = (problem_of("gru", SHAPE, dtype) for dtype in (torch.float64, torch.float32))
    packed = lltm.functional.prepack("gru", a.weights, a.weight_hh)

    def run() -> tuple[Tensor, ...]:
        return *sequence(wide), *support.sequence_outputs(lltm.functional, a, packed)

    usual = run()
    with precision(RNN, "bf16"):
        assert all(map(torch.equal, run(), usual))
