"""PyTorch's precision switch: float32 layers that multiply in bfloat16 on request."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import support
import torch
from support import relative_errors
from test_reset import CELLS, Problem, gradients
from torch import Tensor

import lltm

RNN = torch.backends.mkldnn.rnn  # type: ignore[attr-defined]

SHAPE = (6, 40, 24, 96)  # blocked; padded operands, unpadded below
PADDED = (5, 33, 9, 70)

# Without AVX-512 or BFMMLA, there is no GEMM in bfloat16. Without AVX512-BF16, it is not faster.
HAS_GEMM = "micro-kernel: float32, bfloat16" in lltm.build_info()
HAS_PRODUCTS = HAS_GEMM and (
    support.ARM
    or (torch.cpu._is_avx512_bf16_supported() and "ATEN_CPU_CAPABILITY" not in os.environ)
)
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


@needs_products
@pytest.mark.parametrize("cell", WITHOUT_JUMPS)
@pytest.mark.parametrize("shape", [SHAPE, PADDED], ids=str)
def test_gemms_are_the_same_as_in_bfloat16(cell: str, shape: tuple[int, ...]) -> None:
    """Errors are as large as in bfloat16; results are float32."""
    problem = Problem(cell, shape)
    leaves64 = problem.leaves(torch.float64)
    exact = problem.steps(leaves64)
    grads = [torch.randn_like(y) for y in exact]
    of_exact = gradients(exact, leaves64, grads)

    def run() -> tuple[list[float], list[float]]:
        leaves = problem.leaves()
        results = problem.sequence(leaves)
        assert all(y.dtype == torch.float32 for y in results)
        of_results = gradients(results, leaves, grads)
        assert all(y.dtype == torch.float32 for y in of_results)
        return relative_errors(results, exact), relative_errors(of_results, of_exact)

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
    def run() -> list[Tensor]:
        problem = Problem("lstm", shape)
        leaves = problem.leaves()
        results = problem.sequence(leaves)
        torch.manual_seed(0)
        return [*results, *gradients(results, leaves, [torch.randn_like(y) for y in results])]

    usual = run()
    with precision(RNN, "bf16"):
        reduced = run()
    for a, b in zip(reduced, usual, strict=True):
        assert torch.equal(a, b)


def test_float64_and_prepacked_weights_are_unaffected() -> None:
    problem = Problem("gru", SHAPE, torch.float64)
    usual = problem.sequence(problem.tensors)
    with precision(RNN, "bf16"):
        for a, b in zip(problem.sequence(problem.tensors), usual, strict=True):
            assert torch.equal(a, b)
    problem = Problem("gru", SHAPE)
    x, h, c, weight_ih, weight_hh, *biases = problem.tensors
    packed = torch.ops.lltm.prepack(problem.cell, weight_ih, weight_hh)

    def run() -> Tensor:
        output: Tensor
        output, *_ = torch.ops.lltm.sequence(problem.cell, x, h, c, packed, None, *biases)
        return output

    usual = run()
    with precision(RNN, "bf16"):
        assert torch.equal(run(), usual)
