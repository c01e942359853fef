"""torch.onnx.export of models with lltm's modules, run by ONNX Runtime."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from forms import OneState
from support import GALLERY_CELLS, flat, gallery_module, needs_extra
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import lltm

onnx = pytest.importorskip("onnx", reason="part of the test extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="part of the test extra")

# The exporter imports onnxscript, which takes half a second.
pytestmark = [pytest.mark.xdist_group("compilers"), needs_extra("test", "onnxscript")]


class Tagger(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.layer = lltm.LLTM(3, 5, **options)
        self.head = nn.Linear(10 if self.layer.bidirectional else 5, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, (h_n, c_n) = self.layer(self.embedding(tokens))
        return self.head(output), h_n, c_n


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape)


def features(*shape: int, size: int = 3) -> Tensor:
    return torch.randn(*shape, size)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]
# Model, input, example sizes.
MODELS: dict[str, Case] = {
    "cell": (lambda: lltm.LLTMCell(3, 5), features, (4,)),
    "cell, no bias": (lambda: lltm.LLTMCell(3, 5, bias=False), features, (4,)),
    "model": (Tagger, tokens, (6, 4)),
    "model, all options": (
        lambda: Tagger(num_layers=2, bidirectional=True, batch_first=True, dropout=0.5),
        tokens,
        (4, 6),
    ),
    "no bias": (lambda: Tagger(bias=False), tokens, (6, 4)),
    "one state, reverse": (OneState, features, (6, 4)),
}
STANDARD = {"", "ai.onnx"}
SOME = ("cell", "model, all options")


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    params = (pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in names)
    return pytest.mark.parametrize("name", list(params))


def operators(program: Any) -> set[tuple[str, str]]:
    """Includes loop bodies."""
    model = program.model_proto
    assert {opset.domain for opset in model.opset_import} <= STANDARD
    assert len(model.functions) == 0
    graphs, found = [model.graph], set()
    while graphs:
        for node in graphs.pop().node:
            found.add((node.domain, node.op_type))
            graphs.extend(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    return found


def assert_same(program: Any, module: nn.Module, *inputs: Tensor) -> None:
    assert_file_same(program.model_proto.SerializeToString(), module, *inputs)


def assert_file_same(file: bytes, module: nn.Module, *inputs: Tensor) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the exporter leaves an unused constant
    session = onnxruntime.InferenceSession(file, options)
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    with torch.no_grad():
        expected = flat(module(*inputs))
    assert len(found) == len(expected)
    for y, y_expected in zip(found, expected, strict=True):
        assert isinstance(y, np.ndarray)
        torch.testing.assert_close(torch.from_numpy(y), y_expected)


def export(module: Any, *inputs: Any, **options: Any) -> Any:
    return torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)


@each_of(MODELS)
def test_a_model_of_fixed_length_needs_standard_operators_only(name: str) -> None:
    make, inputs, shape = MODELS[name]
    module = make().eval()
    batch = 0 if len(shape) == 1 or getattr(module, "layer", lltm.LLTM(1, 1)).batch_first else 1
    program = export(module, inputs(*shape), dynamic_shapes=({batch: "batch"},))
    found = operators(program)
    assert {domain for domain, _ in found} <= STANDARD
    assert ("", "Scan") not in found
    for size in (4, 9, 1):
        other = tuple(size if d == batch else n for d, n in enumerate(shape))
        assert_same(program, module, inputs(*other))


@each_of(name for name, (*_, shape) in MODELS.items() if len(shape) == 2)
def test_a_model_of_dynamic_length_is_a_scan(name: str) -> None:
    make, inputs, shape = MODELS[name]
    module = make().eval()
    program = export(module, inputs(*shape), dynamic_shapes=({0: "a", 1: "b"},))
    found = operators(program)
    assert {domain for domain, _ in found} <= STANDARD
    assert ("", "Scan") in found
    for sizes in ((6, 4), (9, 2), (2, 9), (1, 1)):
        assert_same(program, module, inputs(*sizes))


# This cell has two states and parameters.
QUICK = ("rsynaptic",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in GALLERY_CELLS],
)
def test_custom_cells(name: str) -> None:
    layer = gallery_module(name, 3, 5, bidirectional=True).eval()
    inputs = partial(features, size=layer.input_size)
    fixed = export(layer, inputs(4, 2))
    assert ("", "Scan") not in operators(fixed)
    assert_same(fixed, layer, inputs(4, 2))
    program = export(layer, inputs(6, 4), dynamic_shapes=({0: "steps", 1: "batch"},))
    assert ("", "Scan") in operators(program)
    for shape in ((9, 2), (2, 9), (1, 1)):
        assert_same(program, layer, inputs(*shape))


class Encoders(nn.Module):
    """Each cell of torch.nn, with two layers and directions."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"num_layers": 2, "bidirectional": True}
        self.lstm, self.gru = lltm.LSTM(3, 5, **options), lltm.GRU(3, 5, **options)
        self.rnn = lltm.RNN(3, 5, nonlinearity="relu", **options)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x), self.gru(x), self.rnn(x)


def test_cells_of_torch_nn_are_onnx_s_operators() -> None:
    model = Encoders().eval()
    program = export(model, features(6, 4), dynamic_shapes=({0: "steps", 1: "batch"},))
    found = operators(program)
    assert {("", "LSTM"), ("", "GRU"), ("", "RNN")} <= found
    assert ("", "Scan") not in found
    for shape in ((9, 2), (1, 1)):
        assert_same(program, model, features(*shape))


class Resetting(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = lltm.GRU(3, 5, **options)

    def forward(self, x: Tensor, reset: Tensor) -> Tensor:
        output: Tensor = self.layer(x, reset=reset)[0]
        return output


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_resets_are_exported_and_recurrent_masks_are_not() -> None:
    arguments = features(6, 4), torch.rand(6, 4) < 0.3
    model = Resetting(recurrent_dropout=0.5).eval()
    assert_same(export(model, *arguments), model, *arguments)
    with pytest.raises(Exception, match="recurrent mask can't be exported"):
        export(model.train(), *arguments)


def test_an_exported_program_is_converted_too() -> None:
    layer = lltm.LLTM(3, 5).eval()
    sizes = {0: torch.export.Dim("steps"), 1: torch.export.Dim("batch")}
    program = torch.export.export(layer, (features(6, 4),), dynamic_shapes=(sizes,))
    exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert_same(exported, layer, features(3, 2))


@pytest.mark.parametrize(
    ("layer", "input", "text"),
    [
        (
            lltm.LLTM(3, 5),
            PackedSequence(features(7), torch.tensor([4, 3])),
            "a packed sequence .* padded input",
        ),
        (lltm.LLTM(3, 5).prepack(torch.qint8), features(6, 4), ".* export the layer itself"),
    ],
    ids=["packed", "prepacked"],
)
def test_errors_name_a_remedy(layer: nn.Module, input: Any, text: str) -> None:
    with pytest.raises(Exception, match=f"lltm::sequence: {text}"):
        export(layer.eval(), input)


older_exporter = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:Exporting a model"
)


@older_exporter
@pytest.mark.parametrize(
    "module",
    [
        lltm.LSTM(3, 5, num_layers=2, bidirectional=True, dropout=0.5),
        lltm.GRU(3, 5, bias=False, checkpoint_steps=2),
        lltm.RNN(3, 5, nonlinearity="relu"),
        lltm.LSTMCell(3, 5),
        lltm.GRUCell(3, 5),
        lltm.RNNCell(3, 5),
    ],
    ids=str,
)
def test_the_older_exporter_writes_cells_of_torch_nn(module: Any) -> None:
    module.eval()
    file: Any = io.BytesIO()
    lengths = (9, 6) if isinstance(module, nn.RNNBase) else (4,)
    shape = (lengths[0], 4) if len(lengths) > 1 else lengths
    torch.onnx.export(
        module,
        (features(*shape),),
        file,
        dynamo=False,
        input_names=["input"],
        dynamic_axes={"input": {0: "steps"}} if len(lengths) > 1 else None,
    )
    for length in lengths:
        assert_file_same(file.getvalue(), module, features(length, *shape[1:]))


@older_exporter
@pytest.mark.parametrize(
    ("module", "reset"),
    [
        (lltm.LLTM(3, 5), None),
        (lltm.LSTM(3, 5).prepack(), None),
        (lltm.GRU(3, 5, recurrent_dropout=0.5), None),
        (lltm.GRU(3, 5), torch.zeros(6, 4, dtype=torch.bool)),
    ],
)
def test_the_older_exporter_refuses_all_else(module: nn.Module, reset: Tensor | None) -> None:
    arguments = (features(6, 4), None, reset)
    file: Any = io.BytesIO()
    with pytest.raises(NotImplementedError, match=r"supports only layers and cells of torch\.nn"):
        torch.onnx.export(module, arguments, file, dynamo=False)
    torch.set_autocast_cache_enabled(True)  # after an error, PyTorch leaves it off
