"""nn.LSTM in other runtimes, from the same ONNX model: inference in float32.

Both take as many threads as torch, and read their
arguments in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, cast

import torch
from torch import Tensor, nn

from lltm.benchmark.contenders import Make, State

ONNX_RUNTIME = "ONNX Runtime LSTM"
OPENVINO = "OpenVINO LSTM"

Arrays = dict[str, Any]  # NumPy arrays, by name
INPUTS = ("input", "h_0", "c_0")
OUTPUTS = ("output", "h_n", "c_n")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"needs {name}: pip install {name}") from error


def lstm_model(lstm: nn.LSTM) -> bytes:
    """Returns an ONNX model of a layer: (input, h_0, c_0) to (output, h_n, c_n), as nn.LSTM.

    Args:
        lstm: one layer and direction, float32, with biases. T and B of the model are free.
    """
    onnx = _import("onnx")
    sizes = {"input": lstm.input_size} | dict.fromkeys(("h_0", "c_0"), lstm.hidden_size)
    sizes |= dict.fromkeys(OUTPUTS, lstm.hidden_size)

    def value(name: str) -> Any:
        steps = "T" if name in ("input", "output") else 1
        shape = [steps, "B", sizes[name]]
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    def constant(name: str, tensor: Tensor) -> Any:
        return onnx.numpy_helper.from_array(tensor.detach().unsqueeze(0).numpy(), name)

    def gates(tensor: Tensor) -> Tensor:
        """Puts nn.LSTM's input, forget, cell, output into ONNX's order."""
        i, f, g, o = tensor.chunk(4)
        return torch.cat([i, o, f, g])

    w_ih, w_hh, b_ih, b_hh = map(gates, lstm.all_weights[0])
    constants = {"W": w_ih, "R": w_hh, "bias": torch.cat([b_ih, b_hh])}
    arguments = ["input", "W", "R", "bias", "", "h_0", "c_0"]  # "": no lengths, all rows are full
    axis = onnx.numpy_helper.from_array(torch.tensor([1]).numpy(), "direction")
    nodes = [
        onnx.helper.make_node("LSTM", arguments, ["Y", "h_n", "c_n"], hidden_size=lstm.hidden_size),
        onnx.helper.make_node("Squeeze", ["Y", "direction"], ["output"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "lstm",
        [value(name) for name in INPUTS],
        [value(name) for name in OUTPUTS],
        [axis, *(constant(name, tensor) for name, tensor in constants.items())],
    )
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    onnx.checker.check_model(model, full_check=True)
    serialized: bytes = model.SerializeToString()
    return serialized


class _Runtime(nn.Module):
    """nn.LSTM, computed elsewhere.

    Arguments and results are bound when other tensors come than in the call before; to pass them
    in every call would take longer than a step. A call overwrites the results of the one before.
    """

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, dtype=dtype)
        self.threads = torch.get_num_threads()
        self.arguments: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.call: Callable[[], object]

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        """Returns what computes `results` from `arguments`, in place."""
        raise NotImplementedError

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        arguments = (input, *state)
        if list(map(id, arguments)) != list(map(id, self.arguments)):
            self.arguments = arguments
            output = input.new_empty(*input.shape[:2], self.lstm.hidden_size)
            self.results = (output, *map(torch.empty_like, state))
            self.call = self.bind(_arrays(INPUTS, arguments), _arrays(OUTPUTS, self.results))
        self.call()
        output, h_n, c_n = self.results
        return output, (h_n, c_n)


def _arrays(names: Sequence[str], tensors: Sequence[Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


class OnnxRuntime(_Runtime):
    """By ONNX Runtime."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        onnxruntime = _import("onnxruntime")
        super().__init__(input_size, hidden_size, dtype=dtype)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        self.session = onnxruntime.InferenceSession(
            lstm_model(self.lstm), options, providers=["CPUExecutionProvider"]
        )

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        binding = self.session.io_binding()
        for bind, arrays in ((binding.bind_input, arguments), (binding.bind_output, results)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return partial(self.session.run_with_iobinding, binding)


class OpenVino(_Runtime):
    """By OpenVINO, compiled for the sizes of its arguments, which is what it does best."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self.openvino = _import("openvino")
        super().__init__(input_size, hidden_size, dtype=dtype)
        self.model = lstm_model(self.lstm)

    def bind(self, arguments: Arrays, results: Arrays) -> Callable[[], object]:
        core = self.openvino.Core()
        model = core.read_model(BytesIO(self.model))
        model.reshape({name: array.shape for name, array in arguments.items()})
        config = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16, where the CPU has AMX
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = core.compile_model(model, "CPU", config).create_infer_request()
        for name, array in (arguments | results).items():
            request.set_tensor(name, self.openvino.Tensor(array, shared_memory=True))
        return cast("Callable[[], object]", request.infer)


RUNTIMES: dict[str, Make] = {ONNX_RUNTIME: OnnxRuntime, OPENVINO: OpenVino}
