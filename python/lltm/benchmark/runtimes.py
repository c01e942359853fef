"""nn.LSTM in other runtimes, from the same ONNX model: inference in float32.

They are installed by the extra `bench`. Both take as many threads as torch, and read their
arguments in place.
"""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]
INPUTS = ("input", "h_0", "c_0")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"needs {name}: pip install 'lltm[bench]'") from error


def lstm_model(lstm: nn.LSTM) -> bytes:
    """Returns an ONNX model of a layer: (input, h_0, c_0) to (output, h_n, c_n), as nn.LSTM.

    Args:
        lstm: one layer and direction, float32, with biases. T and B of the model are free.
    """
    onnx = _import("onnx")
    sizes = {"input": lstm.input_size} | dict.fromkeys(("h_0", "c_0"), lstm.hidden_size)
    sizes |= dict.fromkeys(("output", "h_n", "c_n"), lstm.hidden_size)

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
        [value(name) for name in ("output", "h_n", "c_n")],
        [axis, *(constant(name, tensor) for name, tensor in constants.items())],
    )
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    onnx.checker.check_model(model, full_check=True)
    serialized: bytes = model.SerializeToString()
    return serialized


class _Runtime(nn.Module):
    """nn.LSTM, computed elsewhere."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, dtype=dtype)
        self.threads = torch.get_num_threads()


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

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        arguments = zip(INPUTS, (input, *state), strict=True)
        results = self.session.run(None, {name: tensor.numpy() for name, tensor in arguments})
        output, h_n, c_n = map(torch.from_numpy, results)
        return output, (h_n, c_n)


class OpenVino(_Runtime):
    """By OpenVINO, compiled for the sizes of the first call, which is what it does best."""

    def __init__(self, input_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self.openvino = _import("openvino")
        super().__init__(input_size, hidden_size, dtype=dtype)
        self.core = self.openvino.Core()
        self.request: Any = None

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        tensors = dict(zip(INPUTS, (input, *state), strict=True))
        if self.request is None:
            model = self.core.read_model(BytesIO(lstm_model(self.lstm)))
            model.reshape({name: list(tensor.shape) for name, tensor in tensors.items()})
            config = {
                "INFERENCE_NUM_THREADS": self.threads,
                "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16, where the CPU has AMX
                "PERFORMANCE_HINT": "LATENCY",
            }
            self.request = self.core.compile_model(model, "CPU", config).create_infer_request()
        arguments = {name: tensor.numpy() for name, tensor in tensors.items()}
        results = self.request.infer(arguments, share_inputs=True, share_outputs=True)
        output, h_n, c_n = (torch.from_numpy(results[k]) for k in range(3))
        return output, (h_n, c_n)
