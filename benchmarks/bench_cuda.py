"""Compares lltm on a GPU with other implementations: `make bench-cuda`.

    python benchmarks/bench_cuda.py --json cuda.json
    python benchmarks/bench_cuda.py --cell lstm --shapes 200,32,256,512 --form packed layers

The method is that of `python -m lltm.benchmark`. A turn ends when the GPU has finished, so the
longer of GPU time and host time counts. nn.LSTM and nn.GRU use cuDNN.

By default, float32 has PyTorch's defaults: cuDNN uses TF32, lltm and GEMMs do not. Further rows
measure lltm with TF32 (torch.backends.cuda.matmul.allow_tf32) and cuDNN with TF32 off. Rows with
"graph" replay a CUDA graph. lltm uses the persistent engine where it can; "per-step" is the other.

Before a sequence is measured, results and gradients of each engine are checked. Compared with
PyTorch in float64, their errors may be twice PyTorch's errors in the dtype of the case. With TF32,
PyTorch has it too. A second run must be bitwise identical, and the kernels of the requested engine
must have run. An engine that fails is skipped, with the reason, and the exit status is then not 0.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from lltm import backends
from lltm.benchmark.cases import TUTORIAL_SHAPE, Case, Shape
from lltm.benchmark.implementations import OURS, PLAIN, Layer, Make, implementations
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


def results(layer: Layer) -> dict[str, torch.Tensor]:
    layer.forget_gradients()
    (output,) = layer.forward()
    layer.backward([output])
    leaves = {"input": layer.input, **dict(layer.module.named_parameters())}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"output": output.detach(), **gradients}


def computed_in(dtype: torch.dtype, make: Make, like: Layer) -> dict[str, torch.Tensor]:
    """Results of another implementation with the same arguments and weights."""
    assert like.gradient is not None
    layer = Layer(make, like.case)
    layer.module.load_state_dict(like.module.state_dict())
    layer.module.to(dtype)
    layer.input = like.input.detach().to(dtype).requires_grad_()
    layer.gradient = like.gradient.to(dtype)
    states = [state.to(dtype) for state in like.state]
    layer.state = like.state.to(dtype) if like.case.cell == "gru" else tuple(states)
    return results(layer)


def engine_that_ran(run: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    names = [event.key for event in profile.key_averages() if "lltm_" in event.key]
    persistent = any("lltm_persistent" in name for name in names)
    return "persistent" if persistent else "per_step" if names else "no lltm kernels"


def faults(case: Case, engine: str, tf32: bool | None) -> Iterator[str]:
    """Yields the errors of an engine's results."""
    case = replace(case, training=True)
    makes = implementations(case)
    theirs = makes[PLAIN if case.cell == "lltm" else f"nn.{case.baseline}"]
    with mode(engine, tf32):
        layer = Layer(makes[OURS], case)
        assert layer.gradient is not None
        layer.gradient /= 64  # the LLTM's weight gradients would exceed float16
        found, again = results(layer), results(layer)
        ran = engine_that_ran(lambda: results(layer)) if case.device == "cuda" else engine
    with mode(engine, tf32 is True):
        exact = computed_in(torch.float64, theirs, layer)
        plain = computed_in(case.dtype, theirs, layer)
    least = 4 * (2**-10 if tf32 else torch.finfo(case.dtype).eps)
    shares = {}
    for name, value in exact.items():
        error, baseline = (
            float((each[name] - value).abs().max() / value.abs().max()) for each in (found, plain)
        )
        shares[name] = error / max(baseline, least)
    worst = max(shares, key=lambda name: (shares[name] != shares[name], shares[name]))  # NaN first
    print(f"{engine}{TF32[tf32]}: {worst}: {shares[worst]:.2f} of PyTorch's error", flush=True)
    if not shares[worst] <= 2:
        yield f"{worst} has {shares[worst]:.1f} times PyTorch's error"
    if not all(torch.equal(found[name], again[name]) for name in found):
        yield "a second run is not bitwise identical"
    if ran != engine:
        yield f"kernels that ran: {ran}"


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
        planned += [case for case in cases(options, **arguments) if not case.training]
    for case in until(end, planned):
        two = case.device == "cuda" and not case.is_step and case.dtype != torch.float64
        chosen = options.engine if two else ENGINES[:1]
        for engine, tf32 in () if case.is_step else product(chosen, precisions(case, True)):
            try:
                found = [*faults(case, engine, tf32)]
            except Exception as error:  # the other engines and cases continue
                found, chosen = [reason(error)], [other for other in chosen if other != engine]
            bad += [f"{case}, {engine}{TF32[tf32]}: {fault}" for fault in found]
        for measured in (case, replace(case, training=True)):
            try:
                row = compare(measured, settings, chosen)
            except Exception as error:
                bad.append(f"{measured}: {reason(error)}")
                continue
            rows.append(row)
            print("\n".join(row.lines()))
            steps = case.steps * case.layers * case.directions
            medians = {name: statistics.median(s) / steps for name, s in row.seconds.items()}
            print(json.dumps({f"{measured}: seconds a step": medians}), flush=True)
    finish(options, settings, rows, bad=bad)
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
