"""Measures layers of lltm in relation to the rates of this CPU: `make bench`.

    python benchmarks/machine.py --shapes 100,64,128,256 --dtype float32

Prints a lower bound of each case's time, and its share in lltm's time. The bound is the longer of
two times, which the same rounds measure: the FLOP at the rate of a large oneDNN GEMM, and the
passes over the weights at the rate of reading as many bytes. `lltm_bench` measures the rates of
copies and of lltm's GEMM kernels, with one and all threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from lltm.benchmark.__main__ import begin, cases, finish, parser
from lltm.benchmark.cases import GATES, Case
from lltm.benchmark.contenders import OURS, contenders
from lltm.benchmark.report import Row, time_text
from lltm.benchmark.timing import Sampler, layer_timer, measure, timed

PEAK, READ = "oneDNN GEMM", "reading the weights"
GEMM_SIZE = 1024
GEMM_FLOPS = 2.0 * GEMM_SIZE**3


def gemm(dtype: torch.dtype) -> Sampler:
    """Times a large GEMM by oneDNN."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype).to_mkldnn() for _ in range(2))
    return timed(partial(torch.ops.aten.mkldnn_linear, a, b))


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


def main() -> None:
    options = parser("python benchmarks/machine.py", __doc__).parse_args()
    settings = begin(options, draws=False)
    rows = []
    for case in cases(options):
        builds: dict[str, Callable[[], Sampler]] = {
            OURS: partial(layer_timer, contenders(case)[OURS], case),
            PEAK: partial(gemm, case.dtype),
            READ: partial(read_weights, case),
        }
        row = measure(str(case), builds, settings, {OURS: case.flops, PEAK: GEMM_FLOPS})
        rows.append(row)
        print("\n".join([*row.lines(), *bounds(row, case)]), flush=True)
    finish(options, {"settings": asdict(settings)}, rows, ())


if __name__ == "__main__":
    main()
