"""Measures the rates of this CPU: GEMMs, copies, and reading the weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from goals import ADDMM, PEAK, READ, Bound

from lltm.benchmark.cases import GATES, Case
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Sampler, Settings, measure, timed

PRODUCT_SIZE = 1024
PRODUCT_FLOPS = 2.0 * PRODUCT_SIZE**3

Build = Callable[[], Sampler]


def product(dtype: torch.dtype, onednn: bool) -> Sampler:
    """Times a large GEMM by oneDNN or torch.mm."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    if onednn:
        return timed(partial(torch.ops.aten.mkldnn_linear, a.to_mkldnn(), b.to_mkldnn()))
    return timed(partial(torch.mm, a, b, out=torch.empty_like(a)))


def addmm(case: Case) -> Sampler:
    """The GEMM of a step."""
    batch, input_size, hidden = case.shape
    gates = GATES[case.cell]
    X = torch.randn(batch, hidden + input_size, dtype=case.dtype)
    weights = torch.randn(gates * hidden, hidden + input_size, dtype=case.dtype).t()
    bias = torch.randn(gates * hidden, dtype=case.dtype)
    return timed(partial(torch.addmm, bias, X, weights))


def read_weights(case: Case) -> Callable[[], object]:
    """The function sums as many bytes as a case's weights have."""
    size = case.weights * case.dtype.itemsize
    return partial(torch.sum, torch.randn(size // torch.float32.itemsize))


def yardsticks(case: Case) -> dict[str, Build]:
    """Measurements that a case's bounds need, in the same rounds."""
    builds: dict[str, Build] = {ADDMM: partial(addmm, case)}
    if not case.is_step or case.training:
        builds = {}
    builds[PEAK] = partial(product, case.dtype, onednn=True)
    builds[READ] = lambda: timed(read_weights(case))
    return builds


def weight_passes(case: Case) -> float:
    """Returns the least number of passes over all weights.

    The weights of h are read in each step, the weights of the input once for all steps. Backward of
    a sequence reads them again, for the gradients of h and the input. Writing the weight gradients
    is another pass.
    """
    of_h = case.num_layers * case.directions * GATES[case.cell] * case.shape[-1] ** 2
    reads = 1 + (case.steps - 1) * of_h / case.weights
    return reads if not case.training else reads + 1 if case.is_step else 2 * reads + 1


def bounds(row: Row, case: Case) -> dict[str, Bound]:
    """Lower bounds at the rates of the case's rounds."""
    needs = {PEAK: case.flops / PRODUCT_FLOPS, READ: weight_passes(case)}
    return {
        name: Bound(name, need * statistics.median(row.seconds[name]), need / row.ratio(name))
        for name, need in needs.items()
        if name in row.seconds
    }


def thread_counts() -> dict[str, int]:
    counts = sorted({1, torch.get_num_threads()}, reverse=True)
    return {f"{count} thread{'s' if count > 1 else ''}": count for count in counts}


def on_threads(count: int, build: Build) -> Sampler:
    sampler = build()

    def sample(iterations: int) -> dict[str, float]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return sampler(iterations)
        finally:
            torch.set_num_threads(before)

    return sample


def machine(dtypes: Sequence[torch.dtype], settings: Settings) -> Iterator[Row]:
    """Measures one thread and all threads."""
    counts = thread_counts().items()
    for dtype in dtypes:
        products: dict[str, Build] = {
            f"{name}, {threads}": partial(on_threads, count, partial(product, dtype, onednn))
            for threads, count in counts
            for name, onednn in (("torch.mm", False), (PEAK, True))
        }
        title = f"GEMM, {PRODUCT_SIZE} x {PRODUCT_SIZE} x {PRODUCT_SIZE}, {dtype}"
        yield measure(title, products, settings, dict.fromkeys(products, PRODUCT_FLOPS))
    size = 1 << 28  # bytes, larger than any cache
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copy = partial(timed, partial(target.copy_, source))
    copies: dict[str, Build] = {
        threads: partial(on_threads, count, copy) for threads, count in counts
    }
    title = f"copy of {size >> 20} MiB (read and written)"
    yield measure(title, copies, settings, dict.fromkeys(copies, 2.0 * size), "B")
