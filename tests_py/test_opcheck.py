"""torch.library.opcheck of every operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import attack
import pytest
import support
import torch
from support import DTYPES, Arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lltm  # noqa: F401  (registers the operators)

pytestmark = pytest.mark.xdist_group("compilers")

ops = torch.ops.lltm


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """The same values with transposed strides."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(tensor: Tensor) -> Tensor:
    """One value per row, with stride 0."""
    return tensor[..., :1].expand(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "expanded": expanded,
}

STEPS: dict[str, Callable[[torch.dtype], Arguments]] = {
    "bias": lambda dtype: support.cell_arguments((3, 2, 4), dtype),
    "gru": lambda dtype: support.of_cell("gru", support.cell_arguments((3, 2, 4), dtype)),
    "no bias": lambda dtype: support.cell_arguments((3, 2, 4), dtype, bias=False),
    "no rows": lambda dtype: support.cell_arguments((0, 2, 4), dtype),
}

SEQUENCES: dict[str, Callable[[torch.dtype], Arguments]] = {
    "step, masks": lambda dtype: support.with_masks(STEPS["gru"](dtype)),
    "forward": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype),
    "reverse": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype, reverse=True),
    "lstm, masks": lambda dtype: support.with_masks(
        support.of_cell("lstm", support.sequence_arguments((5, 3, 2, 4), dtype))
    ),
    "no bias": lambda dtype: support.sequence_arguments((5, 3, 2, 4), dtype, bias=False),
    "no steps": lambda dtype: support.sequence_arguments((0, 3, 2, 4), dtype),
}

PACKED: dict[str, Callable[[torch.dtype], Arguments]] = {
    "packed": lambda dtype: support.packed_arguments((4, 2, 1), 2, 4, dtype),
    "packed gru, masks": lambda dtype: support.with_masks(
        support.of_cell("gru", PACKED["packed"](dtype))
    ),
    "packed reverse": lambda dtype: support.packed_arguments((4, 2, 1), 2, 4, dtype, reverse=True),
}

PLAIN = (torch.float32, "contiguous")
# A widened dtype; reordered and zero strides.
KINDS = ((torch.bfloat16, "contiguous"), (torch.float32, "transposed"), (torch.float32, "expanded"))


def each(cases: Iterable[str], saving: bool = False) -> pytest.MarkDecorator:
    """Tests all cases, the first in other kinds and, if `saving`, two with activation checkpoints.

    Graph errors depend on case, kind or saved values, not on combinations.
    """
    first, *others = cases
    params: list[tuple[Any, ...]] = [(case, *PLAIN) for case in (first, *others)]
    params += [(first, *kind) for kind in KINDS]
    names: tuple[str, ...] = ("case", "dtype", "layout")
    if saving:
        names = (*names, "checkpoint_steps")
        params = [(*p, 0) for p in params] + [(c, *PLAIN, 2) for c in (first, "packed gru, masks")]
    return pytest.mark.parametrize(names, params, ids=str)


def with_grad(a: Arguments, layout: str) -> Arguments:
    change = LAYOUTS[layout]
    return a.map(lambda tensor: change(tensor).detach().requires_grad_())


def opcheck(op: Any, arguments: tuple[Any, ...], **keywords: Any) -> None:
    assert set(torch.library.opcheck(op, arguments, keywords).values()) == {"SUCCESS"}


@each(STEPS)
def test_step(case: str, dtype: torch.dtype, layout: str) -> None:
    a = with_grad(STEPS[case](dtype), layout)
    opcheck(ops.step.default, a.operands())


@each(SEQUENCES | PACKED, saving=True)
def test_sequence(case: str, dtype: torch.dtype, layout: str, checkpoint_steps: int) -> None:
    a = with_grad((SEQUENCES | PACKED)[case](dtype), layout)
    opcheck(ops.sequence.default, a.operands(), **a.rest(), checkpoint_steps=checkpoint_steps)


# The kernels of these operators have no derivatives.

# Required gradients of input, states, weights and biases.
SOME = (True, False, True, False, True, True, False)


def check_sequence_operators(
    a: Arguments, checkpoint_steps: int, change: Callable[[Tensor], Tensor] = contiguous
) -> None:
    operands = a.map(change).operands()
    options = a.batch_sizes, a.reverse, a.reset, checkpoint_steps, a.recurrent_mask
    arguments = (*operands, *options)
    opcheck(ops.sequence_forward.default, arguments)
    output, h_n, c_n, saved = ops.sequence_forward(*arguments)
    grads = [change(torch.randn_like(y)) for y in (output, h_n, c_n)]
    arguments = (*arguments, output, saved)
    opcheck(ops.sequence_backward.default, (*arguments, *grads, a.wanted()))
    some = (*arguments, None, grads[1], None, a.wanted(SOME))
    opcheck(ops.sequence_backward.default, some)


@each(SEQUENCES | PACKED, saving=True)
def test_sequence_forward_and_backward(
    case: str, dtype: torch.dtype, layout: str, checkpoint_steps: int
) -> None:
    a = (SEQUENCES | PACKED)[case](dtype)
    check_sequence_operators(a, checkpoint_steps, LAYOUTS[layout])


@pytest.mark.parametrize("checkpoint_steps", [0, 2])
@pytest.mark.parametrize("case", PACKED)
def test_fake_cuda_tensors(case: str, checkpoint_steps: int) -> None:
    """batch_sizes is on the CPU. Sizes are dynamic. No GPU is needed."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    a = PACKED[case](torch.float32)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        sizes = mode.from_tensor(a.rest()["batch_sizes"])
        a = a.map(lambda tensor: torch.empty_like(mode.from_tensor(tensor), device="cuda"))
        arguments = (*a.operands(), sizes, a.reverse, None, checkpoint_steps, None)
        output, h_n, c_n, saved = results = ops.sequence_forward(*arguments)
        gradients = (output, saved, output, h_n, c_n, a.wanted())
        results += ops.sequence(*arguments) + ops.sequence_backward(*arguments, *gradients)
    assert {y.device.type for y in results if y is not None} == {"cuda"}


@each([case for case in SEQUENCES | PACKED if case != "step, masks"])
def test_sequence_of_prepacked_weights(case: str, dtype: torch.dtype, layout: str) -> None:
    a = (SEQUENCES | PACKED)[case](dtype).map(LAYOUTS[layout])
    _, _, _, c, *_ = a.operands()
    packed = ops.prepack(a.cell, a.weights, a.weight_hh)
    opcheck(
        ops.sequence.default,
        (a.cell, a.input, a.h, c, packed, None, a.bias, a.bias_hh),
        batch_sizes=a.batch_sizes,
        reverse=a.reverse,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepack(dtype: torch.dtype, layout: str) -> None:
    """The packed form depends on the CPU: no fake tensors."""
    weights = LAYOUTS[layout](support.cell_arguments((3, 2, 4), dtype).weights)
    utilities = ("test_schema", "test_autograd_registration")
    found = torch.library.opcheck(ops.prepack.default, ("lltm", weights), test_utils=utilities)
    assert found == dict.fromkeys(utilities, "SUCCESS")
    with pytest.raises(NotImplementedError, match="lltm::prepack: expected weights with data"):
        ops.prepack("lltm", weights.to("meta"))


@pytest.mark.parametrize("cell", attack.CELLS, ids=lambda cell: cell.split()[0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_a_sequence_of_length_one(cell: str, dtype: torch.dtype) -> None:
    """With input (B, I) or (1, B, I), also masked and with checkpoints."""
    B, I, H = attack.B, attack.I, attack.H  # noqa: E741
    weights = attack.weights_of(cell, dtype=dtype)
    states = len(ops._cell(cell)[2])
    c = torch.rand(B, states * H, dtype=dtype) if states else None
    x, h, mask = (torch.rand(B, size, dtype=dtype) for size in (I, H, H))
    leaves = [t.requires_grad_() for t in (x, h, c, *weights) if t is not None]
    reset = torch.tensor([True, False, True, False])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    grads: list[Tensor] = []
    for masked, checkpoint_steps in itertools.product((False, True), (0, 1)):
        found = []
        for steps in ((), (1,)):
            given = (reset.expand(*steps, B), mask) if masked else (None, None)
            options = None, False, given[0], checkpoint_steps, given[1]
            output, *last = ops.sequence(cell, x.expand(*steps, B, I), h, c, *weights, *options)
            assert output.shape[:-1] == ((1, B) if steps else ())
            results = [y for y in last if y.numel() > 0]
            grads = grads or [torch.randn_like(y) for y in results]
            found.append((*results, *torch.autograd.grad(results, leaves, grads)))
        torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)
