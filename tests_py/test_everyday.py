"""Everyday uses of PyTorch modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import support
import torch
from support import GATES
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lltm

T, B, I, H = 6, 4, 3, 5  # noqa: E741

MODULES = {"cell": lltm.LLTMCell, "layer": lltm.LLTM}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> Any:
    return MODULES[request.param](I, H)


def input_of(module: nn.Module) -> Tensor:
    return torch.randn(B, I) if isinstance(module, lltm.LLTMCell) else torch.randn(T, B, I)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return sum((y.square().sum() for y in support.flat(module(x))), torch.zeros(()))


def weights_of(module: Any) -> nn.Parameter:
    parameter = module.weights if isinstance(module, lltm.LLTMCell) else module.weights_l0
    assert isinstance(parameter, nn.Parameter)
    return parameter


def test_weight_norm_trains_through_the_parametrization(module: nn.Module) -> None:
    name, _ = next(module.named_parameters())
    x = input_of(module)
    expected = loss_of(module, x)
    nn.utils.parametrizations.weight_norm(module, name)
    loss = loss_of(module, x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    parts = [p for key, p in module.named_parameters() if key.startswith("parametrizations")]
    assert len(parts) == 2
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in parts)
    with torch.no_grad():
        parts[0].mul_(2)  # magnitude
    assert not torch.isclose(loss_of(module, x), expected)


def test_shared_memory_holds_the_parameters(module: nn.Module) -> None:
    x = input_of(module)
    expected = module(x)
    assert module.share_memory() is module
    assert all(p.is_shared() for p in module.parameters())
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    loss_of(module, x).backward()


def test_hooks_see_the_call_and_the_gradients(module: nn.Module) -> None:
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    weights_of(module).register_hook(lambda grad: 2 * grad)
    weights_of(module).register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    plain = type(module)(I, H)
    plain.load_state_dict(module.state_dict())
    x = input_of(module)
    loss_of(module, x.clone().requires_grad_()).backward()
    loss_of(plain, x).backward()
    assert seen[:2] == ["before", "after"]
    assert sorted(seen[2:]) == ["accumulated", "backward"]
    grad = weights_of(plain).grad
    assert grad is not None
    torch.testing.assert_close(weights_of(module).grad, 2 * grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(
    module: nn.Module, use_reentrant: bool
) -> None:
    plain = copy.deepcopy(module)
    x = input_of(module)
    calls: list[None] = []
    module.register_forward_hook(lambda *_: calls.append(None))
    leaf = x.clone().requires_grad_()
    checkpoint(loss_of, module, leaf, use_reentrant=use_reentrant).backward()
    assert len(calls) == 2  # forward, and recomputed in backward
    expected = x.clone().requires_grad_()
    loss_of(plain, expected).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# PyTorch 2.11 warns once.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_the_profiler_names_the_operators_with_their_shapes() -> None:
    layer, cell = lltm.LLTM(I, H), lltm.LLTMCell(I, H)
    x = torch.randn(T, B, I)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        (loss_of(layer, x) + loss_of(cell, x[0])).backward()
        with torch.no_grad():
            layer(x)
    shapes = {
        event.key: event.input_shapes
        for event in profiler.key_averages(group_by_input_shape=True)
        if event.key.startswith("lltm::")
    }
    state, weights = [B, H], [GATES * H, H + I]
    none: list[int] = []  # without shapes
    name, absent, bias = none, none, [GATES * H]
    for operators, input in (("step", [B, I]), ("sequence", [T, B, I])):
        operands = [name, input, state, state, weights, absent, bias, absent]
        for operator in (operators, f"{operators}_forward", f"{operators}_backward"):
            assert shapes[f"lltm::{operator}"][:8] == operands


def count(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    total: int = counter.get_total_flops()
    return total


FORWARD_FLOPS = 2 * T * B * (I + H) * GATES * H


@pytest.mark.parametrize(("cls", "gates"), [(lltm.LLTM, GATES), (lltm.LSTM, 4), (lltm.GRU, 3)])
def test_the_flop_counter_counts_the_gemms_of_a_layer(cls: Any, gates: int) -> None:
    layer, x = cls(I, H), torch.randn(T, B, I)
    forward = FORWARD_FLOPS // GATES * gates
    with torch.no_grad():
        assert count(lambda: layer(x)) == forward
        assert count(lambda: layer.prepack()(x)) == forward
    # Backward: gradients of the weights, and of input and states.
    assert count(lambda: loss_of(layer, x).backward()) == 3 * forward
    assert count(lambda: loss_of(layer, x.requires_grad_()).backward()) == 3 * forward
    layer.requires_grad_(False)
    assert count(lambda: loss_of(layer, x).backward()) == 2 * forward


def test_the_flop_counter_counts_heads_and_no_given_columns() -> None:
    @lltm.cell(gates=("a", "b"), reads={"a": ("input", "h")})
    def cell(z: Any) -> Any:
        return torch.tanh(z.a) + z.b

    layer, x = cell.Layer(I + 64, 64, heads=2), torch.randn(T, B, I + 64)
    forward = 2 * T * B * (64 * I + 2 * 64 * 32)
    with torch.no_grad():
        assert count(lambda: layer(x)) == forward
        assert count(lambda: layer.prepack()(x)) == forward
    assert count(lambda: loss_of(layer, x).backward()) == 3 * forward


def test_the_flop_counter_counts_the_gemms_of_a_cell() -> None:
    cell, x = lltm.LLTMCell(I, H), torch.randn(B, I)
    one = FORWARD_FLOPS // T
    with torch.no_grad():
        assert count(lambda: cell(x)) == one
    assert count(lambda: loss_of(cell, x).backward()) == 2 * one
    assert count(lambda: loss_of(cell, x.requires_grad_()).backward()) == 3 * one


def test_the_flop_counter_counts_packed_sequences_layers_and_directions() -> None:
    rows = [torch.randn(n, I) for n in (5, 3, 1)]
    layer = lltm.LLTM(I, H, num_layers=2, bidirectional=True)
    per_row = 2 * GATES * H * (2 * (I + H) + 2 * (2 * H + H))
    with torch.no_grad():
        assert count(lambda: layer(pack_sequence(rows))) == 9 * per_row
    assert count(lambda: layer(pack_sequence(rows))[0].data.sum().backward()) == 27 * per_row


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_run_the_layer(start: str) -> None:
    layer, inputs = lltm.LLTM(I, H), torch.randn(6, T, I)
    with torch.no_grad():
        # Runs before the workers start, because forks inherit the state of this process.
        expected = layer(inputs.transpose(0, 1))[0].transpose(0, 1)
    loader = DataLoader(
        support.Encoded(layer, inputs),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=start,
        timeout=60,
    )
    torch.testing.assert_close(torch.cat(list(loader)), expected)
