"""Weights that are packed once: lltm.functional.prepack and lltm.PrepackedLLTM."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import DTYPES, LENGTHS, SEQUENCE_SHAPES, Arguments
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

SIZES: dict[str, Any] = {"input_size": 5, "hidden_size": 33}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "dropout": 0.5},
]


def prepacked(a: Arguments) -> tuple[Tensor, ...]:
    output, state = lltm.functional.sequence_prepacked(
        a.input,
        (a.h, a.c),
        lltm.functional.prepack(a.weights),
        a.bias,
        batch_sizes=a.batch_sizes,
        reverse=a.reverse,
    )
    return output, *state


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


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (3, 0, 2, 4)], ids=["T = 0", "B = 0"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_sequence_where_there_is_nothing_to_do(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    is_the_sequence(support.sequence_arguments(shape, dtype))


def test_weights_of_any_strides_are_packed() -> None:
    a = support.sequence_arguments((3, 4, 5, 17))
    is_the_sequence(a.with_argument("weights", a.weights.t().contiguous().t()))


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
    for name in ("hidden_size", "dropout", "_weights", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(packed, name, 3)


def test_copies_pickles_and_prints() -> None:
    packed = lltm.LLTM(**SIZES, num_layers=2).prepack()
    x = torch.randn(3, 2, 5)
    expected, _ = packed(x)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        torch.testing.assert_close(other(x)[0], expected, rtol=0, atol=0)
    assert repr(packed) == (
        "PrepackedLLTM(input_size=5, hidden_size=33, num_layers=2, batch_first=False,"
        " bidirectional=False)"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_works_on_a_machine_without_the_kernels_it_was_packed_for(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    packed = lltm.LLTM(**SIZES, dtype=dtype).prepack()
    x = torch.randn(3, 2, 5, dtype=dtype)
    (tmp_path / "packed").write_bytes(pickle.dumps((packed, x, packed(x)[0])))
    code = (
        "import pickle, sys, torch, lltm\n"
        "packed, x, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "torch.testing.assert_close(packed(x)[0], expected)\n"
    )
    run = support.run_python(
        "-c",
        code,
        str(tmp_path / "packed"),
        ATEN_CPU_CAPABILITY="default",
        ONEDNN_MAX_CPU_ISA="SSE41",
    )
    assert run.returncode == 0, run.stderr


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


@pytest.mark.parametrize("offset", [1, 8, 16])
@pytest.mark.parametrize("steps", [0, 3])
def test_bytes_may_lie_anywhere(offset: int, steps: int) -> None:
    a = support.sequence_arguments((steps, 4, 5, 17))
    packed = lltm.functional.prepack(a.weights)
    moved = torch.empty(packed.numel() + 64, dtype=torch.uint8)[offset:][: packed.numel()]
    moved.copy_(packed)
    output, state = lltm.functional.sequence_prepacked(a.input, (a.h, a.c), moved, a.bias)
    torch.testing.assert_close(
        (output, *state), support.sequence_outputs(lltm.functional, a), rtol=0, atol=0
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
    for place, value in ((2, 0), (2, 15), (2, 271), (5, 0), (5, 8), (5, 2**62), (5, 2**63 - 1)):
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
