"""torch.export, Core ATen lowering, and AOTInductor without Python."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from forms import CUSTOM, MODULES
from support import flat
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lltm

pytestmark = pytest.mark.xdist_group("compilers")

SIZES = ((6, 4), (9, 2), (2, 8), (3, 3), (1, 1))


def targets(graph: torch.fx.GraphModule) -> set[Any]:
    """Includes subgraphs."""
    graphs = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    return {node.target for g in graphs for node in g.graph.nodes if node.op == "call_function"}


def assert_core_aten(program: ExportedProgram, *allowed: Any) -> None:
    """Allows only Core ATen operators and scan."""
    found = targets(program.graph_module)
    operators = {t for t in found if isinstance(t, torch._ops.OpOverload)}
    assert {op.namespace for op in operators} == {"aten"}
    assert {op for op in operators if torch.Tag.core not in op.tags} <= {*allowed}
    others = {t for t in found if isinstance(t, torch._ops.HigherOrderOperator)}
    assert others <= {torch.ops.higher_order.scan}


def parameters_and_gradients(module: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    results = flat(run(x))
    loss = torch.stack([y.square().sum() for y in results]).sum()
    return [*results, *torch.autograd.grad(loss, list(module.parameters()))]


@functools.cache
def exported(name: str) -> tuple[nn.Module, tuple[Any, ...], ExportedProgram]:
    """A module, its arguments and exported program.

    Decomposing makes another program.
    """
    module, arguments = MODULES[name]()
    return module, arguments, torch.export.export(module, arguments)


@pytest.mark.parametrize(
    "name", [name for name in MODULES if "packed" not in name and "dropout" not in name]
)
def test_an_exported_module_calls_our_operators(name: str) -> None:
    module, arguments, program = exported(name)
    op = "layer_step" if "Cell" in name else "sequence" if name == "reverse" else "layer"
    assert getattr(torch.ops.lltm, op).default in targets(program.graph_module)
    torch.testing.assert_close(flat(program.module()(*arguments)), flat(module(*arguments)))


# Other options affect only the graph, tested above.
SOME = [
    *("LLTMCell, batch", "LLTM, batch first, layers and directions, state, no bias"),
    *("GRUCell, batch, state", "GRU, resets, layers and directions, state"),
    *("checkpoints, layers and directions", "bfloat16, batch", *CUSTOM),
]


@pytest.mark.parametrize("name", SOME)
def test_an_exported_module_decomposes_into_core_aten(name: str) -> None:
    module, arguments, program = exported(name)
    program = program.run_decompositions(support.decompositions())
    # torch.export inserts it where functions of parameters convert dtypes.
    allowed = [torch.ops.aten._assert_tensor_metadata.default] * (name == "hgrn")
    assert_core_aten(program, *allowed)
    assert torch.ops.higher_order.scan not in targets(program.graph_module)
    results, expected = flat(program.module()(*arguments)), flat(module(*arguments))
    # A decomposed bfloat16 step rounds more often than a kernel.
    tolerance = {"rtol": 0.0, "atol": 0.02} if "bfloat16" in name else {}
    torch.testing.assert_close(results, expected, **tolerance)  # type: ignore[arg-type]


def dynamic_program(module: nn.Module, batch_first: bool = False) -> ExportedProgram:
    """The input is (T, B, 3) or (B, T, 3)."""
    sizes = (
        {0: Dim("batch"), 1: Dim("steps")} if batch_first else {0: Dim("steps"), 1: Dim("batch")}
    )
    return torch.export.export(module, (torch.randn(6, 4, 3),), dynamic_shapes=(sizes,))


LAYERS: dict[str, dict[str, Any]] = {
    "one": {},
    "layers and directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_sequence_of_dynamic_length_decomposes_into_scan(options: dict[str, Any]) -> None:
    layer = lltm.LLTM(3, 5, **options)
    program = dynamic_program(layer, layer.batch_first)
    program = program.run_decompositions(support.decompositions())
    assert_core_aten(program)
    scans = [n for n in program.graph.nodes if n.target is torch.ops.higher_order.scan]
    assert len(scans) == layer.num_layers * (2 if layer.bidirectional else 1)
    for sizes in SIZES:
        x = torch.randn(*sizes, 3)
        with torch.no_grad():
            torch.testing.assert_close(flat(program.module()(x)), flat(layer(x)))


def test_a_program_of_dynamic_length_serves_every_length() -> None:
    for layer in (lltm.LLTM(3, 5, num_layers=2), lltm.LSTM(3, 5, proj_size=2)):
        program = dynamic_program(layer)
        for sizes in (*SIZES, (0, 3)):
            x = torch.randn(*sizes, 3)
            torch.testing.assert_close(flat(program.module()(x)), flat(layer(x)))


def test_a_decomposed_program_can_be_differentiated() -> None:
    layer = lltm.LLTM(3, 5)
    x = torch.randn(6, 4, 3)
    program = torch.export.export(layer, (x,)).run_decompositions(support.decompositions())
    module: nn.Module = program.module()
    torch.testing.assert_close(
        parameters_and_gradients(module, module, x), parameters_and_gradients(layer, layer, x)
    )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = lltm.LLTM(3, 5)

    def forward(self, data: Tensor, batch_sizes: Tensor) -> Any:
        output, state = self.layer(PackedSequence(data, batch_sizes))
        return output.data, state


def test_a_packed_sequence_keeps_our_operator() -> None:
    module = Packed()
    rows, steps = Dim("rows"), Dim("steps")
    arguments = torch.randn(7, 3), torch.tensor([4, 2, 1])
    program = torch.export.export(module, arguments, dynamic_shapes=({0: rows}, {0: steps}))
    program = program.run_decompositions(support.decompositions())
    assert torch.ops.lltm.sequence.default in targets(program.graph_module)
    arguments = torch.randn(9, 3), torch.tensor([3, 3, 2, 1])
    torch.testing.assert_close(flat(program.module()(*arguments)), flat(module(*arguments)))


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = lltm.LLTM(3, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.layer(pack_padded_sequence(x, lengths))[1]


def test_packing_inside_an_exported_program_is_an_error_with_a_remedy() -> None:
    """Traced packing gives batch_sizes the input's dtype."""
    arguments = torch.randn(6, 2, 3), torch.tensor([6, 2])
    with pytest.raises(TypeError, match=r"expected batch_sizes of dtype int64, .*: pack outside"):
        torch.export.export(Packing(), arguments)


def test_a_program_can_be_moved_to_another_device_saved_and_loaded() -> None:
    """The meta device is always available."""
    from torch.export.passes import move_to_device_pass

    layer = lltm.LLTM(3, 5)
    moved = move_to_device_pass(dynamic_program(layer), "meta")
    moved = support.saved_and_loaded(moved, torch.export)
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    output, (h_n, _) = moved.module()(torch.randn(7, 2, 3, device="meta"))
    assert (output.device.type, output.shape) == ("meta", (7, 2, 5))
    assert (h_n.device.type, h_n.shape) == ("meta", (1, 2, 5))


@lltm.cell(gates=("i", "g"), states={"m": 0.5}, parameters={"p": 0.25})
def exported_cell(z: Any, h: Tensor, m: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    m_next = m + torch.sigmoid(z.i) * (torch.tanh(z.g) - p * h)
    return torch.tanh(m_next), m_next


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer = layer(3, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, (h_n, c_n) = self.layer(x)
        return self.head(output), h_n, c_n


@pytest.fixture(scope="module", params=[lltm.LLTM, exported_cell.Layer], ids=["LLTM", "own cell"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, str]:
    """B and T are dynamic."""
    torch.manual_seed(0)
    model = Model(request.param).eval()
    path = tmp_path_factory.mktemp("aoti") / "model.pt2"
    program = dynamic_program(model, batch_first=True)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return model, str(package)


@pytest.mark.slow  # compiles against PyTorch
@support.needs_cmake
def test_a_compiled_package_runs_in_a_program_without_python(
    compiled: tuple[Model, str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model, package = compiled
    run = support.program_without_python("examples/aoti", "run")
    for sizes in SIZES:
        x = torch.randn(*sizes, 3)
        save_file({"0": x}, tmp_path / "arguments")
        said = run(package, tmp_path / "arguments", tmp_path / "results")
        assert f"lltm {lltm.__version__}" in said
        results = load_file(tmp_path / "results")
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close([results[str(k)] for k in range(3)], list(expected))
