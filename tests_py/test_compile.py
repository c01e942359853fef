"""torch.compile without a graph break, torch.export, and the decompositions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import lltm

MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "cell": lambda: (lltm.LLTMCell(3, 5), torch.randn(4, 3)),
    "cell, one row": lambda: (lltm.LLTMCell(3, 5), torch.randn(3)),
    "layer": lambda: (lltm.LLTM(3, 5), torch.randn(6, 4, 3)),
    "layers and directions": lambda: (
        lltm.LLTM(3, 5, num_layers=2, bidirectional=True, batch_first=True),
        torch.randn(4, 6, 3),
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def flat(results: Any) -> list[Tensor]:
    leaves: list[Tensor] = torch.utils._pytree.tree_leaves(results)
    return leaves


# aot_eager: the graph, its fake tensors and its joint backward, without the time that generating
# code takes. One test of each kind uses the default backend.


@pytest.mark.parametrize("name", MODULES)
def test_inference_compiles_without_a_graph_break(name: str) -> None:
    module, x = MODULES[name]()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(flat(compiled(x)), flat(module(x)))


@pytest.mark.parametrize("name", MODULES)
def test_a_training_step_compiles_without_a_graph_break(name: str) -> None:
    module, x = MODULES[name]()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for run in (compiled, plain):
        sum(y.square().sum() for y in flat(run(x))).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [p.grad for p in plain.parameters()]
    )


@pytest.mark.parametrize("name", ["cell", "layer"])
def test_a_training_step_compiles_with_the_default_backend(name: str) -> None:
    module, x = MODULES[name]()
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True)
    for run in (compiled, plain):
        sum(y.square().sum() for y in flat(run(x))).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [p.grad for p in plain.parameters()]
    )


def test_one_graph_serves_every_length_and_batch_size() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for steps, batch in ((6, 4), (7, 4), (9, 3), (2, 8)):
        x = torch.randn(steps, batch, 3)
        state = torch.randn(2, batch, 5), torch.randn(2, batch, 5)
        torch.testing.assert_close(flat(compiled(x, state)), flat(layer(x, state)))
        frames.append(counter.frame_count)
    # The compiler may start over in the first call, for reasons of its own.
    assert frames == [frames[0]] * 4


def test_errors_in_a_compiled_graph_are_ours() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, h: Tensor, c: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return lltm.functional.cell(x, (h, c), weights)

    with pytest.raises(Exception, match=r"lltm::cell: expected h of shape \(4, 5\), got \(4, 6\)"):
        step(torch.randn(4, 3), torch.randn(4, 6), torch.randn(4, 5), torch.randn(15, 8))


# ----- export ----------------------------------------------------------------


def targets(program: torch.export.ExportedProgram) -> set[Any]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", MODULES)
def test_an_exported_module_calls_our_operators(name: str) -> None:
    module, x = MODULES[name]()
    program = torch.export.export(module, (x,))
    ours = torch.ops.lltm.cell.default if "cell" in name else torch.ops.lltm.sequence.default
    assert ours in targets(program)
    torch.testing.assert_close(flat(program.module()(x)), flat(module(x)))


@pytest.mark.parametrize("name", MODULES)
def test_an_exported_module_decomposes_into_core_aten(name: str) -> None:
    module, x = MODULES[name]()
    program = torch.export.export(module, (x,)).run_decompositions(lltm.decompositions())
    operators = [t for t in targets(program) if isinstance(t, torch._ops.OpOverload)]
    assert {op.namespace for op in operators} == {"aten"}
    assert [op for op in operators if torch.Tag.core not in op.tags] == []
    torch.testing.assert_close(flat(program.module()(x)), flat(module(x)))


def test_a_sequence_of_dynamic_length_stays_whole_in_an_exported_program() -> None:
    layer = lltm.LLTM(3, 5)
    steps = torch.export.Dim("steps", min=2)
    program = torch.export.export(layer, (torch.randn(6, 4, 3),), dynamic_shapes=({0: steps},))
    program = program.run_decompositions(lltm.decompositions())
    assert torch.ops.lltm.sequence.default in targets(program)
    x = torch.randn(9, 4, 3)
    torch.testing.assert_close(flat(program.module()(x)), flat(layer(x)))


# ----- decompositions --------------------------------------------------------


def test_the_table_is_the_default_one_with_every_operator_of_ours() -> None:
    table = lltm.decompositions()
    default = torch.export.default_decompositions()
    assert set(default) <= set(table)
    # Every operator of the namespace, as the dispatcher knows it, but those of prepacked weights,
    # which only our kernels can read.
    names = {
        name.removeprefix("lltm::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("lltm::") and "prepack" not in name
    }
    assert {op for op in table if getattr(op, "namespace", "") == "lltm"} == {
        getattr(torch.ops.lltm, name).default for name in names
    }


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("batch", [4, 0])
def test_decomposed_cells_agree_with_the_operators(batch: int, bias: bool) -> None:
    table, ops = lltm.decompositions(), torch.ops.lltm
    a = support.cell_arguments((batch, 3, 5), torch.float64, bias)
    arguments = (a.input, a.h, a.c, a.weights, a.bias)
    torch.testing.assert_close(table[ops.cell.default](*arguments), ops.cell(*arguments))
    saved = ops.cell_forward(*arguments)
    torch.testing.assert_close(table[ops.cell_forward.default](*arguments), saved)
    for grads in ((a.h, a.c), (None, a.c), (a.h, None)):
        for mask in (
            [True] * 5,
            [True, False, True, False, True],
            [False, True, False, True, False],
        ):
            backward = (*grads, a.input, a.h, a.weights, saved[2], mask)
            ours, expected = (
                table[ops.cell_backward.default](*backward),
                ops.cell_backward(*backward),
            )
            assert [y is None for y in ours] == [not wanted for wanted in mask]
            torch.testing.assert_close(
                [y for y in ours if y is not None], [y for y in expected if y is not None]
            )


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("steps", [6, 1, 0])
def test_decomposed_sequences_agree_with_the_operators(steps: int, reverse: bool) -> None:
    table, ops = lltm.decompositions(), torch.ops.lltm
    a = support.sequence_arguments((steps, 4, 3, 5), torch.float64, reverse=reverse)
    arguments = (a.input, a.h, a.c, a.weights, a.bias)
    torch.testing.assert_close(
        table[ops.sequence.default](*arguments, reverse=reverse),
        ops.sequence(*arguments, reverse=reverse),
    )
    saved = ops.sequence_forward(*arguments, None, reverse)
    torch.testing.assert_close(
        table[ops.sequence_forward.default](*arguments, None, reverse), saved
    )
    output, h_n, c_n, activations = saved
    for grads in ((output, h_n, c_n), (None, h_n, None), (output, None, c_n)):
        backward = (*grads, a.input, a.h, a.weights, output, activations, None, reverse, [True] * 5)
        torch.testing.assert_close(
            table[ops.sequence_backward.default](*backward), ops.sequence_backward(*backward)
        )


def test_a_packed_sequence_is_not_decomposed() -> None:
    table, ops = lltm.decompositions(), torch.ops.lltm
    a = support.packed_arguments((3, 2, 1))
    result = table[ops.sequence.default](
        a.input, a.h, a.c, a.weights, a.bias, batch_sizes=a.batch_sizes
    )
    assert result is NotImplemented
