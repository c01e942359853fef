"""nn.LSTM and nn.GRU in other runtimes, in float32: inference, and training in JAX.

ONNX Runtime and OpenVINO run the same ONNX model. All runtimes use as many threads as PyTorch, and
read their arguments in place.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, cast

import torch
from goals import ONNX_RUNTIME
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from lltm.benchmark.cases import Case
from lltm.benchmark.contenders import Make

OPENVINO = "OpenVINO"
JAX = "JAX"
UNROLLED = (1, 4, 10)  # steps per iteration of JAX's loop

Arrays = dict[str, Any]  # NumPy arrays, by name
# ONNX's order of the gates, as indices into torch.nn's order.
GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"needs {name}: pip install {name}") from error


def names(layer: nn.RNNBase) -> tuple[list[str], list[str]]:
    """Arguments and results."""
    states = "hc" if layer.mode == "LSTM" else "h"
    return ["input", *(f"{s}_0" for s in states)], ["output", *(f"{s}_n" for s in states)]


def onnx_model(layer: nn.RNNBase) -> bytes:
    """Returns an ONNX model of a layer, from (input, h_0, c_0) to (output, h_n, c_n).

    Args:
        layer: nn.LSTM, or nn.GRU, whose model has no c; float32, with biases, a single layer and
            direction. T and B of the model are dynamic.
    """
    onnx = _import("onnx")
    inputs, outputs = names(layer)

    def value(name: str) -> Any:
        steps = "T" if name in ("input", "output") else 1
        size = layer.input_size if name == "input" else layer.hidden_size
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [steps, "B", size])

    def constant(name: str, tensor: Tensor) -> Any:
        return onnx.numpy_helper.from_array(tensor.detach().unsqueeze(0).numpy(), name)

    def gates(tensor: Tensor) -> Tensor:
        order = GATES[layer.mode]
        blocks = tensor.chunk(len(order))
        return torch.cat([blocks[k] for k in order])

    w_ih, w_hh, b_ih, b_hh = map(gates, layer.all_weights[0])
    constants = {"W": w_ih, "R": w_hh, "bias": torch.cat([b_ih, b_hh])}
    # "": no lengths, because all sequences have T steps.
    arguments = ["input", "W", "R", "bias", "", *inputs[1:]]
    options: Any = {"hidden_size": layer.hidden_size}
    if layer.mode == "GRU":
        options["linear_before_reset"] = 1
    axis = onnx.numpy_helper.from_array(torch.tensor([1]).numpy(), "direction")
    nodes = [
        onnx.helper.make_node(layer.mode, arguments, ["Y", *outputs[1:]], **options),
        onnx.helper.make_node("Squeeze", ["Y", "direction"], ["output"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        layer.mode,
        list(map(value, inputs)),
        list(map(value, outputs)),
        [axis, *(constant(name, tensor) for name, tensor in constants.items())],
    )
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    onnx.checker.check_model(model, full_check=True)
    serialized: bytes = model.SerializeToString()
    return serialized


class _Runtime(nn.Module):
    """A torch.nn layer that another runtime computes.

    Arguments and results are bound again if the tensors differ from the previous call, because
    passing them in every call would take longer than a step. A call overwrites the results of the
    previous call.
    """

    def __init__(
        self, make: Make, input_size: int, hidden_size: int, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        layer = make(input_size, hidden_size, dtype=dtype)
        assert isinstance(layer, nn.RNNBase)
        self.layer = layer
        self.threads = torch.get_num_threads()
        self.arguments: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.call: Callable[[], object]

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        """Computes `results` from `arguments`, in place."""
        raise NotImplementedError

    def forward(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        states = (state,) if isinstance(state, Tensor) else state
        arguments = (input, *states)
        if list(map(id, arguments)) != list(map(id, self.arguments)):
            self.arguments = arguments
            output = input.new_empty(*input.shape[:2], self.layer.hidden_size)
            self.results = (output, *map(torch.empty_like, states))
            both = zip(names(self.layer), (arguments, self.results), strict=True)
            self.call = self.bind(*(_arrays(*each) for each in both))
        self.call()
        output, *states = self.results
        return output, states[0] if isinstance(state, Tensor) else tuple(states)


def _arrays(names: Sequence[str], tensors: Sequence[Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


class OnnxRuntime(_Runtime):
    def __init__(self, *arguments: Any, **dtype: Any) -> None:
        onnxruntime = _import("onnxruntime")
        super().__init__(*arguments, **dtype)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        self.session = onnxruntime.InferenceSession(
            onnx_model(self.layer), options, providers=["CPUExecutionProvider"]
        )

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        binding = self.session.io_binding()
        for bind, arrays in ((binding.bind_input, arguments), (binding.bind_output, results)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return partial(self.session.run_with_iobinding, binding)


class OpenVino(_Runtime):
    """A layer in OpenVINO, compiled for the sizes of its arguments, its fastest mode."""

    def __init__(self, *arguments: Any, **dtype: Any) -> None:
        self.openvino = _import("openvino")
        super().__init__(*arguments, **dtype)
        self.model = onnx_model(self.layer)

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        core = self.openvino.Core()
        model = core.read_model(BytesIO(self.model))
        model.reshape({name: array.shape for name, array in arguments.items()})
        config = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32",  # with AMX, the default is bfloat16
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = core.compile_model(model, "CPU", config).create_infer_request()
        for name, array in (arguments | results).items():
            request.set_tensor(name, self.openvino.Tensor(array, shared_memory=True))
        return cast("Callable[[], object]", request.infer)


class _Computed(torch.autograd.Function):
    """Returns an output, without values, whose gradients are computed elsewhere."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, hidden_size: int) -> Tensor:
        return input.new_empty(*input.shape[:2], hidden_size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None


class Jax(_Runtime):
    """A layer in JAX: one GEMM of all inputs, then lax.scan, with the fastest of UNROLLED.

    In training, forward computes `gradients`, of the sum of the output, in one jitted function.
    """

    gradients: Any  # of the parameters and of the input

    def __init__(self, *arguments: Any, **dtype: Any) -> None:
        self.jax = _import("jax")
        super().__init__(*arguments, **dtype)
        if self.threads != len(os.sched_getaffinity(0)):
            raise RuntimeError("JAX uses all cores")

    def run(self, unroll: int, training: bool, parameters: Any, input: Any, states: Any) -> Any:
        w_ih, w_hh, b_ih, b_hh = parameters
        split, tanh, sigmoid = self.jax.numpy.split, self.jax.numpy.tanh, self.jax.nn.sigmoid

        def step(state: Any, x: Any) -> Any:
            h, *c = state
            gates = h @ w_hh.T + b_hh
            if c:
                i, f, g, o = split(x + gates, 4, axis=-1)
                c = [sigmoid(f) * c[0] + sigmoid(i) * tanh(g)]
                h = sigmoid(o) * tanh(c[0])
            else:
                (r, z, n), (x_r, x_z, x_n) = split(gates, 3, axis=-1), split(x, 3, axis=-1)
                z, n = sigmoid(x_z + z), tanh(x_n + sigmoid(x_r + r) * n)
                h = (1 - z) * n + z * h
            return (h, *c), h

        first, x = tuple(state[0] for state in states), input @ w_ih.T + b_ih
        states, output = self.jax.lax.scan(step, first, x, unroll=unroll)
        return output.sum() if training else (output, *(state[None] for state in states))

    def bind_fastest(self, arguments: Sequence[Any], training: bool) -> None:
        times: dict[Callable[[], Any], float] = {}
        for unroll in UNROLLED:
            run = partial(self.run, unroll, training)
            if training:
                run = self.jax.grad(run, argnums=(0, 1))
            call = partial(self.jax.jit(run), *arguments)
            for _ in range(4):  # the first compiles
                start = time.perf_counter()
                self.jax.block_until_ready(call())
                times[call] = min(times.get(call, 1e9), time.perf_counter() - start)
        self.call = min(times, key=times.__getitem__)

    def forward(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        states = (state,) if isinstance(state, Tensor) else state
        if list(map(id, (input, *states))) != list(map(id, self.arguments)):
            self.arguments = (input, *states)
            tensors = (*self.layer.all_weights[0], *self.arguments)
            arrays = [self.jax.dlpack.from_dlpack(tensor.detach()) for tensor in tensors]
            self.bind_fastest((arrays[:4], arrays[4], arrays[5:]), input.requires_grad)
        self.gradients = results = self.jax.block_until_ready(self.call())
        if input.requires_grad:
            return _Computed.apply(input, self.layer.hidden_size), None  # type: ignore[no-untyped-call]
        output, *states = map(from_dlpack, results)
        return output, states[0] if isinstance(state, Tensor) else tuple(states)


RUNTIMES: dict[str, type[_Runtime]] = {ONNX_RUNTIME: OnnxRuntime, OPENVINO: OpenVino, JAX: Jax}


def runtimes(case: Case) -> dict[str, Make]:
    if case.is_step or case.dtype != torch.float32 or not case.is_plain:
        return {}
    layer = getattr(nn, case.yardstick)
    makes = {JAX: Jax} if case.training else RUNTIMES
    return {f"{name} {case.yardstick}": partial(made, layer) for name, made in makes.items()}
