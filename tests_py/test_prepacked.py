"""Weights that are packed once: lltm.functional.prepack and lltm.PrepackedLLTM."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import DTYPES, LENGTHS, SEQUENCE_SHAPES, Arguments
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

SIZES: dict[str, Any] = {"input_size": 5, "hidden_size": 33}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "dropout": 0.5},
]


prepacked = partial(support.prepacked_outputs, None, lltm.functional)


def is_the_sequence(a: Arguments) -> None:
    torch.testing.assert_close(prepacked(a), support.sequence_outputs(lltm.functional, a))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("shape", SEQUENCE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_sequence(
    shape: tuple[int, int, int, int], dtype: torch.dtype, reverse: bool
) -> None:
    is_the_sequence(support.sequence_arguments(shape, dtype, reverse=reverse))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_sequence_when_rows_have_lengths(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    is_the_sequence(support.packed_arguments(lengths, dtype=dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_packed_with_other_threads_than_it_is_used_with(threads: int) -> None:
    a = support.sequence_arguments((7, 40, 30, 100))
    expected = support.sequence_outputs(lltm.functional, a)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = lltm.functional.prepack(a.weights)
    finally:
        torch.set_num_threads(before)
    output, state = lltm.functional.sequence_prepacked(a.input, (a.h, a.c), packed, a.bias)
    torch.testing.assert_close((output, *state), expected)


# ---- the layer --------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gives_what_the_layer_gives_in_evaluation(options: dict[str, Any]) -> None:
    layer = lltm.LLTM(**SIZES, **options).eval()
    packed = layer.prepack()
    x = torch.randn(6, 4, 5)
    output, state = layer(x)
    torch.testing.assert_close(packed(x), (output, state))
    again = x[:, :2] if layer.batch_first else x[:2]
    torch.testing.assert_close(packed(again, state), layer(again, state))
    torch.testing.assert_close(packed(x[0]), layer(x[0]))

    rows = pack_sequence([torch.randn(n, 5) for n in (2, 5, 1)], enforce_sorted=False)
    ours, ours_state = packed(rows)
    theirs, theirs_state = layer(rows)
    assert isinstance(ours, PackedSequence)
    torch.testing.assert_close(ours.data, theirs.data)
    torch.testing.assert_close(ours_state, theirs_state)


def test_neither_form_sees_what_is_done_to_the_other() -> None:
    layer = lltm.LLTM(**SIZES)
    packed = layer.prepack()
    x = torch.randn(3, 2, 5)
    before, _ = packed(x)
    # A change through .data is one that no version counter tells of.
    for parameter in layer.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(packed(x)[0], before, rtol=0, atol=0)
    reference = lltm.reference.LLTM(**SIZES)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))
    torch.testing.assert_close(layer.prepack()(x), reference(x))


def test_cannot_be_changed() -> None:
    packed = lltm.LLTM(**SIZES).prepack()
    for name in ("hidden_size", "dropout", "_names", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(packed, name, 3)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn: nn.Module = lltm.LLTM(**SIZES, **options)
        self.head = nn.Linear(66 if options.get("bidirectional") else 33, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(x)[0])
        return output

    def prepack(self) -> Model:
        assert isinstance(self.rnn, lltm.LLTM)
        self.rnn = self.rnn.prepack()
        return self


def test_takes_the_place_of_the_layer_in_a_model(tmp_path: Path) -> None:
    model = Model(num_layers=2, dropout=0.5).eval()
    x = torch.randn(6, 4, 5)
    expected = model(x)
    model.prepack()
    torch.testing.assert_close(model(x), expected)
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    # Dropout stays out of it.
    torch.testing.assert_close(model.train()(x), expected)
    assert model.rnn.training
    torch.testing.assert_close(model.eval()(x), expected)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(model.share_memory()(x), expected)


def test_hooks_see_its_calls() -> None:
    packed = lltm.LLTM(**SIZES).prepack()
    seen: list[str] = []
    packed.register_forward_pre_hook(lambda *_: seen.append("before"))
    packed.register_forward_hook(lambda *_: seen.append("after"))
    packed(torch.randn(3, 2, 5))
    assert seen == ["before", "after"]


@pytest.mark.xdist_group("compilers")
@pytest.mark.parametrize("compile", ["function", "method"])
def test_is_compiled_as_a_module(compile: str) -> None:
    torch.compiler.reset()
    packed = lltm.LLTM(**SIZES).prepack()
    x = torch.randn(3, 2, 5)
    expected = packed(x)
    run: Any = packed
    if compile == "function":
        run = torch.compile(packed, fullgraph=True, backend="aot_eager")
    else:
        packed.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize(
    ("convert", "error", "text"),
    [
        (lambda m: m.half(), TypeError, "of dtype float32, got float16: convert the layer and"),
        (lambda m: m.double(), TypeError, "of dtype float32, got float64: convert the layer"),
        (lambda m: m.to(torch.bfloat16), TypeError, "of dtype float32, got bfloat16: convert"),
        (lambda m: m.to("meta"), RuntimeError, "on device cpu, got meta: move the layer and"),
    ],
    ids=["half", "double", "to dtype", "to device"],
)
def test_is_not_converted(convert: Any, error: type[Exception], text: str) -> None:
    for module in (lltm.LLTM(**SIZES).prepack(), Model().prepack()):
        with pytest.raises(error, match=f"lltm::PrepackedLLTM: expected to stay {text}"):
            convert(module)
    x = torch.randn(3, 2, 5)
    packed = lltm.LLTM(**SIZES).prepack()
    expected, _ = packed(x)
    with pytest.raises(error):
        convert(packed)
    torch.testing.assert_close(packed(x)[0], expected, rtol=0, atol=0)
    # What changes nothing is none of that.
    torch.testing.assert_close(packed.float().cpu().to(torch.float32)(x)[0], expected)


# ---- state_dict -------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_state_dict_loads_into_another_of_the_same_sizes(
    options: dict[str, Any], assign: bool, tmp_path: Path
) -> None:
    one, other = Model(**options).prepack(), Model(**options).prepack()
    torch.save(one.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert not any(other.load_state_dict(saved, assign=assign))
    x = torch.randn(3, 2, 5)
    torch.testing.assert_close(other(x), one(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "other",
    [
        {"input_size": 6, "hidden_size": 33},
        {"input_size": 5, "hidden_size": 32},
        {**SIZES, "dtype": torch.bfloat16},
        {**SIZES, "dtype": torch.float64},
        {**SIZES, "num_layers": 2},
        {**SIZES, "bidirectional": True},
        {**SIZES, "bias": False},
    ],
    ids=str,
)
def test_its_state_dict_loads_into_no_other_layer(other: dict[str, Any]) -> None:
    state_dict = lltm.LLTM(**SIZES).prepack().state_dict()
    packed = lltm.LLTM(**other).prepack()
    x = torch.randn(3, 2, packed.input_size, dtype=packed.dtype)
    expected, _ = packed(x)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for PrepackedLLTM"):
        packed.load_state_dict(state_dict)
    if "num_layers" not in other and "bidirectional" not in other and "bias" not in other:
        torch.testing.assert_close(packed(x)[0], expected, rtol=0, atol=0)


def test_weights_of_another_cell_are_named_as_such() -> None:
    """Whose biases have another size, too."""
    text = r"packed_weights_l0: .*for the cell lstm, got some for gru"
    with pytest.raises(RuntimeError, match=text):
        lltm.LSTM(**SIZES).prepack().load_state_dict(lltm.GRU(**SIZES).prepack().state_dict())
    other = lltm.GRU(5, 44).prepack()  # of as many biases
    with pytest.raises(RuntimeError, match=text):
        lltm.LSTM(**SIZES).prepack().load_state_dict(other.state_dict())
    text = r"packed_weights_l0: .*got some for hidden size 44 and input size 5"
    with pytest.raises(RuntimeError, match=text):
        lltm.GRU(**SIZES).prepack().load_state_dict(other.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_and_a_prepacked_one_refuse_each_other_s_state_dict(strict: bool) -> None:
    layer = lltm.LLTM(**SIZES)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    packed = lltm.LLTM(**SIZES).prepack()
    x = torch.randn(3, 2, 5)
    expected, _ = packed(x)
    text = "lltm::LLTM: expected the state_dict of a layer, got that of a prepacked one"
    with pytest.raises(RuntimeError, match=text):
        layer.load_state_dict(packed.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=text):
        Model().load_state_dict(Model().prepack().state_dict(), strict=strict)
    text = "lltm::PrepackedLLTM: expected the state_dict of a prepacked layer, got that of a layer"
    with pytest.raises(RuntimeError, match=text):
        packed.load_state_dict(layer.state_dict(), strict=strict)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(packed(x)[0], expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        lltm.LLTMCell(**SIZES).load_state_dict(packed.state_dict())


def test_a_state_dict_with_forged_bytes_is_refused() -> None:
    packed = lltm.LLTM(**SIZES).prepack()
    state_dict = packed.state_dict()
    for forged in (state_dict["packed_weights_l0"] * 0, state_dict["packed_weights_l0"][:-1]):
        with pytest.raises(RuntimeError, match="packed_weights_l0: lltm::sequence_prepacked: exp"):
            packed.load_state_dict({**state_dict, "packed_weights_l0": forged})
    del state_dict["packed_weights_l0"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .packed_weights_l0"):
        packed.load_state_dict(state_dict)


def test_its_text_names_its_sizes() -> None:
    packed = lltm.LLTM(**SIZES, num_layers=2).prepack()
    assert repr(packed) == (
        "PrepackedLLTM(input_size=5, hidden_size=33, num_layers=2, batch_first=False,"
        " bidirectional=False)"
    )


# Loads what was packed here, and packs there what is loaded here.
ELSEWHERE = """
import sys, torch, lltm

capability, here, there = sys.argv[1:]
assert torch.backends.cpu.get_cpu_capability() == capability.upper()
packed_there = []
for layer, quantised, packed, x, expected in torch.load(here, weights_only=False):
    # In int8, a step of the quantiser and of the dtype where a rounding falls the other way.
    close = {"atol": 1e-3 + torch.finfo(x.dtype).eps, "rtol": 0} if quantised else {}
    torch.testing.assert_close(packed(x)[0], expected, **close)
    packed_there.append(layer.prepack(quantised).state_dict())
torch.save(packed_there, there)
"""


@pytest.mark.parametrize("capability", [pytest.param("default", marks=pytest.mark.slow), "avx2"])
def test_works_on_a_machine_with_other_kernels_and_loads_what_was_packed_there(
    capability: str, tmp_path: Path
) -> None:
    # What prepack makes there may have other bytes, or be the weights as they are.
    layers = []
    for dtype in DTYPES:
        for quantised in (None, torch.qint8):
            if quantised is None or dtype != torch.float64:
                layer = lltm.LLTM(**SIZES, dtype=dtype)
                packed = layer.prepack(quantised)
                x = torch.randn(6, 5, 5, dtype=dtype)
                layers.append((layer, quantised, packed, x, packed(x)[0]))
    here, there = tmp_path / "here", tmp_path / "there"
    torch.save(layers, here)
    run = support.run_python(
        *("-c", ELSEWHERE, capability, str(here), str(there)),
        ATEN_CPU_CAPABILITY=capability,
    )
    assert run.returncode == 0, run.stderr
    for (layer, quantised, packed, x, expected), state_dict in zip(
        layers, torch.load(there), strict=True
    ):
        packed.load_state_dict(state_dict)
        if quantised:
            atol = 1e-3 + torch.finfo(x.dtype).eps
            torch.testing.assert_close(packed(x)[0], expected, atol=atol, rtol=0)
        else:
            torch.testing.assert_close(packed(x), layer(x))


@pytest.mark.xdist_group("compilers")
def test_is_compiled_and_exported_whole() -> None:
    packed = lltm.LLTM(**SIZES).prepack()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = packed(x)[0]
            return output

    x = torch.randn(4, 2, 5)
    expected, _ = packed(x)
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.export.export(Model(), (x,)).module()(x), expected)


def test_has_no_derivative() -> None:
    packed = lltm.LLTM(**SIZES).prepack()
    assert not packed(torch.randn(3, 2, 5))[0].requires_grad
    output, _ = packed(torch.randn(3, 2, 5, requires_grad=True))
    with pytest.raises(RuntimeError, match="derivative for lltm::sequence_prepacked"):
        output.sum().backward()


# ---- errors -----------------------------------------------------------------


def test_refuses_what_is_not_a_matrix_of_weights() -> None:
    with pytest.raises(TypeError, match="lltm::prepack: expected weights to be a tensor, got int"):
        lltm.functional.prepack(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lltm::prepack: expected weights of dtype .* got int64"):
        lltm.functional.prepack(torch.zeros(6, 5, dtype=torch.int64))
    for shape in ((6,), (7, 5), (6, 1), (6, 5, 2)):
        with pytest.raises(
            ValueError, match=r"lltm::prepack: expected weights of shape \(3H, H\+I"
        ):
            lltm.functional.prepack(torch.zeros(shape))


@pytest.mark.parametrize("other", [d for d in DTYPES if d != torch.float32], ids=str)
def test_refuses_weights_of_another_dtype(other: torch.dtype) -> None:
    a = support.sequence_arguments((3, 4, 5, 17))
    with pytest.raises(TypeError, match="lltm::sequence_prepacked: expected weights"):
        lltm.functional.sequence_prepacked(
            a.input, (a.h, a.c), lltm.functional.prepack(a.weights.to(other)), a.bias
        )


@pytest.mark.parametrize("form", [None, torch.qint8], ids=str)
def test_refuses_weights_of_another_cell(form: torch.dtype | None) -> None:
    ops = torch.ops.lltm
    lltm_s, lstm_s, gru_s = (
        support.of_cell(cell, support.sequence_arguments((3, 4, 5, 17)))
        for cell in ("lltm", "lstm", "gru")
    )
    for a, other in ((lltm_s, gru_s), (lstm_s, lltm_s), (gru_s, lstm_s)):
        packed = ops.prepack(other.cell, other.weights, other.weight_hh, dtype=form)
        _, input, h, c, *_ = a.operands()
        expected = f"weights from prepack for the cell {a.cell}, got some for {other.cell}"
        with pytest.raises(ValueError, match=f"^lltm::sequence_prepacked: expected {expected}"):
            ops.sequence_prepacked(a.cell, input, h, c, packed)


@pytest.mark.parametrize("offset", [1, 8, 16])
@pytest.mark.parametrize("steps", [0, 3])
def test_bytes_may_lie_anywhere(offset: int, steps: int) -> None:
    a = support.sequence_arguments((steps, 4, 5, 17))
    packed = lltm.functional.prepack(a.weights)
    moved = torch.empty(packed.numel() + 64, dtype=torch.uint8)[offset:][: packed.numel()]
    moved.copy_(packed)
    expected, got = (
        lltm.functional.sequence_prepacked(a.input, (a.h, a.c), weights, a.bias)
        for weights in (packed, moved)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        (got[0], *got[1]), support.sequence_outputs(lltm.functional, a), rtol=1e-4, atol=1e-6
    )


def test_the_same_weights_give_the_same_bytes() -> None:
    weights = support.sequence_arguments((3, 4, 5, 33)).weights
    assert torch.equal(lltm.functional.prepack(weights), lltm.functional.prepack(weights))


def test_refuses_weights_without_data() -> None:
    with pytest.raises(NotImplementedError, match="lltm::prepack: expected weights with data"):
        lltm.LLTM(3, 5, device="meta").prepack()


def test_refuses_weights_packed_for_something_else() -> None:
    a = support.sequence_arguments((3, 4, 5, 17))
    packed = lltm.functional.prepack(a.weights)

    def run(weights: Tensor) -> None:
        lltm.functional.sequence_prepacked(a.input, (a.h, a.c), weights, a.bias)

    for shape in ((51, 23), (54, 22), (600, 205)):
        with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected weights"):
            run(lltm.functional.prepack(torch.zeros(shape)))
    with pytest.raises(TypeError, match="lltm::sequence_prepacked: expected weights"):
        run(lltm.functional.prepack(a.weights.double()))
    with pytest.raises(TypeError, match="lltm::sequence_prepacked: expected weights"):
        run(packed.to(torch.int32))
    for other in (
        packed[:-1],
        packed[1:],
        packed[:20],
        packed * 0,
        packed.view(1, -1),
        packed[::2],
    ):
        with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected weights from"):
            run(other)
    # Headers with numbers that no packed weights have.
    words = packed[:64].view(torch.int64)
    for place, value in (
        *((2, operand(value)) for value in (0, 15, 271)),
        *((5, value) for value in (0, 8, 2**62, 2**63 - 1)),
    ):
        forged = torch.cat([words, packed[64:].view(torch.int64)])
        forged[place] = value
        with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected weights from"):
            run(forged.view(torch.uint8))
        with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected weights from"):
            run(forged.view(torch.uint8)[:64])
    for place, value in ((3, -17), (3, 2**62), (4, -5), (4, 2**61)):
        forged = torch.cat([words, packed[64:].view(torch.int64)])
        forged[place] = value
        with pytest.raises(ValueError, match="got some for hidden size"):
            run(forged.view(torch.uint8))
    with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected h_0 of shape"):
        lltm.functional.sequence_prepacked(a.input, (a.h[:2], a.c), packed, a.bias)
    with pytest.raises(ValueError, match="lltm::sequence_prepacked: expected bias of shape"):
        lltm.functional.sequence_prepacked(a.input, (a.h, a.c), packed, a.c[0])


def operand(value: int) -> int:
    """The third word of a header of float32 weights with another kind of operands."""
    float32 = 6  # an at::ScalarType
    return float32 | value << 32


def sealed(packed: Tensor) -> Tensor:
    """With the checksum that belongs to these bytes, as packed_weights.cpp calculates it."""
    basis, prime, mask = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
    data = packed.numpy().tobytes()
    lanes = [basis] * 4
    for k, place in enumerate(range(64, len(data), 8)):
        word = int.from_bytes(data[place : place + 8], "little")
        lanes[k % 4] = (lanes[k % 4] ^ word) * prime & mask
    for place in range(0, 56, 8):
        lanes[0] = (lanes[0] ^ int.from_bytes(data[place : place + 8], "little")) * prime & mask
    checksum = basis
    for lane in lanes:
        checksum = (checksum ^ lane) * prime & mask
    whole = data[:56] + checksum.to_bytes(8, "little") + data[64:]
    return torch.tensor(list(whole), dtype=torch.uint8)


def test_headers_are_checked_where_the_checksum_is_right() -> None:
    a = support.sequence_arguments((3, 4, 5, 17))
    packed = lltm.functional.prepack(a.weights)
    assert torch.equal(sealed(packed), packed)
    # Of another kind, number of blocks or second part.
    forgeries = [(0, 2, operand(value)) for value in (0, 15, 271)]
    forgeries += [(0, 5, value) for value in (0, 3, -1, 2**62)]
    forgeries += [(0, 6, 64), (0, 6, len(packed)), (0, 6, -64)]
    if split_at := int(packed[:64].view(torch.int64)[6]):
        lstm = int.from_bytes(b"lstm", "little")
        forgeries += [(split_at, 1, lstm), (split_at, 2, operand(6))]
        forgeries += [(split_at, 3, 18), (split_at, 4, 6), (split_at, 5, 3)]
    for begin, place, value in forgeries:
        forged = packed.clone()
        forged[begin : begin + 64].view(torch.int64)[place] = value
        with pytest.raises(ValueError, match="got bytes that are not whole"):
            lltm.functional.sequence_prepacked(a.input, (a.h, a.c), sealed(forged), a.bias)


def change_by_numpy(packed: Tensor, place: int, value: int) -> None:
    packed.numpy()[place] = value


def change_by_data(packed: Tensor, place: int, value: int) -> None:
    packed.data[place] = value


def change_in_inference_mode(packed: Tensor, place: int, value: int) -> None:
    with torch.inference_mode():
        packed[place] = value


@pytest.mark.parametrize(
    "change", [change_by_numpy, change_by_data, change_in_inference_mode], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("form", [None, torch.qint8], ids=str)
def test_changes_that_no_version_counts(change: Any, form: torch.dtype | None) -> None:
    a = support.sequence_arguments((3, 6, 5, 70))

    def run(weights: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return lltm.functional.sequence_prepacked(a.input, (a.h, a.c), weights, a.bias)

    with torch.inference_mode(change is change_in_inference_mode):
        packed = lltm.functional.prepack(a.weights, form)
    run(packed)
    # Of the header, all are refused: also another number of blocks that there could be.
    for place in range(64):
        before = int(packed[place])
        for value in (before ^ 1, before ^ 16, before ^ 48, before ^ 255):
            change(packed, place, value)
            with pytest.raises((ValueError, TypeError), match="expected weights from prepack"):
                run(packed)
        change(packed, place, before)
        run(packed)
    # Of the rest, they are computed with; a copy, whose bytes nobody has read, is refused.
    for place in (64, len(packed) // 2, len(packed) - 1):
        change(packed, place, int(packed[place]) ^ 255)
        assert run(packed)[0].shape == (3, 6, 70)
        with pytest.raises(ValueError, match="got bytes that have changed since"):
            run(packed.clone())


# float32, and bfloat16 of a size that fills no four words at the end.
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 5, 33), torch.float32), ((2, 3, 1, 1), torch.bfloat16)], ids=str
)
def test_changed_bytes_are_refused(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    a = support.sequence_arguments(shape, dtype)
    packed = lltm.functional.prepack(a.weights)
    lltm.functional.sequence_prepacked(a.input, (a.h, a.c), packed, a.bias)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(packed), (200,), generator=generator).tolist()
    for place in [*range(64), *places, *range(len(packed) - 32, len(packed))]:
        for changed in (packed.clone(), packed):  # one never seen, and one that was
            changed[place] ^= 1 + place % 255
            with pytest.raises((ValueError, TypeError), match="expected weights from prepack"):
                lltm.functional.sequence_prepacked(a.input, (a.h, a.c), changed, a.bias)
        packed[place] ^= 1 + place % 255
    lltm.functional.sequence_prepacked(a.input, (a.h, a.c), packed, a.bias)
