"""torch.library.opcheck of every operator, with the calls of attack.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attack
import pytest
import support
import torch
from support import DTYPES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lltm

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
OPERATORS = ("step", "sequence", "sequence_forward", "sequence_backward")
BIASES = ("bias_ih", "bias_hh")
# The kernels of the other operators have no derivatives, nor have prepacked weights and masks.
DIFFERENTIABLE = ("input", "h", "c", "h_0", "c_0", "weight_ih", "weight_hh", *BIASES)
# Graph errors depend on the call, dtype, layout or omitted arguments, not on combinations.
KINDS = ("", "transposed", "expanded", "bfloat16", "no steps", "one matrix, no bias")
CASES = [("lltm", kind) for kind in KINDS]
CASES += [("gru", ""), (lltm.cells.peephole_lstm.text, "")]


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(("cell", "kind"), CASES, ids=lambda value: value.split("\n")[0])
def test_operators(cell: str, kind: str, op: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    change = LAYOUTS.get(kind, contiguous)
    for name, values in attack.calls_of(cell, dtype=dtype):
        if name != op:
            continue
        call = dict(zip(attack.names_of(op), values, strict=True))
        if kind == "one matrix, no bias" and call["weight_hh"] is not None:
            call["weight_ih"] = torch.cat([call["weight_hh"], call["weight_ih"]], 1)
            call |= dict.fromkeys(("weight_hh", *BIASES))
            call |= {"output_mask": [True] * 4 + [False] * 3} if "output_mask" in call else {}
        if kind == "no steps":
            if op == "step" or call["input"].dim() < 3:
                continue
            call |= {k: call[k][:0] for k in ("input", "reset") if call[k] is not None}
            if op == "sequence_backward":
                call |= {k: call[k][:0] for k in ("output", "saved", "grad_output")}
        is_packed = call["weight_ih"].dtype == torch.uint8
        for key, value in call.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                call[key] = change(value).detach()
                if op in ("step", "sequence") and key in DIFFERENTIABLE and not is_packed:
                    call[key].requires_grad_()
        calls = [call]
        if op == "sequence_backward":  # of some results, for some arguments
            some = [want and k % 2 == 0 for k, want in enumerate(call["output_mask"])]
            calls.append({**call, "grad_output": None, "grad_c_n": None, "output_mask": some})
        for arguments in calls:
            checked = torch.library.opcheck(getattr(ops, op).default, (), arguments)
            assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("checkpoint_steps", [0, 2])
def test_fake_cuda_tensors(checkpoint_steps: int) -> None:
    """batch_sizes is on the CPU. Sizes are dynamic. No GPU is needed."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    a = support.packed_arguments((4, 2, 1), 2, 4)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        sizes = mode.from_tensor(a.rest()["batch_sizes"])
        a = a.map(lambda tensor: torch.empty_like(mode.from_tensor(tensor), device="cuda"))
        arguments = (*a.operands(), sizes, a.reverse, None, checkpoint_steps, None)
        output, h_n, c_n, saved = results = ops.sequence_forward(*arguments)
        gradients = (output, saved, output, h_n, c_n, a.wanted())
        results += ops.sequence(*arguments) + ops.sequence_backward(*arguments, *gradients)
    assert {y.device.type for y in results if y is not None} == {"cuda"}


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
