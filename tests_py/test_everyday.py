"""Everyday uses of PyTorch modules."""

from __future__ import annotations

import copy
import re
import types
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import GATES
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lltm

T, B, I, H = 6, 4, 3, 5  # noqa: E741


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return sum((y.square().sum() for y in support.flat(module(x))), torch.zeros(()))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", [lltm.LLTMCell, lltm.LLTM])
def test_activation_checkpointing_gives_the_same_gradients(make: Any, use_reentrant: bool) -> None:
    module = make(I, H)
    plain, x = copy.deepcopy(module), torch.randn(B, I)
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
    shapes: dict[str, list[Any]] = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        shapes.setdefault(event.key, []).append(event.input_shapes[:8])
    state, weights = [B, H], [GATES * H, H + I]
    none: list[int] = []  # without shapes
    name, absent, bias = none, none, [GATES * H]
    for input in ([B, I], [T, B, I]):
        operands = [name, input, state, state, weights, absent, bias, absent]
        for operator in ("sequence", "sequence_forward", "sequence_backward"):
            assert operands in shapes[f"lltm::{operator}"]


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
    layer.checkpoint_steps = 4  # a second forward
    assert count(lambda: loss_of(layer, x).backward()) == 4 * forward
    layer.checkpoint_steps = 0
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
        if support.HAS_OWN_GEMM:  # otherwise, prepack copies heads as a matrix with zeros
            assert count(lambda: layer.prepack()(x)) == forward
    assert count(lambda: loss_of(layer, x).backward()) == 3 * forward


def test_the_flop_counter_counts_packed_sequences_layers_and_directions() -> None:
    rows = [torch.randn(n, I) for n in (5, 3, 1)]
    layer = lltm.LLTM(I, H, num_layers=2, bidirectional=True)
    per_row = 2 * GATES * H * (2 * (I + H) + 2 * (2 * H + H))
    with torch.no_grad():
        assert count(lambda: layer(pack_sequence(rows))) == 9 * per_row
    assert count(lambda: layer(pack_sequence(rows))[0].data.sum().backward()) == 27 * per_row


def test_a_reload_works_and_a_second_import_says_what_to_do(tmp_path: Path) -> None:
    code = """
import importlib, sys, lltm
importlib.reload(lltm)
for name in [name for name in sys.modules if name.startswith("lltm")]:
    del sys.modules[name]
print("reloaded")
import lltm
"""
    run = support.run_forked("-c", code, cwd=tmp_path, check=False)
    assert run.stdout == "reloaded\n"
    assert re.search("ImportError: lltm: its modules were .* restart Python$", run.stderr.strip())


@pytest.mark.parametrize("base", [lltm.GRU, lltm.LSTMCell, lltm.cells.cifg.Layer])
def test_dill_can_rebuild_a_subclass(base: Any) -> None:
    made: Any = type("Derived", (base,), {})
    # as dill does if another process lacks the class
    assert issubclass(types.new_class("Derived", made.__orig_bases__), base)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("heads", lltm.cells.cifg.Layer(3, 4)),
        ("heads", lltm.cells.cifg.Cell(3, 4, heads=4)),
        ("mode", lltm.GRU(3, 4)),
        ("nonlinearity", lltm.RNN(3, 4)),
        ("proj_size", lltm.LLTM(3, 4)),
        ("proj_size", lltm.LSTM(3, 4, proj_size=1)),
        ("bias", lltm.LSTMCell(3, 4)),
    ],
    ids=str,
)
def test_what_only_the_constructor_sets_cannot_be_set(name: str, module: Any) -> None:
    old = getattr(module, name)
    setattr(module, name, old)
    with pytest.raises(AttributeError, match=f"lltm::.*: cannot set {name}: the constructor"):
        setattr(module, name, 2)
    assert getattr(module, name) == old
