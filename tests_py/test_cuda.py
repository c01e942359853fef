"""Operators on a GPU: streams, graphs, devices, memory, custom cells; skipped without a GPU.

tests_cpp/test_cuda.cpp covers values, sizes, layouts and reproducibility of the operators.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import forms
import pytest
import support
import torch
from support import DTYPES, Arguments, relative_errors
from torch import Tensor, nn

import lltm
from lltm import explain

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU found"),
    pytest.mark.skipif(
        "LLTM_CUDA is OFF" in lltm.build_info(), reason="this lltm was built without CUDA"
    ),
    # Some cells of the gallery have no kernels.
    pytest.mark.filterwarnings("ignore:lltm. on CUDA, the cell .*products, means:UserWarning"),
]

ops = torch.ops.lltm
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_engine = pytest.mark.usefixtures("engine")
each_direction = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


@pytest.fixture(params=[False, True], ids=["per_step", "persistent"])
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """float64 always uses the per-step engine."""
    with lltm.backends.cuda.flags(persistent=request.param):
        yield


def on_gpu(arguments: Arguments, device: str = "cuda") -> Arguments:
    return arguments.map(lambda tensor: tensor.to(device))


def run(arguments: Arguments, checkpoint_steps: int = 0) -> tuple[Tensor, ...]:
    """The output gradients are ones."""
    leaves = arguments.leaves()
    outputs = support.checkpointed_outputs(checkpoint_steps, lltm.functional, leaves)
    gradients = torch.autograd.grad(
        outputs, leaves.tensors(), [torch.ones_like(y) for y in outputs]
    )
    return (*(y.detach() for y in outputs), *gradients)


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def kernels_of(work: Callable[[], object]) -> dict[str, int]:
    """Launches of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages()}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


has_tf32 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no TF32, and no persistent kernels, before compute capability 8.0",
)


# 4,800 rows of 9,216 bytes need several chunks.
def test_a_graph_of_a_long_sequence_is_bitwise_identical() -> None:
    a = on_gpu(support.sequence_arguments((300, 16, 32, 768), torch.float16))
    graph, results = captured(lambda: run(a))
    graph.replay()
    assert same(results, run(a))


def test_prepacked_layers_work() -> None:
    layer = lltm.LLTM(5, 8).cuda()
    input = torch.randn(7, 3, 5, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(layer.prepack()(input), layer(input))


@each_engine
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype) -> None:
    a = on_gpu(support.sequence_arguments((6, 4, 3, 8)))
    with torch.autocast("cuda", dtype=dtype):
        results = run(a)
    outputs, gradients = results[:3], results[3:]
    assert {y.dtype for y in outputs} == {dtype}
    assert {g.dtype for g in gradients} == {torch.float32}
    expected = run(a.to(dtype))
    assert same(results, tuple(y.to(x.dtype) for x, y in zip(results, expected, strict=True)))


@has_tf32
@pytest.mark.parametrize("allowed", [False, True], ids=["float32", "TF32"])
def test_float32_gemms_follow_allow_tf32(allowed: bool) -> None:
    # TF32 rounds 1 + 2^-12 to 1. With z_i = 0 and z_g = x > 0, c' = x / 2.
    size, x = 256, 1 + 2**-12
    input, zeros = torch.zeros(size, size, device="cuda"), torch.zeros(size, size, device="cuda")
    input[:, 0] = x
    weights = torch.zeros(3 * size, 2 * size, device="cuda")
    weights[2 * size :, size] = 1
    with tf32(allowed):
        product = input @ weights[2 * size :, size:].t()
        _, c = lltm.functional.step("lltm", input, (zeros, zeros), weights)
        _, (_, c_n) = lltm.functional.sequence("lltm", input[None], (zeros, zeros), weights)
    assert product.unique().tolist() == [1 if allowed else x], "PyTorch's own"
    assert (2 * c).unique().tolist() == [1 if allowed else x]
    assert (2 * c_n).unique().tolist() == [1 if allowed else x]


Results = Sequence[Tensor]


def check_errors(on_gpu: Results, on_cpu: Results, exact: Results) -> None:
    """The GPU is as accurate as the CPU."""
    eps = torch.finfo(on_cpu[0].dtype).eps
    assert max(relative_errors(on_gpu, exact)) <= 4 * max(*relative_errors(on_cpu, exact), 8 * eps)


def trained(module: Any, input: Tensor) -> list[Tensor]:
    input = input.detach().requires_grad_()
    output, *states = forms.tensors(module(input))
    loss = (output * output).sum() + sum(state.sum() for state in states)
    gradients = torch.autograd.grad(loss, [input, *module.parameters()])
    return [output, *states, *gradients]


def check_on_cuda(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = module.to(dtype)
    input = torch.randn(shape, dtype=dtype)
    exact = trained(copy.deepcopy(module).double(), input.double())
    on_cpu = trained(module, input)
    on_gpu = trained(copy.deepcopy(module).cuda(), input.cuda())
    assert {y.device.type for y in on_gpu} == {"cuda"}
    assert [y.dtype for y in on_gpu] == [y.dtype for y in on_cpu]
    check_errors(on_gpu, on_cpu, exact)


@each_engine
@each_dtype
@pytest.mark.parametrize("option", ["reset", "recurrent_mask", "checkpoint_steps"])
def test_options_are_as_exact_as_on_the_cpu(option: str, dtype: torch.dtype) -> None:
    a = support.sequence_arguments((20, 17, 8, 64), dtype)
    reset, mask = torch.rand(20, 17) < 0.1, torch.rand(17, 64) < 0.5

    def results(a: Arguments) -> Results:
        if option == "reset":
            a = replace(a, reset=reset.to(a.input.device))
        elif option == "recurrent_mask":
            a = replace(a, recurrent_mask=mask.to(a.input))
        return run(a, checkpoint_steps=3 if option == "checkpoint_steps" else 0)

    check_errors(results(on_gpu(a)), results(a), results(a.to(torch.float64)))


# The results of spiking cells jump if rounding changes a decision.
CUSTOM_CELLS = [
    (name, dtype)
    for name in support.GALLERY_CELLS
    for dtype in DTYPES
    if dtype == torch.float64 or "\nown_gradient\n" not in getattr(lltm.cells, name).text
]
each_custom_cell = pytest.mark.parametrize(("name", "dtype"), CUSTOM_CELLS, ids=forms.id_of)


@each_custom_cell
def test_custom_cells_are_as_exact_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    for *leading, inputs, hidden in (
        (6, 3, 4, 5),
        (5, 40, 24, 72),
        (3, 1100, 8, 128),  # 16-byte loads
    ):
        layer = support.gallery_module(name, inputs, hidden)
        check_on_cuda(layer, (*leading, layer.input_size), dtype)


@each_custom_cell
def test_steps_of_custom_cells_are_as_exact_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    for batch, inputs, hidden in ((3, 4, 5), (1100, 8, 128)):
        step = support.gallery_module(name, inputs, hidden, "Cell")
        check_on_cuda(step, (batch, step.input_size), dtype)


def test_errors_are_the_same_as_on_the_cpu() -> None:
    a = on_gpu(support.sequence_arguments((5, 3, 2, 4)))
    with pytest.raises(ValueError, match="expected h_0 of shape"):
        ops.sequence(*replace(a, h=a.h[:2]).operands())
    with pytest.raises(RuntimeError, match="expected weight_ih on device cuda:0, got cpu"):
        ops.sequence(*replace(a, weights=a.weights.cpu()).operands())
    sizes = torch.full((5,), 3, device="cuda")
    with pytest.raises(RuntimeError, match="expected batch_sizes on device cpu"):
        ops.sequence(*replace(a, input=a.input.flatten(0, 1)).operands(), batch_sizes=sizes)


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_calls_do_not_synchronize(dtype: torch.dtype) -> None:
    a = on_gpu(support.packed_arguments((9, 5, 5, 2), 8, 16, dtype))
    run(a)  # the first call sets up cuBLAS
    try:
        torch.cuda.set_sync_debug_mode("error")
        run(a)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The second shape's persistent kernel needs most of a GPU: two must not deadlock.
@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(50, 32, 64, 256), (50, 64, 64, 768)], ids=str)
def test_two_streams_do_not_disturb_each_other(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    arguments = [on_gpu(support.sequence_arguments(shape, dtype)) for _ in range(2)]
    expected = [run(a) for a in arguments]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in arguments]
    for _ in range(5):
        results = []
        for stream, a in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(a))
        torch.cuda.synchronize()
        assert same(results[0], expected[0])
        assert same(results[1], expected[1])


@contextmanager
def busy_default_stream() -> Iterator[None]:
    """Queues work on the default stream that outlasts work on other streams."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        a = (a @ a).clamp(-1, 1)
    yield


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_current_stream_is_used(dtype: torch.dtype) -> None:
    a = on_gpu(support.sequence_arguments((20, 16, 8, 64), dtype))
    expected = run(a)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with busy_default_stream(), torch.cuda.stream(stream):
        results = run(a)
        stream.synchronize()
        done = [y.cpu() for y in results]
    assert same(tuple(done), tuple(y.cpu() for y in expected))


def captured(
    work: Callable[[], tuple[Tensor, ...]],
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


@each_engine
@each_dtype
@each_direction
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_forward_and_backward_can_be_captured_in_a_graph(
    dtype: torch.dtype, reverse: bool, packed: bool
) -> None:
    def draw() -> Arguments:
        if packed:
            return on_gpu(support.packed_arguments((9, 5, 5, 2), 8, 16, dtype, reverse))
        return on_gpu(support.sequence_arguments((9, 16, 8, 64), dtype, reverse=reverse))

    a = draw()
    graph, results = captured(lambda: run(a))
    for _ in range(3):
        for tensor, new in zip(a.tensors(), draw().tensors(), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert same(results, run(a))


# Kernels are loaded lazily.
CAPTURED_FIRST = """
import sys
import torch
import lltm

lltm.backends.cuda.persistent = sys.argv[1] == "persistent"
Layer = lltm.cell(gates=1, name="own")(lambda z, c: (torch.tanh(z[0] + c), c / 2)).Layer
layer = (Layer if sys.argv[1] == "own" else lltm.GRU)(64, 64).to("cuda", torch.float16)
input = torch.randn(5, 8, 64, device="cuda", dtype=torch.float16)
input[0] @ input[0].t()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    output, _ = layer(input)
graph.replay()
with torch.no_grad():
    print(torch.equal(output, layer(input)[0]))
"""


@pytest.mark.parametrize("engine", ["per_step", "persistent", "own"])
def test_the_first_call_of_a_process_may_be_captured(engine: str) -> None:
    output = subprocess.check_output([sys.executable, "-c", CAPTURED_FIRST, engine])
    assert output.decode().split() == ["True"]


@has_tf32
def test_replace_uses_the_persistent_engine_on_a_gpu() -> None:
    x = torch.randn(5, 3, 8, device="cuda", dtype=torch.float16)
    model = nn.GRU(8, 256, device="cuda", dtype=torch.float16)
    expected = model(x)[0]
    assert lltm.replace_(model).replaced == [""]
    torch.testing.assert_close(model(x)[0], expected, rtol=0, atol=4e-3)
    assert any("lltm_persistent" in name for name in kernels_of(lambda: model(x)))


def test_explain_reports_the_engine_of_a_sequence() -> None:
    call = explain.Call("sequence", 3, 2, 8, 16, dynamic=False, device="cuda")
    schedule = " ".join(explain.schedule(call).split())
    assert "on CUDA, forward: persistent" in schedule


# Streaming updates the state in place, with and without graph replay.
@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_stream_may_be_processed_by_a_graph(dtype: torch.dtype, steps: int) -> None:
    a = on_gpu(support.sequence_arguments((steps, 3, 8, 64), dtype))
    pieces = torch.randn(7, *a.input.shape, device="cuda").to(dtype)
    piece, h, c = a.input, a.h.clone(), a.c.clone()

    def work() -> tuple[Tensor, ...]:
        with torch.no_grad():
            output, (h_n, c_n) = lltm.functional.sequence(
                "lltm", piece, (h, c), a.weights, bias_ih=a.bias
            )
            h.copy_(h_n)
            c.copy_(c_n)
        return (output,)

    graph, (output,) = captured(work)
    h.copy_(a.h)
    c.copy_(a.c)
    state = a.h, a.c
    for new in pieces:
        piece.copy_(new)
        graph.replay()
        expected, state = lltm.functional.sequence("lltm", new, state, a.weights, bias_ih=a.bias)
        assert same((output, h, c), (expected, *state))


# torch.compile records a graph in the second call, and replays it from the third.
@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compiled_with_reduced_overhead(dtype: torch.dtype, training: bool) -> None:
    from torch._dynamo.utils import counters

    pytest.importorskip("triton", reason="torch.compile needs it for a GPU")
    torch.compiler.reset()
    counters.clear()
    layer = lltm.LLTM(8, 64, num_layers=2, bidirectional=True).to("cuda", dtype)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)

    def work(layer: Callable[..., Any], input: Tensor) -> list[Tensor]:
        output, (h_n, c_n) = layer(input)
        results = [output, h_n, c_n]
        if training:
            loss = sum(y.float().square().sum() for y in results)
            assert isinstance(loss, Tensor)
            results += torch.autograd.grad(loss, [input, *parameters])
        # The next replay overwrites the results.
        return [y.detach().clone() for y in results]

    parameters = list(layer.parameters())
    with torch.set_grad_enabled(training):
        for _ in range(5):
            input = torch.randn(7, 3, 8, device="cuda").to(dtype).requires_grad_(training)
            torch.compiler.cudagraph_mark_step_begin()
            results = work(compiled, input)
            torch.testing.assert_close(results, work(layer, input))
    assert counters["inductor"]["cudagraph_skips"] == 0


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")


# The second shape needs the opt-in shared memory limit, which is set per device.
@needs_two_gpus
@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 4, 8), (5, 64, 4, 768)], ids=str)
def test_devices_work_concurrently(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    a = support.sequence_arguments(shape, dtype)
    devices = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    arguments = [on_gpu(a, device) for device in devices]
    for _ in range(3):
        results = [run(moved) for moved in arguments]
    assert torch.cuda.current_device() == 0
    for device, result in zip(devices, results, strict=True):
        assert {str(y.device) for y in result} == {device}
        torch.testing.assert_close([y.cpu() for y in result], [y.cpu() for y in results[0]])


@needs_two_gpus
def test_custom_cells_work_on_each_device() -> None:
    layer = lltm.cells.cifg.Layer(4, 8)
    input = torch.randn(5, 3, 4)
    expected = trained(layer, input)
    for device in ("cuda:1", "cuda:0"):
        results = trained(copy.deepcopy(layer).to(device), input.to(device))
        assert {str(y.device) for y in results} == {device}
        torch.testing.assert_close([y.cpu() for y in results], expected)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_process_continues_after_an_out_of_memory_error(part: str) -> None:
    small = on_gpu(support.sequence_arguments((5, 3, 4, 7)))
    expected = run(small)
    large = on_gpu(support.sequence_arguments((256, 256, 16, 256))).leaves()

    def forward() -> Tensor:
        return support.sequence_outputs(lltm.functional, large)[0]

    work: Callable[[], object] = forward
    if part == "backward":
        # Allocated before the limit is set, so that only lltm's kernels run out of memory.
        output = forward()
        work = partial(output.backward, torch.ones_like(output))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            work()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same(run(small), expected)
