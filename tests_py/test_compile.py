"""torch.compile without graph breaks, by kernels and decompositions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forms import MODULES
from support import flat
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm

pytestmark = pytest.mark.xdist_group("compilers")


def packed(lengths: list[int]) -> PackedSequence:
    padded = torch.randn(max(lengths), len(lengths), 3)
    return pack_padded_sequence(padded, torch.tensor(lengths), enforce_sorted=False)


# Compiler imports are local, because every worker imports this file.


def counting() -> Any:
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


def with_code(run: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """A compiled function's result, and Inductor's code."""
    from torch._inductor.utils import run_and_get_code

    results, sources = run_and_get_code(run, *arguments)
    return results, list(sources)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("sizes", [6, [[2, 2], [1, 1]]], ids=str)
def test_batch_sizes_of_another_shape_are_named(sizes: Any) -> None:
    run = torch.compile(lltm.GRU(3, 5), backend="eager")
    with pytest.raises((ValueError, RuntimeError), match=r": expected batch_sizes of shape \("):
        run(PackedSequence(torch.randn(6, 3), torch.tensor(sizes)))


def train(run: Callable[..., Any], module: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(1)  # dropout
    module.zero_grad()
    # The leaves of a PackedSequence include None and indices.
    leaves: list[Tensor | None] = [*flat(run(*arguments))]
    results = [y for y in leaves if y is not None and y.is_floating_point()]
    sum(y.square().sum() for y in results).backward()  # type: ignore[union-attr]
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    assert len(gradients) == len(list(module.parameters()))
    return [y.detach() for y in results] + gradients


# aot_eager skips slow code generation. One test of each kind uses the default backend.


@pytest.mark.parametrize("name", MODULES)
def test_a_training_step_compiles_without_a_graph_break(name: str) -> None:
    module, arguments = MODULES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(train(compiled, module, arguments), train(module, module, arguments))


@pytest.mark.parametrize(
    ("cls", "training", "checkpoint_steps"),
    [(lltm.LLTM, False, 0), (lltm.LLTM, True, 0), (lltm.LLTM, True, 4), (lltm.GRU, True, 0)],
)
def test_one_graph_serves_every_length_and_batch_size(
    cls: Any, training: bool, checkpoint_steps: int
) -> None:
    layer = cls(3, 5, num_layers=2, checkpoint_steps=checkpoint_steps)
    counter = counting()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    run: Any = compiled
    # Several segments of checkpoints: the compiler specializes size 1.
    for steps, batch in ((6, 4), (7, 4), (9, 3), (5 if checkpoint_steps else 2, 8)):
        h, c = torch.randn(2, 2, batch, 5)
        arguments = (torch.randn(steps, batch, 3), h if cls is lltm.GRU else (h, c))
        with torch.set_grad_enabled(training):
            if training:
                results = train(compiled, layer, arguments), train(layer, layer, arguments)
            else:
                results = flat(run(*arguments)), flat(layer(*arguments))
        torch.testing.assert_close(*results)
        frames.append(counter.frame_count)
    # The compiler may restart in the first call.
    assert frames == [frames[0]] * 4


def test_a_loop_over_steps_compiles_the_cell_only_for_the_first_steps() -> None:
    cell = lltm.LLTMCell(3, 5)
    counter = counting()
    compiled = torch.compile(cell, fullgraph=True, backend=counter)
    frames: list[int] = []
    state: Any = None
    expected: Any = None
    for x in torch.randn(6, 4, 3):
        state, expected = compiled(x, state), cell(x, expected)
        frames.append(counter.frame_count)
    # The first step has no state.
    assert frames == [1, 2, 2, 2, 2, 2]
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(
        torch.autograd.grad(state[0].sum(), cell.weights),
        torch.autograd.grad(expected[0].sum(), cell.weights),
    )


def test_packed_sequences_of_other_lengths_compile_once_more_at_most() -> None:
    layer = lltm.LLTM(3, 5)
    counter = counting()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for lengths in ([6, 3, 5], [2, 7, 7, 4], [3, 2], [8, 9]):
        x = packed(lengths)
        torch.testing.assert_close(flat(compiled(x)), flat(layer(x)))
        frames.append(counter.frame_count)
    # torch.compile may try a float attribute as a symbol, then as a constant.
    assert frames[0] <= 2
    assert frames[1] <= frames[0] + 1
    assert frames[2:] == [frames[1]] * 2


@pytest.mark.parametrize("name", ["cell", "two directions", "packed"])
def test_compiled_autograd_traces_backward_without_a_graph_break(name: str) -> None:
    from torch._dynamo import compiled_autograd

    layer = lltm.LLTM(3, 5, num_layers=2, bidirectional=name == "two directions")
    module: nn.Module = lltm.LLTMCell(3, 5) if name == "cell" else layer
    x: Any = packed([6, 3, 5]) if name == "packed" else torch.randn(4, 3)
    gradients = []
    for context in (
        nullcontext(),
        compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)),
    ):
        with context:
            loss = sum(y.square().sum() for y in flat(module(x)) if y.is_floating_point())
            assert isinstance(loss, Tensor)
            gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_errors_in_a_compiled_graph_are_those_of_lltm(dynamic: bool) -> None:
    """Also with symbolic sizes.

    Fake tensors would prefer a decomposition to a Meta kernel.
    """

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def run(x: Tensor, h: Tensor, c: Tensor, weights: Tensor) -> Any:
        return lltm.functional.sequence("lltm", x, (h, c), weights)

    expected = r"\(s\d+, .*\), got \(s\d+, s\d+\)" if dynamic else r"\(4, 5\), got \(4, 6\)"
    with pytest.raises(RuntimeError, match=f"lltm::sequence: expected c_0 of shape {expected}"):
        run(torch.randn(6, 4, 3), torch.randn(4, 5), torch.randn(4, 6), torch.randn(15, 8))


def generated(
    backend: Any, module: nn.Module, x: Tensor, dynamic: bool = False, fullgraph: bool = True
) -> list[str]:
    """Returns the forward and backward code."""
    torch.compiler.reset()
    x = x.detach().clone().requires_grad_()
    compiled = torch.compile(module, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    results, sources = with_code(train, compiled, module, (x,))
    torch.testing.assert_close(results, train(module, module, (x,)))
    assert len(sources) == 2
    return sources


def test_the_default_backend_works_where_ci_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI, Inductor rejects operators in torch's decomposition table."""
    from torch._inductor.lowering import lowerings

    monkeypatch.setenv("CI", "true")
    for op in [op for op in lowerings if getattr(op, "namespace", "") == "lltm"]:
        monkeypatch.delitem(lowerings, op)
    forward, backward = generated("inductor", lltm.LLTM(3, 5), torch.randn(6, 4, 3))
    assert "torch.ops.lltm.sequence_forward" in forward
    assert "torch.ops.lltm.sequence_backward" in backward


def test_inductor_calls_our_kernels_or_fuses_the_decomposition_of_a_cell() -> None:
    cell, x = lltm.LLTMCell(3, 5), torch.randn(4, 3)
    forward, backward = generated("inductor", cell, x)
    assert "torch.ops.lltm.sequence_forward" in forward
    assert "torch.ops.lltm.sequence_backward" in backward
    # The same model must not use a cached graph.
    sources = generated(lltm.inductor_decomposed, cell, x)
    assert not any("torch.ops.lltm." in source for source in sources)
    assert "tanh" in sources[0]


@pytest.mark.slow  # generates two C++ programs
def test_inductor_makes_a_loop_of_a_decomposed_layer_with_dynamic_sizes() -> None:
    layer = lltm.LLTM(3, 5, bidirectional=True)
    # Settings differ without fullgraph=True.
    x = torch.randn(6, 4, 3)
    sources = generated(lltm.inductor_decomposed, layer, x, dynamic=True, fullgraph=False)
    assert not any("torch.ops.lltm." in source for source in sources)
    assert all("while_loop" in source for source in sources)


@pytest.mark.slow  # generates three C++ programs
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_inductor_makes_a_loop_of_a_decomposed_function_with_dynamic_sizes(training: bool) -> None:
    """Weights that are arguments have symbolic sizes too."""
    sizes = ((4, 3, 5), (3, 7), (3, 7), (21, 12), (21,))
    arguments = [torch.randn(*size, requires_grad=training) for size in sizes]

    def run(x: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor) -> Any:
        return lltm.functional.sequence("lltm", x, (h, c), weights, bias_ih=bias, reverse=True)

    compiled = torch.compile(run, backend=lltm.inductor_decomposed, fullgraph=True, dynamic=True)
    results, expected = (flat(f(*arguments)) for f in (compiled, run))
    torch.testing.assert_close(results, expected)
    if training:
        gradients = [
            torch.autograd.grad(sum(y.square().sum() for y in ys), arguments)  # type: ignore[arg-type]
            for ys in (results, expected)
        ]
        torch.testing.assert_close(*gradients)
