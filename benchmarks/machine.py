"""Measures layers of lltm in relation to the rates of this CPU: `make bench`.

    python benchmarks/machine.py --shapes 100,64,128,256 --dtype float32

Prints a lower bound of each case's time, and its share in lltm's time. The bound is the longer of
two times, which the same rounds measure: the FLOP at the rate of a large oneDNN GEMM, and the
passes over the weights at the rate of reading as many bytes. Then prints the rates of GEMMs and
copies with one and all threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch

from lltm.benchmark.__main__ import begin, cases, finish, parser
from lltm.benchmark.cases import GATES, Case
from lltm.benchmark.contenders import OURS, contenders
from lltm.benchmark.report import Row, time_text
from lltm.benchmark.timing import Sampler, Settings, layer_timer, measure, timed

PEAK, READ = "oneDNN GEMM", "reading the weights"
GEMM_SIZE = 1024
GEMM_FLOPS = 2.0 * GEMM_SIZE**3

Build = Callable[[], Sampler]


def gemm(dtype: torch.dtype, onednn: bool) -> Sampler:
    """Times a large GEMM by oneDNN or torch.mm."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    if onednn:
        return timed(partial(torch.ops.aten.mkldnn_linear, a.to_mkldnn(), b.to_mkldnn()))
    return timed(partial(torch.mm, a, b, out=torch.empty_like(a)))


def read_weights(case: Case) -> Sampler:
    """Times the sum of as many bytes as a case's weights have."""
    size = case.weights * case.dtype.itemsize
    return timed(partial(torch.sum, torch.randn(size // torch.float32.itemsize)))


def weight_passes(case: Case) -> float:
    """Returns the least number of passes over all weights.

    The weights of h are read in each step, the weights of the input once for all steps. Backward of
    a sequence reads them again, for the gradients of h and the input. Writing the weight gradients
    is another pass.
    """
    of_h = GATES[case.cell] * case.shape[-1] ** 2
    reads = 1 + (case.steps - 1) * of_h / case.weights
    return reads if not case.training else reads + 1 if case.is_step else 2 * reads + 1


def bounds(row: Row, case: Case) -> Iterator[str]:
    """Yields a line with the lower bound at the rates of the case's rounds."""
    needs = {PEAK: case.flops / GEMM_FLOPS, READ: weight_passes(case)}
    times = {
        name: (need * statistics.median(row.seconds[name]), need / row.ratio(name), name)
        for name, need in needs.items()
        if name in row.seconds
    }
    if PEAK in times:  # otherwise the rate of GEMMs is unknown
        seconds, share, name = max(times.values())
        yield f"  bound: {time_text(seconds)} by {name}; share of it in {OURS}: {share:.2f}"


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


def rates(dtypes: Sequence[torch.dtype], settings: Settings) -> Iterator[Row]:
    """Measures the rates with one thread and all threads."""
    counts = sorted({1, torch.get_num_threads()}, reverse=True)
    for dtype in dtypes:
        products: dict[str, Build] = {
            f"{name}, {count} threads": partial(on_threads, count, partial(gemm, dtype, onednn))
            for count in counts
            for name, onednn in (("torch.mm", False), (PEAK, True))
        }
        title = f"GEMM, {GEMM_SIZE} x {GEMM_SIZE} x {GEMM_SIZE}, {dtype}"
        yield measure(title, products, settings, dict.fromkeys(products, GEMM_FLOPS))
    size = 1 << 28  # bytes, larger than any cache
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copy = partial(timed, partial(target.copy_, source))
    copies: dict[str, Build] = {
        f"{count} threads": partial(on_threads, count, copy) for count in counts
    }
    title = f"copy of {size >> 20} MiB (read and written)"
    yield measure(title, copies, settings, dict.fromkeys(copies, 2.0 * size), "B")


def main() -> None:
    options = parser("python benchmarks/machine.py", __doc__).parse_args()
    settings = begin(options, draws=False)
    rows = []
    for case in cases(options):
        builds: dict[str, Build] = {
            OURS: partial(layer_timer, contenders(case)[OURS], case),
            PEAK: partial(gemm, case.dtype, onednn=True),
            READ: partial(read_weights, case),
        }
        row = measure(str(case), builds, settings, {OURS: case.flops, PEAK: GEMM_FLOPS})
        rows.append(row)
        print("\n".join([*row.lines(), *bounds(row, case)]), flush=True)
    # Last, because setting the number of threads changes MKL permanently.
    for row in rates([getattr(torch, name) for name in options.dtype], settings):
        rows.append(row)
        print("\n".join(row.lines()), flush=True)
    finish(options, {"settings": asdict(settings)}, rows, ())


if __name__ == "__main__":
    main()
