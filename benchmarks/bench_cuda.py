"""Compares lltm on a GPU with other implementations: `make bench-cuda`.

    python benchmarks/bench_cuda.py --json cuda.json
    python benchmarks/bench_cuda.py --cell lstm --shapes 1024,16,768,768 --engine per_step

The method is that of `python -m lltm.benchmark`. Events before and after a number of queued runs
measure the time of the GPU or of the host, whichever is longer. nn.LSTM and nn.GRU use cuDNN.
TF32 is off in float32.

Before a sequence is measured, results and gradients of each engine are checked. Compared with
PyTorch in float64, their errors may be twice PyTorch's errors in the dtype of the case. A second
run must be bitwise identical, and the kernels of the requested engine must have run. A case that
fails is skipped, with the reason, and the exit status is then not 0.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from lltm import backends
from lltm.benchmark.__main__ import begin, cases, finish, parser
from lltm.benchmark.cases import TUTORIAL_SHAPE, Case, Shape
from lltm.benchmark.contenders import OURS, PLAIN, Layer, Make, contenders
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Sampler, Settings, measure, reason

SHAPES: tuple[Shape, ...] = ((1024, 16, 768, 768), (100, 128, 512, 512), TUTORIAL_SHAPE)
ENGINES = ("per_step", "persistent")
PERSISTENT, GRAPH = "lltm, persistent", "lltm, graph replay"


def engines(case: Case, chosen: Sequence[str]) -> list[str]:
    """Returns the engines of a case: only 16-bit sequences have both."""
    two = not case.is_step and case.dtype.itemsize == 2
    return [engine for engine in chosen if two or engine == "per_step"]


def timed(run: Callable[[], object], training: bool = False, engine: str = "per_step") -> Sampler:
    """Times runs with events; a sample returns after the runs."""

    def sample(iterations: int) -> dict[str, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        persistent = engine == "persistent"
        with torch.set_grad_enabled(training), backends.cuda.flags(persistent=persistent):
            start.record()
            for _ in range(iterations):
                run()
            end.record()
        end.synchronize()
        return {"": start.elapsed_time(end) * 1e-3 / iterations}

    return sample


def layer_timer(make: Make, case: Case, engine: str = "per_step") -> Sampler:
    return timed(Layer(make, case).run, case.training, engine)


def graph_timer(make: Make, case: Case) -> Sampler:
    """Times the replay of a CUDA graph of the per-step engine."""
    layer, graph = Layer(make, case), torch.cuda.CUDAGraph()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        timed(layer.run, case.training)(3)
    current.wait_stream(stream)
    per_step = backends.cuda.flags(persistent=False)
    with per_step, torch.cuda.graph(graph), torch.set_grad_enabled(case.training):
        layer.run()

    def replay(keep: Layer = layer) -> None:  # the graph writes to the layer's gradients
        graph.replay()

    return timed(replay)


def card(settings: Settings) -> Row:
    """Measures the GPU's rates: a copy, and GEMMs."""
    size, n = 1 << 30, 8192
    # Random bytes, because the GPU compresses zeros.
    source = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def gemm(dtype: torch.dtype) -> Sampler:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        return timed(partial(torch.mm, a, b, out=torch.empty_like(a)))

    builds: dict[str, Callable[[], Sampler]] = {"copy": lambda: timed(lambda: target.copy_(source))}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        builds[f"GEMM, {str(dtype).removeprefix('torch.')}"] = partial(gemm, dtype)
    amounts = {name: 2.0 * (size if name == "copy" else n**3) for name in builds}
    return measure("GPU: copy of 1 GiB, GEMMs of 8192", builds, settings, amounts, "")


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


def faults(case: Case, engine: str) -> Iterator[str]:
    """Yields the errors of an engine's results."""
    case = replace(case, training=True)
    makes = contenders(case)
    theirs = makes[PLAIN if case.cell == "lltm" else f"nn.{case.yardstick}"]
    with backends.cuda.flags(persistent=engine == "persistent"):
        layer = Layer(makes[OURS], case)
        assert layer.gradient is not None
        layer.gradient /= 64  # the LLTM's weight gradients would exceed float16
        found, again = results(layer), results(layer)
        ran = engine_that_ran(lambda: results(layer))
    exact = computed_in(torch.float64, theirs, layer)
    plain = computed_in(case.dtype, theirs, layer)
    least = 4 * torch.finfo(case.dtype).eps
    shares = {}
    for name, value in exact.items():
        error, yardstick = (
            float((each[name] - value).abs().max() / value.abs().max()) for each in (found, plain)
        )
        shares[name] = error / max(yardstick, least)
    worst = max(shares, key=lambda name: (shares[name] != shares[name], shares[name]))  # NaN first
    print(f"{engine}: {worst}: error in units of PyTorch's: {shares[worst]:.2f}", flush=True)
    if not shares[worst] <= 2:
        yield f"{worst} has {shares[worst]:.1f} times PyTorch's error"
    if not all(torch.equal(found[name], again[name]) for name in found):
        yield "a second run is not bitwise identical"
    if ran != engine:
        yield f"kernels that ran: {ran}"


def compare(case: Case, settings: Settings, chosen: Sequence[str]) -> Row:
    makes = contenders(case, settings.compile)
    ours = makes.pop(OURS)
    builds: dict[str, Callable[[], Sampler]] = {
        PERSISTENT if engine == "persistent" else OURS: partial(layer_timer, ours, case, engine)
        for engine in chosen
    }
    builds |= {name: partial(layer_timer, make, case) for name, make in makes.items()}
    builds[GRAPH] = partial(graph_timer, ours, case)
    return measure(str(case), builds, settings, {OURS: case.flops})


def main() -> None:
    made = parser("python benchmarks/bench_cuda.py", __doc__)
    made.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES, help="default: both")
    options = made.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU found")
    # float32 for all implementations, because cuDNN's default is TF32.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("error", message="lltm")  # it reports a fallback
    settings = begin(options, draws=False)
    rows, bad = [], []
    if options.shapes is None:
        rows.append(card(settings))
        print("\n".join(rows[-1].lines()), flush=True)
        options.shapes = SHAPES
    for case in (replace(case, device="cuda") for case in cases(options)):
        chosen = engines(case, options.engine)
        if not chosen:
            continue
        try:
            for engine in () if case.is_step or case.training else chosen:  # checks training too
                bad += [f"{case}, {engine}: {fault}" for fault in faults(case, engine)]
            rows.append(compare(case, settings, chosen))
        except Exception as error:  # the other cases continue
            bad.append(f"{case}: {reason(error)}")
            continue
        print("\n".join(rows[-1].lines()))
        cudnn = f"nn.{case.yardstick}"
        if {PERSISTENT, cudnn} <= rows[-1].seconds.keys():
            print(f"  {PERSISTENT}: {rows[-1].ratio(cudnn, PERSISTENT):.3g} of the time of {cudnn}")
        medians = {n: statistics.median(s) / case.steps for n, s in rows[-1].seconds.items()}
        print(json.dumps({f"{case}: seconds a step": medians}), flush=True)
    finish(options, {"settings": asdict(settings), "bad": bad}, rows, ())
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
