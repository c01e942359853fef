"""`python -m lltm.benchmark`: lltm beside other implementations, measured on this machine.

    python -m lltm.benchmark                everything, and a picture
    python -m lltm.benchmark --shapes 16,32,128 200,8,64,256 --dtype float32
    python -m lltm.benchmark --tutorial     the table of PyTorch's tutorial on C++ extensions

A shape is B,I,H for one step and T,B,I,H for a sequence. Training is forward and backward.

What is compared runs in rounds, in each round one after another for a few dozen milliseconds, so
that a change in the machine's speed touches all alike. A time is the median over the rounds, with
its quartiles; a ratio is the median of the ratios within a round. What the CPU can do at most, a
large matrix product, runs in the same rounds, and the last word is how the ratios compare with the
goals of this project. Nothing fails when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _C, modules, reference
from .__main__ import report
from ._inductor import inductor_decomposed

# ---- what is measured -------------------------------------------------------

OURS = "lltm"
PREPACKED = "lltm, prepacked"
PLAIN = "plain PyTorch"
TUTORIAL = "tutorial's C++"
COMPILED = "torch.compile, plain"
COMPILED_OURS = "torch.compile, lltm"
COMPILED_DECOMPOSED = "torch.compile, decomposed"
ADDMM = "addmm"
PEAK = "oneDNN product"

Shape = tuple[int, ...]  # (B, I, H) or (T, B, I, H)

TUTORIAL_SHAPE: Shape = (16, 32, 128)
LOOP_SHAPE: Shape = (100, 16, 32, 128)  # the one whose plain loop is compiled
SHAPES: tuple[Shape, ...] = (
    TUTORIAL_SHAPE,
    (1, 32, 128),
    (128, 512, 512),
    LOOP_SHAPE,
    (100, 64, 128, 256),
    (100, 1, 128, 256),
    (50, 128, 512, 512),
    (100, 3, 50, 75),
    (40, 256, 96, 200),
    (200, 1, 16, 65),
)
# Chunks of a stream.
CHUNKS: tuple[Shape, ...] = ((1, 1, 128, 256), (1, 1, 512, 512), (10, 4, 128, 256))
QUICK_SHAPES: tuple[Shape, ...] = (TUTORIAL_SHAPE, (20, 16, 32, 65))

# The tutorial's figures, microseconds of forward and backward.
PUBLISHED = {
    "cpu": {PLAIN: (506, 445), TUTORIAL: (349, 444)},
    "cuda": {PLAIN: (188, 411), TUTORIAL: (150, 393), "tutorial's CUDA": (129, 305)},
}


@dataclass(frozen=True)
class Case:
    """A shape, a dtype and a direction; what one row of results is about."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    training: bool = False
    device: str = "cpu"

    @property
    def is_step(self) -> bool:
        return len(self.shape) == 3

    @property
    def flops(self) -> float:
        """Of the matrix products of an LLTM: the backward pass has twice those of the forward."""
        rows = self.shape[0] if self.is_step else self.shape[0] * self.shape[1]
        input_size, hidden = self.shape[-2:]
        return (3 if self.training else 1) * 2 * rows * (input_size + hidden) * 3 * hidden

    def __str__(self) -> str:
        work = "one step" if self.is_step else "sequence"
        direction = "training" if self.training else "inference"
        sizes = zip("BIH" if self.is_step else "TBIH", self.shape, strict=True)
        shape = " ".join(f"{letter}={size}" for letter, size in sizes)
        return f"{work}, {direction}, {shape}, {str(self.dtype).removeprefix('torch.')}"


def goal(case: Case, against: str) -> float | None:
    """Returns the largest ratio of times, lltm to `against`, that this project wants to see.

    Against PEAK it is the smallest share of the peak.
    """
    single = case.dtype == torch.float32
    if case.is_step:
        wanted = {(ADDMM, False): 1.0, (PLAIN, True): 0.40}
        at_goal = case.shape == TUTORIAL_SHAPE and single
        return wanted.get((against, case.training)) if at_goal else None
    batch, hidden = case.shape[1], case.shape[3]
    if against == "nn.LSTM" and case.dtype in (torch.float32, torch.bfloat16):
        if case.training:
            return 0.60 if hidden >= 512 else 0.50
        return 0.70 if hidden >= 512 else 0.65
    if against == PEAK:
        return 0.90 if batch >= 64 else 0.75 if batch >= 16 else None
    if case.shape == LOOP_SHAPE and case.training and single:
        return {PLAIN: 0.12, COMPILED: 0.30}.get(against)
    return None


# ---- contenders -------------------------------------------------------------

State = tuple[Tensor, Tensor]
# Makes a module of (input_size, hidden_size, dtype=); it takes (input, (h, c)).
Make = Callable[..., nn.Module]


def tutorial_modules(extension: Any) -> tuple[Make, Make]:
    """The tutorial's: one function of `extension` forward, another backward.

    Returns a cell and a loop over it, not for packed input, nor in reverse.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weights: Tensor, bias: Tensor, *state: Tensor) -> Any:
            new_h, new_c, *saved = extension.forward(input, weights, bias, *state)
            ctx.save_for_backward(new_c, *saved, weights)
            return new_h, new_c

        @staticmethod
        def backward(ctx: Any, grad_h: Tensor, grad_c: Tensor) -> Any:
            d_h, d_input, d_weights, d_bias, d_c = extension.backward(
                grad_h.contiguous(), grad_c.contiguous(), *ctx.saved_tensors
            )
            return d_input, d_weights, d_bias, d_h, d_c

    def cell(input: Tensor, state: State, weights: Tensor, bias: Tensor | None = None) -> State:
        h, c = Function.apply(input, weights, bias, *state)  # type: ignore[no-untyped-call]
        return h, c

    def sequence(
        input: Tensor,
        state: State,
        weights: Tensor,
        bias: Tensor | None = None,
        *,
        batch_sizes: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, State]:
        outputs = []
        for x in input.unbind(0):
            state = cell(x, state, weights, bias)
            outputs.append(state[0])
        return torch.stack(outputs), state

    class Cell(modules.LLTMCell):
        _cell = staticmethod(cell)

    class Loop(modules.LLTM):
        _sequence = staticmethod(sequence)

    return Cell, Loop


# Of ATen operations in C++.
_TutorialCell, _TutorialLoop = tutorial_modules(_C)


class _OneState(nn.Module):
    """A GRU, given (h, c)."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, input: Tensor, state: State) -> Any:
        return self.rnn(input, state[0])


class _Prepacked(nn.Module):
    """The prepacked form of a layer."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = modules.LLTM(input_size, hidden_size, dtype=dtype).prepack()

    def forward(self, input: Tensor, state: State) -> Any:
        return self.packed(input, state)


def _gru(make: Make) -> Make:
    return lambda *sizes, **dtype: _OneState(make(*sizes, **dtype))


def _compiled(make: Make, decomposed: bool = False, dynamic: bool = False) -> Make:
    backend: Any = inductor_decomposed if decomposed else "inductor"

    def compiled(*sizes: int, **dtype: torch.dtype) -> nn.Module:
        module: Any = torch.compile(make(*sizes, **dtype), dynamic=dynamic, backend=backend)
        assert isinstance(module, nn.Module)
        return module

    return compiled


STEPS: dict[str, Make] = {
    OURS: modules.LLTMCell,
    PLAIN: reference.LLTMCell,
    TUTORIAL: _TutorialCell,
    "nn.LSTMCell": nn.LSTMCell,
    "nn.GRUCell": _gru(nn.GRUCell),
}
COMPILED_STEPS: dict[str, Make] = {
    COMPILED: _compiled(reference.LLTMCell),
    COMPILED_OURS: _compiled(modules.LLTMCell),
    COMPILED_DECOMPOSED: _compiled(modules.LLTMCell, decomposed=True),
}
SEQUENCES: dict[str, Make] = {
    OURS: modules.LLTM,
    PLAIN: reference.LLTM,
    TUTORIAL: _TutorialLoop,
    "nn.LSTM": nn.LSTM,
    "nn.GRU": _gru(nn.GRU),
}
COMPILED_SEQUENCES: dict[str, Make] = {
    COMPILED: _compiled(reference.LLTM),
    COMPILED_OURS: _compiled(modules.LLTM),
    # With dynamic sizes the decomposition is a loop; of a fixed length it would be the plain loop
    # over again.
    COMPILED_DECOMPOSED: _compiled(modules.LLTM, decomposed=True, dynamic=True),
}


class Layer:
    """A module with the arguments of a case.

    The input of a sequence requires a gradient, as in the middle of a network; that of one step
    does not, as in the tutorial.
    """

    def __init__(self, make: Make, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        *leading, input_size, hidden = case.shape
        options: Any = {"dtype": case.dtype, "device": case.device}
        self.module = make(input_size, hidden, dtype=case.dtype).to(case.device)
        self.input = torch.randn(*leading, input_size, **options)
        self.input.requires_grad_(case.training and not case.is_step)
        batch = (leading[0],) if case.is_step else (1, leading[1])
        self.state = (
            torch.randn(*batch, hidden, **options),
            torch.randn(*batch, hidden, **options),
        )
        # Of the output of a sequence.
        self.gradient = None if case.is_step else torch.randn(*leading, hidden, **options)

    def forward(self) -> tuple[Tensor, ...]:
        """Returns what is differentiated: h and c of a step, the output of a sequence."""
        results = self.module(self.input, self.state)
        if isinstance(results, Tensor):
            return (results,)
        return tuple(results) if self.case.is_step else (results[0],)

    def backward(self, results: Sequence[Tensor]) -> None:
        """Differentiates; of a step the sum of h and c, as the tutorial does."""
        if self.gradient is None:
            torch.autograd.backward(reduce(add, (result.sum() for result in results)))
        else:
            torch.autograd.backward(results, [self.gradient])

    def forget_gradients(self) -> None:
        self.input.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def run(self) -> None:
        """Does the case's work once."""
        if self.case.training:
            self.forget_gradients()
            self.backward(self.forward())
        else:
            self.forward()


def addmm(case: Case) -> Callable[[], object]:
    """Returns the matrix product of one step, bare."""
    batch, input_size, hidden = case.shape
    X = torch.randn(batch, hidden + input_size, dtype=case.dtype)
    weights = torch.randn(3 * hidden, hidden + input_size, dtype=case.dtype).t()
    bias = torch.randn(3 * hidden, dtype=case.dtype)
    return lambda: torch.addmm(bias, X, weights)


PRODUCT_SIZE = 1024
PRODUCT_FLOPS = 2.0 * PRODUCT_SIZE**3


def product(dtype: torch.dtype, onednn: bool) -> Callable[[], object]:
    """Returns a large matrix product: by oneDNN, whose micro-kernel lltm uses, or by torch.mm."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    if onednn:
        return partial(torch.ops.aten.mkldnn_linear, a.to_mkldnn(), b.to_mkldnn())
    return partial(torch.mm, a, b, out=torch.empty_like(a))


# ---- measuring --------------------------------------------------------------

# Runs something a number of times; returns seconds a run, by part of the work.
Sampler = Callable[[int], dict[str, float]]


def timed(
    run: Callable[[], object], threads: int | None = None, units: int = 1, training: bool = False
) -> Sampler:
    """Times the whole of `run`, per each of its `units`, with the given number of threads."""

    def sample(iterations: int) -> dict[str, float]:
        threads_before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.set_grad_enabled(training):
            start = time.perf_counter()
            for _ in range(iterations):
                run()
            taken = time.perf_counter() - start
        if threads is not None:
            torch.set_num_threads(threads_before)
        return {"": taken / iterations / units}

    return sample


def layer_timer(make: Make, case: Case, threads: int | None = None, units: int = 1) -> Sampler:
    return timed(Layer(make, case).run, threads, units, case.training)


def product_timer(dtype: torch.dtype, onednn: bool, threads: int | None = None) -> Sampler:
    return timed(product(dtype, onednn), threads)


def parts_timer(make: Make, case: Case) -> Sampler:
    """Times forward and backward apart, each with what a GPU still has to do."""
    layer = Layer(make, case)

    def synchronize() -> None:
        if case.device == "cuda":
            torch.cuda.synchronize()

    def sample(iterations: int) -> dict[str, float]:
        forward = backward = 0.0
        for _ in range(iterations):
            layer.forget_gradients()
            synchronize()
            start = time.perf_counter()
            results = layer.forward()
            synchronize()
            middle = time.perf_counter()
            layer.backward(results)
            synchronize()
            forward += middle - start
            backward += time.perf_counter() - middle
        return {", forward": forward / iterations, ", backward": backward / iterations}

    return sample


@dataclass
class Settings:
    rounds: int
    seconds: float  # a round of one contender takes about this long
    compile: bool


@dataclass
class Check:
    """A figure beside its goal."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met   " if self.met else "missed"
        return f"{verdict} {self.value:.3g} (goal {sign} {self.limit:g})  {self.what}"


@dataclass
class Row:
    """Contenders measured in the same rounds; the first is the one that others are compared to."""

    title: str
    seconds: dict[str, list[float]]  # by round
    iterations: dict[str, int]
    skipped: dict[str, str]  # why
    amounts: dict[str, float] = field(default_factory=dict)  # FLOP or bytes of a run
    unit: str = "FLOP"
    checks: list[Check] = field(default_factory=list)

    def ratio(self, name: str) -> float:
        """The first contender's time in units of this one's."""
        first = next(iter(self.seconds.values()))
        return statistics.median(
            ours / theirs for ours, theirs in zip(first, self.seconds[name], strict=True)
        )

    def lines(self) -> Iterator[str]:
        first, *_ = self.seconds
        width = max(map(len, (*self.seconds, *self.skipped)))
        yield f"\n{self.title}"
        yield f"  {'':{width}}{'median':>11}{'quartiles':>22}   {first} / this"
        for name, seconds in self.seconds.items():
            low, median, high = quartiles(seconds)
            line = f"  {name:{width}}{_time(median):>11}{_time(low):>11}{_time(high):>11}"
            line += f"{'' if name == first else format(self.ratio(name), '.3f'):>10}"
            if name in self.amounts:
                line += f"{self.amounts[name] / median / 1e9:>12.1f} G{self.unit}/s"
            yield line
        for name, reason in self.skipped.items():
            yield f"  {name:{width}}   not measured: {reason}"
        for check in self.checks:
            yield f"  {check}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def measure(
    title: str,
    builds: Mapping[str, Callable[[], Sampler]],
    settings: Settings,
    amounts: Mapping[str, float] | None = None,
    unit: str = "FLOP",
) -> Row:
    """Measures what `builds` make, in interleaved rounds; each is warmed up first.

    What can't be built or run here (no compiler, no such dtype, no memory), or ends in a later
    round, is left out, with the reason; the first must run.
    """
    row = Row(title, {}, {}, {}, dict(amounts or {}), unit)
    samplers: dict[str, Sampler] = {}
    samples: dict[str, dict[str, list[float]]] = {}  # by contender and part
    first = next(iter(builds))

    def skip(name: str, error: Exception) -> None:
        if name == first:
            raise error
        row.skipped[name] = reason(error)
        samplers.pop(name, None)
        samples.pop(name, None)
        row.iterations.pop(name, None)

    for name, build in builds.items():
        try:
            sampler = build()
            sampler(1)
            row.iterations[name] = _iterations(sampler, settings.seconds)
            samplers[name] = sampler
        except Exception as error:  # others' code: of any kind
            skip(name, error)
    for _ in range(settings.rounds):
        for name, sampler in list(samplers.items()):
            try:
                taken = sampler(row.iterations[name])
            except Exception as error:
                skip(name, error)
                continue
            for part, seconds in taken.items():
                samples.setdefault(name, {}).setdefault(part, []).append(seconds)
    for name, parts in samples.items():
        row.seconds |= {name + part: seconds for part, seconds in parts.items()}
    return row


def reason(error: Exception) -> str:
    """Returns the first line of what an error says, or its name."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _iterations(sampler: Sampler, seconds: float) -> int:
    """Returns how many runs take `seconds`."""
    iterations = 1
    while True:
        start = time.perf_counter()
        sampler(iterations)
        taken = time.perf_counter() - start
        if taken >= seconds:
            return iterations
        iterations = min(10 * iterations, int(1.1 * iterations * seconds / taken) + 1)


# ---- rows -------------------------------------------------------------------


def compare(case: Case, settings: Settings) -> Row:
    """Measures every implementation of a case."""
    makes = dict(STEPS if case.is_step else SEQUENCES)
    if settings.compile:
        torch.compiler.reset()  # at a limit of recompilations it goes back to eager mode
    if settings.compile and case.is_step:
        makes |= COMPILED_STEPS
    elif settings.compile and case.shape == LOOP_SHAPE and case.dtype == torch.float32:
        makes |= COMPILED_SEQUENCES  # the plain loop takes minutes

    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(layer_timer, make, case) for name, make in makes.items()
    }
    amounts = {OURS: case.flops}
    if not case.is_step:
        builds[PEAK] = partial(product_timer, case.dtype, onednn=True)
        amounts[PEAK] = PRODUCT_FLOPS
    elif not case.training:
        builds[ADDMM] = lambda: timed(addmm(case))
    row = measure(str(case), builds, settings, amounts)
    for name in row.seconds:
        limit = goal(case, name)
        if limit is None:
            continue
        if name == PEAK:
            share = row.ratio(name) ** -1 * case.flops / PRODUCT_FLOPS
            row.checks.append(Check(f"share of the rate of {name}", share, limit, at_least=True))
        else:
            row.checks.append(Check(f"{OURS} / {name}", row.ratio(name), limit))
    return row


def machine(dtypes: Sequence[torch.dtype], settings: Settings) -> Iterator[Row]:
    """Measures what this machine can do: matrix products and copies."""
    counts = sorted({1, torch.get_num_threads()}, reverse=True)
    for dtype in dtypes:
        builds: dict[str, Callable[[], Sampler]] = {}
        for count in counts:
            for name, onednn in (("torch.mm", False), (PEAK, True)):
                builds[f"{name}, {_threads(count)}"] = partial(product_timer, dtype, onednn, count)
        title = f"matrix product, {PRODUCT_SIZE} x {PRODUCT_SIZE} x {PRODUCT_SIZE}, {dtype}"
        yield measure(title, builds, settings, dict.fromkeys(builds, PRODUCT_FLOPS))
    size = 1 << 28  # bytes, more than a cache holds
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copies: dict[str, Callable[[], Sampler]] = {
        _threads(count): partial(timed, partial(target.copy_, source), count) for count in counts
    }
    title = f"copy of {size >> 20} MiB (read and written)"
    yield measure(title, copies, settings, dict.fromkeys(copies, 2.0 * size), "B")


def scaling(shape: Shape, settings: Settings) -> Iterator[Row]:
    """Measures one thread beside all."""
    for training in (False, True):
        case = Case(shape, training=training)
        builds: dict[str, Callable[[], Sampler]] = {}
        for name in (OURS, "nn.LSTM"):
            for count in sorted({1, torch.get_num_threads()}, reverse=True):
                builds[f"{name}, {_threads(count)}"] = partial(
                    layer_timer, SEQUENCES[name], case, count
                )
        yield measure(f"threads: {case}", builds, settings)


def lengths(steps: Sequence[int], sizes: Shape, settings: Settings) -> Iterator[Row]:
    """Measures the time of a step in sequences of different lengths."""
    for training in (False, True):
        cases = {f"T={n}": Case((n, *sizes), training=training) for n in steps}
        builds: dict[str, Callable[[], Sampler]] = {
            name: partial(layer_timer, SEQUENCES[OURS], case, units=case.shape[0])
            for name, case in cases.items()
        }
        *_, longest = cases.values()
        yield measure(f"time of a step by length; the longest: {longest}", builds, settings)


def streaming(shapes: Sequence[Shape], settings: Settings) -> Iterator[Row]:
    """Measures chunks of a stream, with weights packed once and packed in every call."""
    makes: dict[str, Make] = {PREPACKED: _Prepacked, OURS: modules.LLTM, "nn.LSTM": nn.LSTM}
    for shape in shapes:
        builds: dict[str, Callable[[], Sampler]] = {
            name: partial(layer_timer, make, Case(shape)) for name, make in makes.items()
        }
        yield measure(f"chunk of a stream: {Case(shape)}", builds, settings)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


# ---- memory -----------------------------------------------------------------


def saved_for_backward(make: Make, case: Case) -> float:
    """Returns what a forward pass saves, per step and row of the batch, in units of H elements.

    Memory of the arguments and of the parameters, which is there anyway, does not count.
    """
    layer = Layer(make, case)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.forward()
    for tensor in (layer.input, *layer.state, *layer.module.parameters()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    *leading, _, hidden = case.shape
    elements = sum(storage.nbytes() for storage in saved.values()) / layer.input.element_size()
    return elements / torch.Size(leading).numel() / hidden


def peak_memory(name: str, case: Case) -> int:
    """Returns the bytes that training takes beyond arguments and parameters; in a new process."""
    code = "import sys; from lltm import benchmark as b; b.print_peak_memory(*sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", code, name, *map(str, case.shape)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return int(result.stdout)


def print_peak_memory(name: str, *shape: str) -> None:
    """What :func:`peak_memory` runs."""
    case = Case(tuple(map(int, shape)), training=True)
    # Loads libraries and starts threads.
    Layer(SEQUENCES[name], replace(case, shape=(2, *case.shape[1:]))).run()
    layer = Layer(SEQUENCES[name], case)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _memory("VmRSS")
    layer.run()
    print(_memory("VmHWM") - before)


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def memory(shape: Shape, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, str, Check]]:
    """Yields title, figures and goal of what is measured about memory."""
    for dtype in dtypes:
        case = Case(shape, dtype, training=True)
        saved = {name: saved_for_backward(make, case) for name, make in SEQUENCES.items()}
        text = ", ".join(f"{name} {units:.2f} H" for name, units in saved.items())
        title = f"memory saved for backward, elements per step and row, {case}"
        yield title, text, Check(f"{OURS}, in H", saved[OURS], 5.0)
    if not Path("/proc/self/clear_refs").exists():
        return  # peaks are known on Linux only
    case = Case(shape, training=True)
    peaks = {name: peak_memory(name, case) for name in SEQUENCES}
    text = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items())
    yield f"peak memory, {case}", text, Check(f"{OURS} / {PLAIN}", peaks[OURS] / peaks[PLAIN], 0.5)


# ---- reports ----------------------------------------------------------------


def environment() -> dict[str, str]:
    """Returns what the figures depend on, in short; `python -m lltm` says more."""
    lines = (line.partition(": ") for line in report().splitlines())
    found = {name: value for name, _, value in lines}
    wanted = ("lltm", "torch", "compiler", "CPU kernels in use", "CUDA devices", "processor")
    return {name: found[name] for name in wanted} | {"threads": str(torch.get_num_threads())}


def tutorial(settings: Settings) -> list[Row]:
    """Prints the tutorial's table, measured here, beside its published figures."""
    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        case = Case(TUTORIAL_SHAPE, training=True, device=device)

        makes = STEPS | COMPILED_STEPS
        builds = {name: partial(parts_timer, make, case) for name, make in makes.items()}
        row = measure(f"{case}, {device}", builds, settings)
        rows.append(row)

        def figures(seconds: Sequence[float]) -> str:
            low, median, high = (1e6 * value for value in quartiles(seconds))
            return f"{median:9.1f}{f'({low:.1f} .. {high:.1f})':>20}"

        published = PUBLISHED[device]
        print(f"\nB=16, I=32, H=128 on {device}: microseconds, median (quartiles)\n")
        print(f"  {'':26}{'forward':>29}{'backward':>29}     published")
        for name in [*makes, *(published.keys() - makes.keys())]:
            line = f"  {name:26}"
            if name in row.skipped:
                line += f" not measured: {row.skipped[name]}"
            elif name in makes:
                line += "".join(
                    figures(row.seconds[f"{name}, {part}"]) for part in ("forward", "backward")
                )
            else:
                line += " " * 58
            if name in published:
                forward, backward = published[name]
                line += f"{forward:>8} {backward:>5}"
            print(line)
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the times of all cases in units of lltm's, with the goals as vertical lines."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    works: dict[str, list[Row]] = {}
    for row in rows:
        works.setdefault(", ".join(row.title.split(", ")[:2]), []).append(row)
    names = list(dict.fromkeys(name for row in rows for name in row.seconds if name != PEAK))
    sizes = [len(group) for group in works.values()]
    figure = Figure(figsize=(9, 1.5 + 0.6 * len(works) + 0.22 * sum(sizes)), layout="constrained")
    grid = figure.subplots(len(works), 1, sharex=True, squeeze=False, height_ratios=sizes)
    for axes, (work, group) in zip(grid[:, 0], works.items(), strict=True):
        for k, name in enumerate(names):
            shown = [(y, row) for y, row in enumerate(group) if name in row.seconds]
            times = [1 / row.ratio(name) for _, row in shown]
            axes.scatter(times, [y for y, _ in shown], s=22, color=f"C{k}", label=name)
            for y, row in shown:
                for check in row.checks:
                    if check.what == f"{OURS} / {name}":
                        axes.scatter(1 / check.limit, y, s=110, marker="|", color=f"C{k}")
        axes.set_yticks(
            range(len(group)), [row.title.removeprefix(f"{work}, ") for row in group], fontsize=7
        )
        axes.set_ylim(len(group) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", which="both", linewidth=0.3)
        axes.set_title(work, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("time in units of lltm's; | marks a goal", fontsize=8)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def compare_with(path: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Yields how the first contender of each row did in an earlier run, from its file."""
    earlier = {row["title"]: row["seconds"] for row in json.loads(path.read_text())["rows"]}
    yield f"\nbeside {path}: earlier, now, now / earlier"
    for row in rows:
        name, seconds = next(iter(row.seconds.items()))
        before = earlier.get(row.title, {}).get(name)
        if before:
            old, new = statistics.median(before), statistics.median(seconds)
            yield f"  {row.title:64}{_time(old):>10}{_time(new):>10}{new / old:>8.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lltm.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def shape(text: str) -> Shape:
        sizes = tuple(map(int, text.split(",")))
        if len(sizes) not in (3, 4) or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{text} is neither B,I,H nor T,B,I,H")
        return sizes

    names = ("float32", "bfloat16", "float16", "float64")
    option = parser.add_argument
    option("--shapes", nargs="+", type=shape, metavar="SHAPE", help="only these, and nothing else")
    option("--dtype", nargs="+", choices=names, default=["float32", "bfloat16"])
    option("--threads", type=int, help="default: those of torch")
    option("--rounds", type=int, help="default: 15")
    option("--quick", action="store_true", help="small shapes and few rounds, to try it out")
    option("--compile", action="store_true", help="torch.compile too; takes minutes to compile")
    option("--tutorial", action="store_true", help="the tutorial's table, and nothing else")
    option("--json", type=Path, metavar="FILE", help="write every sample")
    option("--compare", type=Path, metavar="FILE", help="a file of --json, of an earlier run")
    option(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path("lltm-benchmark.png"),
        help="default: %(default)s",
    )
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = Settings(
        rounds=options.rounds or (3 if options.quick else 15),
        seconds=0.005 if options.quick else 0.05,
        compile=options.compile,
    )
    dtypes = [getattr(torch, name) for name in options.dtype]
    print("\n".join(f"{name}: {value}" for name, value in environment().items()))

    rows: list[Row] = []
    cases: list[Row] = []
    notes: list[str] = []  # about memory
    checks: list[tuple[str, Check]] = []

    def show(row: Row) -> None:
        rows.append(row)
        checks.extend((row.title, check) for check in row.checks)
        print("\n".join(row.lines()), flush=True)

    if options.tutorial:
        rows.extend(tutorial(settings))
    else:
        for shape in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            for dtype in dtypes:
                for training in (False, True):
                    cases.append(compare(Case(shape, dtype, training), settings))
                    show(cases[-1])
    if not options.tutorial and options.shapes is None:
        steps = (10, 100) if options.quick else (100, 10, 1000, 10000)
        sizes = (16, 32, 65) if options.quick else (64, 128, 256)
        chunks = CHUNKS[:1] if options.quick else CHUNKS
        for row in (*lengths(steps, (16, 32, 64), settings), *streaming(chunks, settings)):
            show(row)
        # After the others: to set a number of threads changes what MKL does, for good.
        for row in (*machine(dtypes, settings), *scaling((100, *sizes), settings)):
            show(row)
        for title, text, check in memory((512, *sizes), dtypes):
            notes.append(f"{title}: {text}")
            checks.append((title, check))
            print(f"\n{title}\n  {text}\n  {check}", flush=True)
    if checks:
        met = sum(check.met for _, check in checks)
        print(f"\nGoals: {met} of {len(checks)} met")
        for title, check in checks:
            print(f"  {check}; {title}")

    if options.compare is not None:
        print("\n".join(compare_with(options.compare, rows)))
    if options.json is not None:
        results = {
            "environment": environment(),
            "settings": asdict(settings),
            "rows": [asdict(row) for row in rows],
            "memory": notes,
            "goals": [
                {"title": title, "met": check.met, **asdict(check)} for title, check in checks
            ],
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nEvery sample: {options.json}")
    if cases:
        try:
            draw(cases, options.plot)
            print(f"Picture: {options.plot}")
        except ModuleNotFoundError as error:
            print(f"No picture: {error}")


if __name__ == "__main__":
    main()
