"""Prepacked weights: lltm.functional.prepack and lltm.PrepackedLLTM.

Values: tests_cpp/test_cells.cpp for the function, test_properties.py for layers.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import DTYPES
from torch import Tensor, nn

import lltm
from lltm.cells import cifg

SIZES: dict[str, Any] = {"input_size": 5, "hidden_size": 33}
OPTIONS: list[dict[str, Any]] = [
    {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
    {"batch_first": True, "bias": False},
]


def test_changes_of_the_layer_and_the_prepacked_layer_are_independent() -> None:
    layer = lltm.LLTM(**SIZES)
    packed = layer.prepack()
    x = torch.randn(3, 2, 5)
    before, _ = packed(x)
    # .data does not update version counters.
    for parameter in layer.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(packed(x)[0], before)
    reference = lltm.reference.LLTM(**SIZES)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))
    torch.testing.assert_close(layer.prepack()(x), reference(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("cell", [lltm.LLTM, lltm.GRU, cifg.Layer])
def test_cannot_be_changed_and_keeps_attributes_that_tools_set(cell: Any) -> None:
    layer = cell(**SIZES)
    packed = layer.prepack()
    fixed = ("hidden_size", "dropout", "heads", "_names", "_CELL", "packed_weights_l0")
    for name in (*fixed, "recurrent_dropout", "nonlinearity", *layer.state_dict()):
        with pytest.raises(AttributeError, match=name):
            setattr(packed, name, 3)
        with pytest.raises(AttributeError, match=name):
            delattr(packed, name)
    with pytest.raises(AttributeError, match="scale"):
        packed.scale = nn.Parameter(torch.ones(1))
    replica = packed._replicate_for_data_parallel()
    for name, buffer in packed.named_buffers():
        setattr(replica, name, buffer)
    packed.qconfig, packed._hf_hook = None, "hook"
    packed.forward = partial(type(packed).forward, packed)
    torch.testing.assert_close(packed(x := torch.randn(3, 2, 5)), layer(x))
    del packed.forward
    for other in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert (other.qconfig, other._hf_hook) == (None, "hook")
        del other._hf_hook
        torch.testing.assert_close(torch.jit.script(other)(x), layer(x))


@pytest.mark.parametrize("base", [lltm.LSTM, lltm.GRU, lltm.RNN, lltm.LLTM, cifg.Layer, nn.GRU])
def test_rejects_a_layer_with_another_forward(base: Any) -> None:
    class Doubled(base):  # type: ignore[misc]
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            return super().forward(2 * input, hx)

    doubled, layer = Doubled(**SIZES), base(**SIZES)
    for module in (doubled, layer):
        lltm.replace_(module, subclasses=True)
    with pytest.raises(lltm.ArgumentError, match=r"^lltm::prepack: .* got Doubled, whose forward"):
        doubled.prepack()
    x = torch.randn(3, 2, 5)
    for source in (layer, layer.__prepare_scriptable__()):
        torch.testing.assert_close(source.prepack()(x), layer(x))
    layer.forward = partial(layer.forward)
    with pytest.raises(lltm.ArgumentError, match="whose forward the prepacked layer would"):
        layer.prepack()


@pytest.mark.xdist_group("compilers")
@pytest.mark.parametrize("compiled", [False, True])
def test_warns_in_training_with_gradients(compiled: bool) -> None:
    packed: Any = lltm.GRU(**SIZES).prepack().train()
    x = torch.randn(3, 2, 5)
    torch.compiler.reset()
    run = torch.compile(packed, fullgraph=True, backend="eager") if compiled else packed
    with torch.no_grad():
        run(x)
    text = "^lltm::PrepackedGRU: a prepacked layer is not trained"
    with pytest.warns(UserWarning, match=text) as caught:
        run(x)
    assert compiled or caught[0].filename == __file__


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn: nn.Module = lltm.LLTM(**SIZES, **options)
        self.head = nn.Linear(33, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(x)[0])
        return output

    def prepack(self) -> Model:
        assert isinstance(self.rnn, lltm.LLTM)
        self.rnn = self.rnn.prepack()
        return self


def test_replaces_the_layer_in_a_model() -> None:
    model = Model(num_layers=2, dropout=0.5).eval()
    x = torch.randn(6, 4, 5)
    expected = model(x)
    model.prepack()
    torch.testing.assert_close(model(x), expected)
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    # No dropout.
    with torch.no_grad():
        torch.testing.assert_close(model.train()(x), expected)
    assert model.rnn.training
    torch.testing.assert_close(model.eval()(x), expected)
    torch.testing.assert_close(model.share_memory()(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_is_rejected(dtype: torch.dtype) -> None:
    """Another device: test_properties.py."""
    x, packed = torch.randn(3, 2, 5), lltm.LLTM(**SIZES).prepack()
    expected, _ = packed(x)
    name = str(dtype).removeprefix("torch.")
    text = f"lltm::PrepackedLLTM: expected dtype to stay float32, got {name}; convert the"
    for module in (packed, Model().prepack()):
        with pytest.raises(TypeError, match=text):
            module.to(dtype)
    torch.testing.assert_close(packed(x)[0], expected)
    # Conversions to the same dtype and device are allowed.
    torch.testing.assert_close(packed.float().cpu().to(torch.float32)(x)[0], expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "cell",
    [
        *(lltm.LLTM, lltm.LSTM, lltm.GRU, partial(lltm.LSTM, proj_size=8), cifg.Layer),
        *(partial(cifg.Layer, heads=3, dtype=dtype) for dtype in DTYPES),
        # No gate reads h. Heads of 32 units are packed.
        partial(lltm.cells.mingru.Layer, heads=3),
        pytest.param(
            lambda **options: lltm.cells.mingru.Layer(**{**options, "hidden_size": 96}, heads=3),
            id="mingru, packed heads",
        ),
    ],
    ids=str,
)
def test_its_state_dict_equals_the_layers(
    cell: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(cell(**SIZES, **options)).eval()

    def prepacked(model: Any) -> nn.Sequential:
        return nn.Sequential(model[0].prepack())

    model = make()
    packed = prepacked(model)
    torch.save(packed.state_dict(), tmp_path / "packed.pt")
    saved = torch.load(tmp_path / "packed.pt", weights_only=True)
    torch.testing.assert_close(dict(saved), dict(model.state_dict()), rtol=0, atol=0)
    x = torch.randn(3, 2, 5, dtype=next(model.parameters()).dtype)
    for assign, state_dict in itertools.product((False, True), (saved, model.state_dict())):
        for loaded, expected in ((prepacked(make()), packed), (make(), model)):
            assert not any(loaded.load_state_dict(state_dict, assign=assign))
            torch.testing.assert_close(loaded(x)[0], expected(x)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("saved", DTYPES, ids=str)
def test_another_dtype_is_converted_as_by_a_layer(saved: torch.dtype, dtype: torch.dtype) -> None:
    source = lltm.LLTM(**SIZES, dtype=saved)
    layer = lltm.LLTM(**SIZES, dtype=dtype)
    packed = layer.prepack()
    for module in (layer, packed):
        module.load_state_dict(source.prepack().state_dict())
    x = torch.randn(3, 2, 5, dtype=dtype)
    torch.testing.assert_close(packed(x)[0], layer.prepack()(x)[0])


OTHERS: list[dict[str, Any]] = [{"bidirectional": True}, {"proj_size": 8}]


@pytest.mark.parametrize(
    "other", [{"input_size": 6, "hidden_size": 33}, *({**SIZES, **o} for o in OTHERS)], ids=str
)
def test_its_state_dict_loads_into_no_layer_of_other_sizes(other: dict[str, Any]) -> None:
    state_dict = lltm.LSTM(**SIZES).prepack().state_dict()
    packed = lltm.LSTM(**other).prepack()
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for PrepackedLSTM"):
        packed.load_state_dict(state_dict)


def test_parameters_missing_in_a_state_dict_are_unchanged() -> None:
    layer: Any = lltm.LLTM(**SIZES)
    packed = lltm.LLTM(**SIZES).prepack()
    before = packed.state_dict()
    missing, unexpected = packed.load_state_dict(
        {"weights_l0": layer.weights_l0, "weights_l1": layer.weights_l0}, strict=False
    )
    assert (missing, unexpected) == (["bias_l0"], ["weights_l1"])
    expected = {"weights_l0": layer.weights_l0.detach(), "bias_l0": before["bias_l0"]}
    torch.testing.assert_close(dict(packed.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pickle_holds_the_weights_and_is_packed_again(dtype: torch.dtype) -> None:
    packed: Any = lltm.LSTM(**SIZES, num_layers=2, bidirectional=True, dtype=dtype).prepack()
    copies = [copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))]
    for other in copies:
        torch.testing.assert_close(
            dict(other.named_buffers()), dict(packed.named_buffers()), rtol=0, atol=0
        )
    if dtype == torch.float32 and support.HAS_OWN_GEMM:
        assert b"LTMPACK" in packed.packed_weights_l0.numpy().tobytes()
    assert b"LTMPACK" not in pickle.dumps(packed)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_new_process_receives_the_layers(start: str, tmp_path: Path) -> None:
    heads = lltm.cells.slstm.Layer(5, 32, heads=4)
    layers = [
        lltm.GRU(**SIZES).prepack(torch.qint8),
        cifg.Layer(**SIZES).prepack(),
        heads.prepack(),
    ]
    x, file = torch.randn(3, 2, 5), tmp_path / "outputs"
    processes: Any = torch.multiprocessing
    processes.start_processes(support.save_outputs, (layers, x, file), start_method=start)
    torch.testing.assert_close(torch.load(file), [layer(x)[0] for layer in layers])


def test_repr_shows_its_sizes() -> None:
    packed = lltm.LLTM(**SIZES, num_layers=2).prepack()
    assert repr(packed) == (
        "lltm.PrepackedLLTM(input_size=5, hidden_size=33, num_layers=2, batch_first=False,"
        " bidirectional=False)"
    )


# Another CPU, simulated: runs weights and modules packed here, and packs for here.
ELSEWHERE = """
import sys, torch, lltm

capability, kernels, here, there = sys.argv[1:]
assert torch.backends.cpu.get_cpu_capability() == capability.upper()
assert lltm._C.cpu_kernels() == kernels
packed_there = []
for weights, quantized, packed, module, x, expected in torch.load(here, weights_only=False):
    # In int8, a step of the quantizer and of the dtype where a rounding falls the other way. In 16
    # bits, some CPUs round h in each step.
    atol = torch.finfo(x.dtype).eps + (1e-3 if quantized else 0)
    close = {"atol": atol, "rtol": 0} if quantized or x.element_size() == 2 else {}
    h = torch.zeros(x.shape[1], 33, dtype=x.dtype)
    output, _ = lltm.functional.sequence("lltm", x, (h, h), packed, bias_ih=module.bias_l0)
    torch.testing.assert_close(output, expected, **close)
    torch.testing.assert_close(module(x)[0], expected, **close)
    packed = lltm.functional.prepack("lltm", weights, dtype=quantized)
    packed_there.append((packed, module.state_dict()))
torch.save(packed_there, there)
"""


CAPABILITIES = [pytest.param("default", marks=pytest.mark.slow), "avx2", "avx512"]


@pytest.mark.parametrize("capability", ["default"] if support.ARM else CAPABILITIES)
def test_works_on_a_cpu_with_other_kernels_and_loads_weights_packed_there(
    capability: str, tmp_path: Path
) -> None:
    # The other CPU may pack differently or not at all.
    if reason := support.cannot_run(capability):
        pytest.skip(reason)
    cases: list[Any] = []
    for dtype in DTYPES:
        for quantized in (None, torch.qint8):
            if quantized is None or dtype != torch.float64:
                layer: Any = lltm.LLTM(**SIZES, dtype=dtype)
                weights = layer.weights_l0.detach()
                packed = lltm.functional.prepack("lltm", weights, dtype=quantized)
                module = layer.prepack(quantized)
                x = torch.randn(6, 5, 5, dtype=dtype)
                cases.append((weights, quantized, packed, module, x, module(x)[0]))
    here, there = tmp_path / "here", tmp_path / "there"
    torch.save(cases, here)
    kernels = support.BASELINE if capability == "default" else capability.upper()
    support.run_python(
        *("-c", ELSEWHERE, capability, kernels, str(here), str(there)),
        ATEN_CPU_CAPABILITY=capability,
    )
    for (_, quantized, _, module, x, expected), (packed, state_dict) in zip(
        cases, torch.load(there), strict=True
    ):
        atol = torch.finfo(x.dtype).eps + (1e-3 if quantized else 0)
        close: Any = {"atol": atol, "rtol": 0} if quantized or x.element_size() == 2 else {}
        h = torch.zeros(x.shape[1], 33, dtype=x.dtype)
        output, _ = lltm.functional.sequence("lltm", x, (h, h), packed, bias_ih=module.bias_l0)
        torch.testing.assert_close(output, expected, **close)
        module.load_state_dict(state_dict)
        torch.testing.assert_close(module(x)[0], expected, **close)


@pytest.mark.xdist_group("compilers")
def test_is_compiled_and_exported_whole() -> None:
    model = Model().prepack().eval()
    x = torch.randn(4, 2, 5)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    program = support.saved_and_loaded(torch.export.export(model, (x,)), torch.export)
    torch.testing.assert_close(program.module()(x), expected)
    core = program.run_decompositions(support.decompositions())
    torch.testing.assert_close(core.module()(x), expected)  # keeps the operator
    assert set(program.state_dict) == {"rnn.bias_l0", "head.weight", "head.bias"}
    assert [*program.constants] == ["rnn.packed_weights_l0"]


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hr_l1_reverse"])
def test_rejects_a_projection_with_weights_of_other_shapes(name: str) -> None:
    layer = lltm.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2)
    layer.prepack()
    for shape in ((), (16, 5)):
        setattr(layer, name, torch.nn.Parameter(torch.ones(shape)))
        with pytest.raises(ValueError, match=rf"^lltm::prepack: expected {name} of shape \("):
            layer.prepack()


@pytest.mark.parametrize(
    "form", [pytest.param(None, marks=support.needs_packed_weights), torch.qint8], ids=str
)
def test_rejects_weights_of_another_cell(form: torch.dtype | None) -> None:
    ops = torch.ops.lltm
    lltm_s, lstm_s, gru_s = (
        support.of_cell(cell, support.sequence_arguments((3, 4, 5, 17)))
        for cell in ("lltm", "lstm", "gru")
    )
    for a, other in ((lltm_s, gru_s), (lstm_s, lltm_s), (gru_s, lstm_s)):
        packed = ops.prepack(other.cell, other.weights, other.weight_hh, dtype=form)
        _, input, h, c, *_ = a.operands()
        got = f"got weights prepacked for {other.cell}"
        expected = f"weights prepacked for the cell {a.cell}, {got}"
        with pytest.raises(ValueError, match=f"^lltm::sequence: expected {expected}"):
            ops.sequence(a.cell, input, h, c, packed)
    packed = cifg.Layer(5, 17).prepack(form).packed_weights_l0
    with pytest.raises(ValueError, match="for the cell lstm, got weights prepacked for another"):
        ops.sequence(*lstm_s.operands()[:4], packed)


@support.needs_packed_weights
@pytest.mark.parametrize("steps", [0, 3])
def test_packed_bytes_may_have_any_alignment(steps: int) -> None:
    a = support.sequence_arguments((steps, 4, 5, 17))
    packed = lltm.functional.prepack("lltm", a.weights)
    moved = torch.empty(packed.numel() + 64, dtype=torch.uint8)[1:][: packed.numel()]
    moved.copy_(packed)
    expected = support.sequence_outputs(lltm.functional, a)
    for weights in (packed, moved):
        got = support.sequence_outputs(lltm.functional, a, weights)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@support.needs_packed_weights
def test_rejects_weights_packed_for_other_arguments() -> None:
    a = support.sequence_arguments((3, 4, 5, 17))

    def run(weights: Tensor) -> None:
        lltm.functional.sequence("lltm", a.input, (a.h, a.c), weights, bias_ih=a.bias)

    for shape in ((51, 23), (54, 22), (600, 205)):
        with pytest.raises(ValueError, match="lltm::sequence: expected weight"):
            run(lltm.functional.prepack("lltm", torch.zeros(shape)))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match=r"lltm::sequence: expected (weight|input of dtype)"):
            run(lltm.functional.prepack("lltm", a.weights.to(dtype)))  # float64 is not packed


@support.needs_packed_weights
def test_rejects_arguments_that_packed_weights_do_not_support() -> None:
    a = support.sequence_arguments((3, 4, 5, 17))
    packed = lltm.functional.prepack("lltm", a.weights)
    state = (a.h, a.c)
    with pytest.raises(ValueError, match=r"expected no recurrent_mask with prepacked weights"):
        lltm.functional.sequence(
            "lltm", a.input, state, packed, recurrent_mask=torch.ones_like(a.h)
        )
    operands = ("lltm", a.input, *state, packed)
    with pytest.raises(ValueError, match=r"expected no weight_hh with prepacked weights"):
        torch.ops.lltm.sequence(*operands, a.weights)
    with pytest.raises(NotImplementedError, match=r"expected unpacked weight_ih to compute gradi"):
        torch.ops.lltm.sequence_forward(*operands, *[None] * 4, False, None, 0, None)
    with pytest.raises(TypeError, match=r"lltm::step: expected weight_ih of dtype .*, got uint8"):
        lltm.functional.step("lltm", a.input[0], state, packed)
