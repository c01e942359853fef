"""nn.LSTM and nn.GRU in ONNX Runtime: inference in float32, with as many threads as PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from lltm.benchmark.contenders import Make

# ONNX's order of the gates, as indices into torch.nn's order.
GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}


def onnx_model(layer: nn.RNNBase) -> bytes:
    """Returns an ONNX model of a layer, from (input, h_0, c_0) to (output, h_n, c_n).

    Args:
        layer: nn.LSTM, or nn.GRU, whose model has no c; float32, with biases, a single layer and
            direction. T and B of the model are dynamic.
    """
    states = "hc" if layer.mode == "LSTM" else "h"
    inputs, outputs = (
        ["input", *(f"{s}_0" for s in states)],
        ["output", *(f"{s}_n" for s in states)],
    )

    def value(name: str) -> Any:
        steps = "T" if name in ("input", "output") else 1
        size = layer.input_size if name == "input" else layer.hidden_size
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [steps, "B", size])

    def gates(tensor: Tensor) -> Tensor:
        order = GATES[layer.mode]
        blocks = tensor.detach().chunk(len(order))
        return torch.cat([blocks[k] for k in order]).unsqueeze(0)

    w_ih, w_hh, b_ih, b_hh = map(gates, layer.all_weights[0])
    constants = {
        "W": w_ih,
        "R": w_hh,
        "bias": torch.cat([b_ih, b_hh], 1),
        "axis": torch.tensor([1]),
    }
    # "": no lengths, because all sequences have T steps.
    arguments = ["input", "W", "R", "bias", "", *inputs[1:]]
    options: Any = {"linear_before_reset": 1} if layer.mode == "GRU" else {}
    options["hidden_size"] = layer.hidden_size
    nodes = [
        onnx.helper.make_node(layer.mode, arguments, ["Y", *outputs[1:]], **options),
        onnx.helper.make_node("Squeeze", ["Y", "axis"], ["output"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        layer.mode,
        [*map(value, inputs)],
        [*map(value, outputs)],
        [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in constants.items()],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    model: bytes = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=opset
    ).SerializeToString()
    return model


class OnnxRuntime(nn.Module):
    """A torch.nn layer that ONNX Runtime computes.

    Arguments and results are bound again if the tensors differ from the previous call, because
    passing them in every call would take longer than a step. A call overwrites the results of the
    previous call.
    """

    def __init__(self, make: Make, *sizes: int, dtype: torch.dtype) -> None:
        super().__init__()
        layer = make(*sizes, dtype=dtype)
        assert isinstance(layer, nn.RNNBase)
        self.layer = layer
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            onnx_model(layer), options, providers=["CPUExecutionProvider"]
        )
        self.arguments: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.call: Callable[[], object]

    def forward(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        states = (state,) if isinstance(state, Tensor) else state
        arguments = (input, *states)
        if [*map(id, arguments)] != [*map(id, self.arguments)]:
            self.arguments = arguments
            output = input.new_empty(*input.shape[:2], self.layer.hidden_size)
            self.results = (output, *map(torch.empty_like, states))
            binding = self.session.io_binding()
            named = (self.session.get_inputs(), self.session.get_outputs())
            binds = (binding.bind_input, binding.bind_output)
            for bind, nodes, tensors in zip(binds, named, (arguments, self.results), strict=True):
                for node, tensor in zip(nodes, tensors, strict=True):
                    array = tensor.numpy()
                    bind(node.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self.call = partial(self.session.run_with_iobinding, binding)
        self.call()
        output, *states = self.results
        return output, states[0] if isinstance(state, Tensor) else tuple(states)
