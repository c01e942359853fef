"""A whole sequence: lltm.functional.sequence, dense and packed, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import support
import torch
from support import DTYPES, LENGTHS, SEQUENCE_SHAPES, packed_arguments, sequence_arguments

import lltm


@pytest.mark.parametrize("shape", SEQUENCE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Every shape and every dtype in both directions, though not with each other."""
    reverse = (SEQUENCE_SHAPES.index(shape) + DTYPES.index(dtype)) % 2 == 1
    support.check_accuracy(
        support.sequence_outputs, lambda: sequence_arguments(shape, dtype, reverse=reverse)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference_without_bias(dtype: torch.dtype) -> None:
    support.check_accuracy(
        support.sequence_outputs, lambda: sequence_arguments((5, 3, 4, 7), dtype, bias=False)
    )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference_when_packed(
    dtype: torch.dtype, lengths: Sequence[int], reverse: bool
) -> None:
    support.check_accuracy(
        support.sequence_outputs, lambda: packed_arguments(lengths, dtype=dtype, reverse=reverse)
    )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_is_a_loop_over_the_cell(reverse: bool) -> None:
    a = sequence_arguments((6, 4, 3, 5), torch.float64, reverse=reverse)
    h, c = a.h, a.c
    outputs = [torch.empty(0)] * 6
    for t in reversed(range(6)) if reverse else range(6):
        h, c = lltm.functional.cell(a.input[t], (h, c), a.weights, a.bias)
        outputs[t] = h
    expected = torch.stack(outputs), h, c
    torch.testing.assert_close(support.sequence_outputs(lltm.functional, a), expected)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_rows_are_computed_as_if_alone(lengths: Sequence[int], reverse: bool) -> None:
    a = packed_arguments(lengths, dtype=torch.float64, reverse=reverse)
    output, h_n, c_n = support.sequence_outputs(lltm.functional, a)
    assert a.batch_sizes is not None
    first_rows = torch.cumsum(a.batch_sizes, 0) - a.batch_sizes
    for row, length in enumerate(lengths):
        rows = first_rows[:length] + row
        alone, (h, c) = lltm.functional.sequence(
            a.input[rows].unsqueeze(1),
            (a.h[row : row + 1], a.c[row : row + 1]),
            a.weights,
            a.bias,
            reverse=reverse,
        )
        torch.testing.assert_close(output[rows], alone.squeeze(1))
        torch.testing.assert_close((h_n[row], c_n[row]), (h.squeeze(0), c.squeeze(0)))


def test_packed_with_equal_lengths_is_the_dense_sequence() -> None:
    a = sequence_arguments((4, 3, 5, 7), torch.float64)
    output, state = lltm.functional.sequence(a.input, (a.h, a.c), a.weights, a.bias)
    packed_output, packed_state = lltm.functional.sequence(
        a.input.flatten(0, 1),
        (a.h, a.c),
        a.weights,
        a.bias,
        batch_sizes=torch.tensor([3, 3, 3, 3]),
    )
    torch.testing.assert_close(packed_output.view_as(output), output)
    torch.testing.assert_close(packed_state, state)


def test_batch_sizes_may_be_strided() -> None:
    a = packed_arguments((5, 3, 3, 1))
    assert a.batch_sizes is not None
    expected = support.sequence_outputs(lltm.functional, a)
    every_other = torch.stack([a.batch_sizes, torch.full_like(a.batch_sizes, 99)], dim=1)[:, 0]
    assert not every_other.is_contiguous()
    output, (h_n, c_n) = lltm.functional.sequence(
        a.input, (a.h, a.c), a.weights, a.bias, batch_sizes=every_other
    )
    torch.testing.assert_close((output, h_n, c_n), expected, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_values(threads: int) -> None:
    a = sequence_arguments((4, 70, 65, 64), torch.float64)
    expected = support.sequence_outputs(lltm.reference, a)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = support.sequence_outputs(lltm.functional, a)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("batch", [1, 4, 40])
def test_a_batch_first_layer_gives_what_the_other_gives(batch: int) -> None:
    layer = lltm.LLTM(33, 70)
    other = lltm.LLTM(33, 70, batch_first=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(9, batch, 33)
    torch.testing.assert_close(
        other(x.transpose(0, 1).contiguous())[0].transpose(0, 1), layer(x)[0], rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_reach_no_row_add_nothing_to_gradients(dtype: torch.dtype) -> None:
    """Of many rows, so that they are a chunk of their own."""
    a = support.sequence_arguments((1, 600, 5, 16), dtype)
    x = torch.randn(1200, 5, dtype=dtype)
    gradients = []
    for sizes in ([600, 600], [600, 600, 0]):
        leaves = replace(a, input=x, batch_sizes=torch.tensor(sizes)).leaves()
        output, *_ = support.sequence_outputs(lltm.functional, leaves)
        gradients.append(torch.autograd.grad(output.sum(), leaves.tensors()))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_turning_onednn_off_changes_nothing() -> None:
    layer = lltm.LLTM(32, 64, dtype=torch.bfloat16)
    x = torch.randn(5, 40, 32, dtype=torch.bfloat16, requires_grad=True)

    def results() -> tuple[torch.Tensor, ...]:
        output, _ = layer(x)
        return output, *torch.autograd.grad(output.sum(), (x, *layer.parameters()))

    expected = results()
    with torch.backends.mkldnn.flags(enabled=False):
        assert all(map(torch.equal, results(), expected))
