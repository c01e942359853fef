"""torch.library.opcheck for every operator: schema, autograd registration, fake tensors, AOT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import support
import torch
from support import DTYPES, Arguments
from torch import Tensor

import lltm  # noqa: F401  (registers the operators)

pytestmark = pytest.mark.xdist_group("compilers")

ops = torch.ops.lltm


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """The same values with the strides of another order of dimensions."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def every_other(tensor: Tensor) -> Tensor:
    """The same values with gaps between the elements."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def expanded(tensor: Tensor) -> Tensor:
    """Rows of one value each, with stride 0."""
    return tensor[..., :1].expand(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "every other": every_other,
    "expanded": expanded,
}

CELLS: dict[str, Callable[[torch.dtype], Arguments]] = {
    "bias": lambda dtype: support.cell_arguments((3, 2, 4), dtype),
    "no bias": lambda dtype: support.cell_arguments((3, 2, 4), dtype, bias=False),
    "no rows": lambda dtype: support.cell_arguments((0, 2, 4), dtype),
}

SEQUENCES: dict[str, Callable[[torch.dtype], Arguments]] = {
    "forward": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype),
    "reverse": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype, reverse=True),
    "no bias": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype, bias=False),
    "no steps": lambda dtype: support.sequence_arguments((0, 3, 2, 4), dtype),
}

PACKED: dict[str, Callable[[torch.dtype], Arguments]] = {
    "packed": lambda dtype: support.packed_arguments((4, 2, 1), 2, 4, dtype),
    "packed reverse": lambda dtype: support.packed_arguments((4, 2, 1), 2, 4, dtype, reverse=True),
}

# Every dtype, and every layout.
KINDS = [
    *((dtype, "contiguous") for dtype in DTYPES),
    *((torch.float32, layout) for layout in LAYOUTS if layout != "contiguous"),
]


def each(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Each case in each kind. Slow, but for the first case in every kind, and every case in one:
    what goes wrong in a graph is a matter of the case or of the kind."""
    first, *_ = cases
    return pytest.mark.parametrize(
        ("case", "dtype", "layout"),
        [
            pytest.param(
                case,
                dtype,
                layout,
                marks=()
                if case == first or (dtype, layout) == (torch.float32, "contiguous")
                else pytest.mark.slow,
            )
            for case in cases
            for dtype, layout in KINDS
        ],
        ids=str,
    )


def with_grad(a: Arguments, layout: str) -> Arguments:
    change = LAYOUTS[layout]
    return a.map(lambda tensor: change(tensor).detach().requires_grad_())


def opcheck(op: Any, arguments: tuple[Any, ...], **keywords: Any) -> None:
    assert set(torch.library.opcheck(op, arguments, keywords).values()) == {"SUCCESS"}


@each(CELLS)
def test_cell(case: str, dtype: torch.dtype, layout: str) -> None:
    a = with_grad(CELLS[case](dtype), layout)
    opcheck(ops.cell.default, (a.input, a.h, a.c, a.weights, a.bias))


each_saving = pytest.mark.parametrize(
    "checkpoint_steps", [0, 2], ids=["activations", "checkpoints"]
)


@each_saving
@each(SEQUENCES | PACKED)
def test_sequence(case: str, dtype: torch.dtype, layout: str, checkpoint_steps: int) -> None:
    a = with_grad((SEQUENCES | PACKED)[case](dtype), layout)
    opcheck(
        ops.sequence.default,
        (a.input, a.h, a.c, a.weights, a.bias),
        batch_sizes=a.batch_sizes,
        reverse=a.reverse,
        checkpoint_steps=checkpoint_steps,
    )


# The kernels behind them have no derivative of their own, so arguments need none.


@each(CELLS)
def test_cell_forward(case: str, dtype: torch.dtype, layout: str) -> None:
    a = CELLS[case](dtype).map(LAYOUTS[layout])
    opcheck(ops.cell_forward.default, (a.input, a.h, a.c, a.weights, a.bias))


@each(CELLS)
def test_cell_backward(case: str, dtype: torch.dtype, layout: str) -> None:
    change = LAYOUTS[layout]
    a = CELLS[case](dtype).map(change)
    arguments = (a.input, a.h, a.c, a.weights, a.bias)
    *_, activations = ops.cell_forward(*arguments)
    grad_h, grad_c = change(torch.randn_like(a.h)), change(torch.randn_like(a.c))
    for grads, mask in (
        ((grad_h, grad_c), [True] * 5),
        ((None, grad_c), [True, False, True, False, True]),
        ((grad_h, None), [False, True, False, True, False]),
    ):
        opcheck(ops.cell_backward.default, (*arguments, activations, *grads, mask))


def arguments_of_forward(a: Arguments, checkpoint_steps: int) -> tuple[Any, ...]:
    return (a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, checkpoint_steps)


@each_saving
@each(SEQUENCES | PACKED)
def test_sequence_forward(
    case: str, dtype: torch.dtype, layout: str, checkpoint_steps: int
) -> None:
    a = (SEQUENCES | PACKED)[case](dtype).map(LAYOUTS[layout])
    opcheck(ops.sequence_forward.default, arguments_of_forward(a, checkpoint_steps))


@each_saving
@each(SEQUENCES | PACKED)
def test_sequence_backward(
    case: str, dtype: torch.dtype, layout: str, checkpoint_steps: int
) -> None:
    change = LAYOUTS[layout]
    a = (SEQUENCES | PACKED)[case](dtype).map(change)
    arguments = arguments_of_forward(a, checkpoint_steps)
    output, h_n, c_n, saved = ops.sequence_forward(*arguments)
    grads = [change(torch.randn_like(y)) for y in (output, h_n, c_n)]
    arguments = (*arguments, output, saved)
    opcheck(ops.sequence_backward.default, (*arguments, *grads, [True] * 5))
    mask = [True, False, True, False, True]
    opcheck(ops.sequence_backward.default, (*arguments, None, grads[1], None, mask))


@each(SEQUENCES | PACKED)
def test_sequence_prepacked(case: str, dtype: torch.dtype, layout: str) -> None:
    a = (SEQUENCES | PACKED)[case](dtype).map(LAYOUTS[layout])
    opcheck(
        ops.sequence_prepacked,
        (a.input, a.h, a.c, ops.prepack(a.weights), a.bias),
        batch_sizes=a.batch_sizes,
        reverse=a.reverse,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepack(dtype: torch.dtype, layout: str) -> None:
    """But for fake tensors: what prepack gives depends on the machine."""
    weights = LAYOUTS[layout](support.cell_arguments((3, 2, 4), dtype).weights)
    utilities = ("test_schema", "test_autograd_registration")
    found = torch.library.opcheck(ops.prepack.default, (weights,), test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")
    with pytest.raises(NotImplementedError, match="lltm::prepack: expected weights with data"):
        ops.prepack(weights.to("meta"))
