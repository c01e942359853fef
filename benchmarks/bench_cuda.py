"""Compares lltm on a GPU with other implementations: `make bench-cuda`.

    python benchmarks/bench_cuda.py --json cuda.json
    python benchmarks/bench_cuda.py --cell lstm --shapes 200,32,256,512 --form packed layers

The method is that of `python -m lltm.benchmark`. A turn ends when the GPU has finished, so the
longer of GPU time and host time counts. nn.LSTM and nn.GRU use cuDNN.

By default, float32 has PyTorch's defaults: cuDNN uses TF32, lltm and GEMMs do not. Further rows
measure lltm with TF32 (torch.backends.cuda.matmul.allow_tf32) and cuDNN with TF32 off. Rows with
"graph" replay a CUDA graph. lltm uses the persistent engine where it can; "per-step" is the other.

lltm compares each kernel with PyTorch at its first use. If a kernel fails, or a case cannot be
measured, the exit status is not 0.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch

from lltm import backends
from lltm.benchmark.cases import TUTORIAL_SHAPE, Case, Shape
from lltm.benchmark.implementations import OURS, Layer, Make, implementations
from lltm.benchmark.options import begin, cases, finish, parser
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Sampler, Settings, measure, reason, timed

# Shapes and further arguments of the cases, by form.
FORMS: dict[str, tuple[Sequence[Shape], dict[str, Any]]] = {
    "plain": (((1024, 16, 768, 768), (100, 128, 512, 512), TUTORIAL_SHAPE), {}),
    "packed": (((200, 32, 256, 512),), {"packed": True}),
    "bidirectional": (((200, 32, 256, 512),), {"directions": 2}),
    "layers": (((200, 32, 256, 512),), {"layers": 3}),
}
SECONDS = "start no shape or case after this time"
ENGINES = ("persistent", "per_step")
TF32 = {None: "", True: ", TF32", False: ", TF32 off"}


def precisions(case: Case, tf32: bool) -> tuple[bool | None, ...]:
    """Returns the default and, in float32 on a GPU, this setting of TF32."""
    return (None, tf32) if case.device == "cuda" and case.dtype == torch.float32 else (None,)


@contextmanager
def mode(engine: str, tf32: bool | None) -> Iterator[None]:
    """Sets lltm's engine and PyTorch's use of TF32; None is its default."""
    torch.backends.cudnn.allow_tf32 = tf32 is not False
    torch.backends.cuda.matmul.allow_tf32 = tf32 is True
    with backends.cuda.flags(persistent=engine == "persistent"):
        yield


def captured(layer: Layer) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer.run()
    current.wait_stream(stream)
    with torch.cuda.graph(graph):
        layer.run()
    return graph


def timer(make: Make, case: Case, engine: str, tf32: bool | None, graph: bool) -> Sampler:
    layer = Layer(make, case)
    with mode(engine, tf32), torch.set_grad_enabled(case.training):
        sample = timed(captured(layer).replay if graph else layer.run, case.training)

    # A graph writes to the layer's gradients.
    def sample_in_mode(iterations: int, keep: Layer = layer) -> dict[str, float]:
        with mode(engine, tf32):
            return sample(iterations)

    return sample_in_mode


def compare(case: Case, settings: Settings, chosen: Sequence[str], graphs: bool = True) -> Row:
    makes = implementations(case, settings.compile)
    both = (OURS, f"nn.{case.baseline}") if case.device == "cuda" else ()
    builds: dict[str, Callable[[], Sampler]] = {}
    for graph, (name, make) in product((False, True), makes.items()):
        if graph and not (graphs and name in both):
            continue
        settable = precisions(case, name == OURS) if name in both else (None,)
        for engine, tf32 in product(chosen if name == OURS else ENGINES[:1], settable):
            full = name + ", per-step" * (engine == "per_step") + TF32[tf32] + ", graph" * graph
            builds[full] = partial(timer, make, case, engine, tf32, graph)
    return measure(str(case), builds, settings, {OURS: case.flops})


def until(end: float, items: Sequence[Any]) -> Iterator[Any]:
    """Yields the items until a time of time.monotonic()."""
    for k, item in enumerate(items):
        if time.monotonic() > end:
            print(f"out of time after {k} of {len(items)}")
            return
        yield item


def main() -> None:
    made = parser("python benchmarks/bench_cuda.py", __doc__)
    made.set_defaults(device="cuda")
    option = made.add_argument
    option("--engine", nargs="+", choices=ENGINES, default=ENGINES, help="default: both")
    option("--form", nargs="+", choices=FORMS, help="default: all, of given shapes plain")
    option("--seconds", type=float, default=math.inf, help=SECONDS)
    options = made.parse_args()
    warnings.filterwarnings("error", message="lltm")  # it reports a fallback
    settings = begin(options)
    end = time.monotonic() + options.seconds
    rows, bad, planned, given = [], [], [], options.shapes
    for form in options.form or (["plain"] if given else FORMS):
        shapes, arguments = FORMS[form]
        options.shapes = given or shapes
        planned += cases(options, **arguments)
    for case in until(end, planned):
        two = case.device == "cuda" and not case.is_step and case.dtype != torch.float64
        try:
            row = compare(case, settings, options.engine if two else ENGINES[:1])
        except Exception as error:  # the other cases continue
            bad.append(f"{case}: {reason(error)}")
            continue
        rows.append(row)
        print("\n".join(row.lines()))
        steps = case.steps * case.layers * case.directions
        medians = {name: statistics.median(s) / steps for name, s in row.seconds.items()}
        print(json.dumps({f"{case}: seconds a step": medians}), flush=True)
    finish(options, settings, rows, bad=bad)
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
