"""Cells from the literature: lltm.cells."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_cells
import pytest
import support
import torch

import lltm.testing
from lltm import cells

NAMES = support.GALLERY_CELLS

# Small and large batches use different engines; odd sizes.
SHAPES = [(6, 3, 4, 5), (5, 40, 24, 72)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

OWN_GRADIENT = {"alif", "alpha", "leaky", "lif", "norse_lif", "plif", "rsynaptic", "synaptic"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fastest for small layers."""
    with support.threads(1):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_agrees_with_its_function(name: str) -> None:
    cell = getattr(cells, name)
    lltm.testing.check_cell(cell, shapes=SHAPES, dtypes=DTYPES)
    assert ("\nown_gradient\n" in cell.text) == (name in OWN_GRADIENT)


@pytest.mark.parametrize("name", NAMES)
def test_a_bounded_cell_is_bounded(name: str) -> None:
    """Other cells do exceed 1, so that the list is complete."""
    layer = support.gallery_module(name, 8, 16, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(8 if (parameter >= 0).any() else 1)  # rg_lru has a logarithm
        h, *_ = support.flat(layer(4 * torch.randn(50, 20, layer.input_size, dtype=torch.float64)))
    assert (h.abs().max().item() <= 1) == ("\nbounded\n" in layer._CELL)


def test_the_table_describes_the_cells() -> None:
    text = (support.ROOT / "docs" / "cells.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^\| \[(\w+)\].*? \| ([\d., ]*?) ?\| (.*?) \| (.*?) ?\|$", text, re.MULTILINE
    )
    details = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    assert [name for name, *_ in found] == [name for name, _ in details] == NAMES
    others = custom_cells.OTHERS.items()
    converters = {name: f"from_{file.partition('.')[0]}" for name, (file, _) in others}
    for (name, _, paper, converter), (_, rest) in zip(found, details, strict=True):
        cell = getattr(cells, name)
        gates = {gate: ", ".join(terms) for gate, terms in cell.Layer._HEADER.reads.items()}
        shown = [g if gates[g] == "x, h" else f"{g} ({gates[g]})" for g in cell.gates]
        (saved,) = re.findall(r"^save(.*)$", cell.text, re.MULTILINE)
        columns = [", ".join(names) for names in (shown, cell.states, cell.parameters)]
        *shown, error = (field.strip() for field in rest.split("|"))
        assert shown == [*columns, str(len(saved.split()))], name
        assert converter.strip("`") == converters.get(name, "")
        assert float(error) <= limit_of(name)
        source = (Path(cells.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
        described = re.findall(rf"`{name}` \(([^)]+)\)", text)
        assert described == [", ".join(cell.outputs)] * bool(cell.outputs), name
        year = re.findall(r"\d{4}", paper)[0]
        assert re.search(rf"{re.split(' et al|,| ', paper)[0]}.*{year}", source, re.DOTALL), name


def limit_of(name: str) -> float:
    # Keras multiplies matrices in float32, and snnTorch's spikes and their gradients are float32.
    return {"keras_gru": 1e-5, "rsynaptic": 1e-6}.get(name, 1e-14)


@pytest.mark.slow
@support.needs_extra("examples", "keras", "ncps", "snntorch", "torchrecurrent", "xlstm")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", custom_cells.OTHERS)
def test_a_converted_layer_is_as_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if custom_cells.OTHERS[name][0].startswith("norse"):
        reason = "not in the extra, because it requires torchvision, which pins PyTorch"
        pytest.importorskip("norse", reason=reason)
    assert custom_cells.error(name)[0] <= limit_of(name)


@pytest.mark.slow
@support.needs_extra("examples", "xlstm")
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shapes", [("BSGNH", "BNSH"), ("SBGNH", "SBH"), ("SBGNH", "SBNH")])
def test_an_slstm_is_as_its_module(heads: int, shapes: tuple[str, str]) -> None:
    library = importlib.import_module("xlstm.blocks.slstm.cell")
    options = {"input_shape": shapes[0], "output_shape": shapes[1], "backend": "vanilla"}
    config = library.sLSTMCellConfig(hidden_size=6, num_heads=heads, **options)
    module = library.sLSTMCell(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(5, 3, 24, dtype=torch.float64)
    (_, last), (_, states) = cells.slstm.from_xlstm(module)(x), module(x)
    torch.testing.assert_close(torch.cat(last), states, rtol=0, atol=1e-14)


def test_an_unknown_cell_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gru'"):
        cells.gru  # type: ignore[attr-defined]  # noqa: B018
    for library, names in {
        "keras": "keras.GRU",
        "ncps": "ncps.CfC",
        "norse": "norse.LIFRecurrent or norse.LSNNRecurrent",
        "snntorch": "snntorch.Leaky or .*",
        "torchrecurrent": "torchrecurrent.LiGRU or .*",
        "xlstm": "xlstm.sLSTMCell or tirex.sLSTMCell",
    }.items():
        message = rf"from_{library}: expected module to be {names}, got torch\.nn\..*\.GRU"
        with pytest.raises(ValueError, match=message):
            getattr(cells, f"from_{library}")(torch.nn.GRU(2, 3))
    module = MGU(weight_ih=torch.ones(9, 2))
    with pytest.raises(ValueError, match=r"weight_ih_l0 of mgu with shape \(6, 2\), got \(9, 2\)"):
        cells.from_torchrecurrent(module)
    with pytest.raises(ValueError, match=r"equations of mgu, got an output .* differs by"):
        cells.from_torchrecurrent(MGU(weight_hh=torch.ones(6, 3)))
    with pytest.raises(ValueError, match="with act='Tanh', got 'ReLU'"):
        cells.from_torchrecurrent(MGU(act=torch.nn.ReLU()))


class MGU(torch.nn.Module):
    """Stands in for torchrecurrent.MGU."""

    __module__ = "torchrecurrent"
    hidden_size, num_layers, dropout, batch_first = 3, 1, 0.0, False

    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.layer: Any = cells.mgu.Layer(2, 3, dtype=torch.bfloat16)
        tensors = {name.removesuffix("_l0"): p for name, p in self.layer.named_parameters()}
        self.cells = [types.SimpleNamespace(**{**tensors, **others})]

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def test_a_converted_layer_keeps_mode_dtype_and_frozen_parameters() -> None:
    module = MGU()
    module.layer.weight_hh_l0.requires_grad_(False)
    module.cells[0].bias_ih = torch.zeros(6)  # a buffer
    torch.nn.init.zeros_(module.layer.bias_ih_l0)
    for training in (True, False):
        layer = cells.from_torchrecurrent(module.train(training))
        assert layer.training == training
        assert layer.weight_ih_l0.dtype == torch.bfloat16
        learned = [name for name, p in layer.named_parameters() if p.requires_grad]
        assert learned == ["weight_ih_l0", "bias_hh_l0"]


@pytest.mark.slow
@support.needs_extra("examples", "keras", "ncps", "snntorch")
@pytest.mark.filterwarnings("ignore")
def test_options_that_are_not_converted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras, ncps, snntorch = map(importlib.import_module, ("keras", "ncps.torch", "snntorch"))
    for option, got in {"activation": "relu", "stateful": True, "dropout": 0.5}.items():
        module = keras.layers.GRU(3, reset_after=False, return_sequences=True, **{option: got})
        module.build((4, None, 2))
        with pytest.raises(ValueError, match=f"from_keras: .* {option}=.*, got {got!r}"):
            cells.from_keras(module)
    module.cell.dropout = 0  # as the error says
    with torch.no_grad():
        assert cells.from_keras(module).bias_ih_l0.requires_grad
    for option, got in {"backbone_units": 7, "mode": "no_gate", "proj_size": 5}.items():
        with pytest.raises(ValueError, match=f"from_ncps: .* {option}=.*, got {got!r}"):
            cells.from_ncps(ncps.CfC(2, 3, **{"backbone_units": 3, option: got}))
    sigmoid = {"spike_grad": snntorch.surrogate.fast_sigmoid()}
    for options, message in (
        ({"reset_mechanism": "zero"}, "reset_mechanism='subtract', got 'zero'"),
        (sigmoid, "spike_grad=.*atan.*, got another surrogate gradient"),
    ):
        neuron = snntorch.Leaky(beta=0.9, **options)
        with pytest.raises(ValueError, match=f"from_snntorch: expected module.*{message}"):
            cells.from_snntorch(torch.nn.Sequential(torch.nn.Linear(2, 3), neuron))
    with pytest.raises(ValueError, match=r"to be torch\.Linear, got snntorch\..*Leaky"):
        cells.from_snntorch(neuron)


def test_a_parametrized_exprnn_has_an_orthogonal_matrix() -> None:
    layer: Any = cells.exprnn.Layer(3, 6, dtype=torch.float64)
    orthogonal = torch.nn.utils.parametrizations.orthogonal
    orthogonal(layer, "weight_hh_l0", orthogonal_map="matrix_exp")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = lltm.testing.loop(cells.exprnn, layer, x)[0]
    for run in (layer, torch.compile(layer, backend="aot_eager"), layer.prepack()):
        torch.testing.assert_close(run(x)[0], expected)
    layer(x)[0].sum().backward()
    assert layer.parametrizations.weight_hh_l0.original.grad.any()
    product = layer.weight_hh_l0 @ layer.weight_hh_l0.T
    torch.testing.assert_close(product, torch.eye(6, dtype=torch.float64))


def test_the_slstm_learns_as_well_as_the_lstm() -> None:
    folder, small = support.ROOT / "examples" / "cells", ("--steps", "6", "--updates", "200")
    script = str(folder / "train.py")
    results = [support.run_forked(script, *small, cwd=folder) for _ in range(2)]
    tables = []
    for result in results:
        table, _, seconds = result.stdout.partition("seconds")
        assert re.fullmatch(r"( +\d+\.\d){2}\n", seconds)
        tables.append(table)
    assert tables[0] == tables[1]
    assert tables[0].startswith("updates     sLSTM      LSTM\n")
    rows = [[float(x) for x in line.split()] for line in tables[0].splitlines()[1:]]
    assert [row[0] for row in rows] == [40, 80, 120, 160, 200]
    assert max(rows[-1][1:]) < 0.08  # half the loss of always answering 1


@pytest.mark.slow
@support.needs_extra("examples", "tirex")
def test_the_block_of_tirex_computes_the_same() -> None:
    folder = support.ROOT / "examples" / "cells"
    small = ("--shape", "2", "7", "32")
    result = support.run_forked(str(folder / "tirex_block.py"), *small, cwd=folder)
    found = re.findall(r"^(.*?) +(\d\.\de[+-]\d+)$", result.stdout, re.MULTILINE)
    errors = {name: float(error) for name, error in found}
    assert errors["lltm"] < 1e-6 < errors["TiRex"] < 2e-2
    assert result.stdout.count(" speedup of lltm") == 2
