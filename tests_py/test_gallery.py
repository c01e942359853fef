"""Cells from the literature: lltm.cells."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import custom_cells
import pytest
import support
import torch

import lltm.testing
from lltm import cells
from lltm.cells._spikes import Spike

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


# Gates, with the terms of their pre-activations if they are not x and h, states, parameters and
# outputs, which checkpoints and users depend on. The number is that of the values that forward
# saves per hidden unit, time step and sequence: memory in training.
CELLS = """\
alif | i | v i b | tau_syn_inv tau_mem_inv v_leak v_th v_reset tau_adapt_inv beta | h v i b | 4
alpha | i:x | e i v | alpha beta threshold | h e i v | 4
augru | r u n_x:x n_h:h a:input |  |  |  | 6
block_gru | v r:product n:product u:product |  | a |  | 9
cfc | v f:product g:product a:product b:product dt:input |  |  |  | 7
cifg | i g o | c |  |  | 5
cornn | h v:product | v | dt gamma epsilon |  | 3
dreamer_gru | r n u |  | a_r a_n a_u b_r b_n b_u |  | 8
exprnn | h |  | b |  | 2
gru_d | d:x r:x+product u:x+product n:x+product |  |  |  | 8
hgrn | f:x h:x i:x | i | theta gamma | h i | 7
indrnn | x:x |  | u |  | 2
indylstm | i:x f:x g:x o:x | c | u_i u_f u_g u_o |  | 7
janet | f g |  |  |  | 4
keras_gru | u r n:x+product |  |  |  | 5
layernorm_gru | r u n_x:x n_h:h |  | a_r a_u a_n_x a_n_h b_r b_u b_n_x b_n_h |  | 12
layernorm_lstm | i f g o | c | a_i a_f a_g a_o b_i b_f b_g b_o |  | 16
leaky | v:x | v | beta threshold | h v | 3
lem | t s c h:x+product | c | dt |  | 7
lif | v | v |  | h v | 1
ligru | u n |  |  |  | 3
lru | h:x i:x | i | nu theta | h i | 4
mgu | f n:x+product |  |  |  | 4
mingru | n:x u:x |  |  |  | 3
minlstm | f:x i:x n:x |  |  |  | 4
multiplicative_lstm | x:x i:x+product f:x+product g:x+product o:x+product h:h | c |  |  | 9
mut1 | u:x r x:x n:product |  |  |  | 6
mut3 | u:x+product r n:x+product |  |  |  | 6
norse_lif | i | v i | tau_syn_inv tau_mem_inv v_leak v_th v_reset | h v i | 3
peephole_lstm | i f g o | c | p_i p_f p_o |  | 6
plif | v:x | v | w | h v | 3
rg_lru | r:x i:x v:input |  | alpha |  | 7
rsynaptic | s | s v | alpha beta | h s v | 3
scrn | s:x h v:product | s | alpha |  | 4
slstm | i f z o | c n m |  |  | 7
synaptic | s:x | s v | alpha beta threshold | h s v | 4
t_lstm | i f g o d:product dt:input | c |  |  | 9
ugrnn | c g |  |  |  | 3
zoneout_lstm | i f g o m_h:input m_c:input | c |  |  | 9
"""


def test_the_cells_stay_as_users_know_them() -> None:
    for line, name in zip(CELLS.splitlines(), NAMES, strict=True):
        cell = getattr(cells, name)
        gates = {gate: "+".join(terms) for gate, terms in cell.Layer._HEADER.reads.items()}
        shown = [g if gates[g] == "x+h" else f"{g}:{gates[g]}" for g in cell.gates]
        (saved,) = re.findall(r"^save(.*)$", cell.text, re.MULTILINE)
        columns = (shown, cell.states, cell.parameters, cell.outputs)
        assert line == " | ".join([name, *map(" ".join, columns), str(len(saved.split()))])


def test_the_table_describes_the_cells() -> None:
    text = (support.ROOT / "docs" / "cells.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[(\w+)\].*? \| [\d., ]*? ?\| (.*?) \| (.*?) ?\|$", text, re.MULTILINE)
    assert [name for name, *_ in found] == NAMES
    others = custom_cells.OTHERS.items()
    converters = {name: f"from_{file.partition('.')[0]}" for name, (file, _) in others}
    for name, paper, converter in found:
        assert converter.strip("`") == converters.get(name, "")
        source = (Path(cells.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
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
    (_, last), (_, states) = cells.from_xlstm(module)(x), module(x)
    torch.testing.assert_close(torch.cat(last), states, rtol=0, atol=1e-14)


def test_every_module_is_a_cell() -> None:
    assert sorted(file.stem for file in Path(cells.__path__[0]).glob("[a-z]*.py")) == NAMES


def test_an_unknown_cell_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute .gru.$"):
        cells.gru  # type: ignore[attr-defined]  # noqa: B018
    for library, names in {
        "keras": "keras.GRU",
        "ncps": "ncps.CfC",
        "norse": "norse.LIFRecurrent or norse.LSNNRecurrent",
        "snntorch": "a torch.nn.Sequential of .* and a neuron of snnTorch",
        "torchrecurrent": "torchrecurrent.LiGRU or .*",
        "xlstm": "xlstm.sLSTMCell or tirex.sLSTMCell",
    }.items():
        message = rf"from_{library}: expected module to be {names}, got (torch\.nn\..*\.)?GRU"
        with pytest.raises(ValueError, match=message):
            getattr(cells, f"from_{library}")(torch.nn.GRU(2, 3))


class MGU(torch.nn.Module):
    """Stands in for torchrecurrent.MGU."""

    __module__ = "torchrecurrent"
    hidden_size, num_layers, dropout, batch_first = 3, 1, 0.0, False

    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.layer: Any = cells.mgu.Layer(2, 3, dtype=torch.bfloat16)
        tensors = {name.removesuffix("_l0"): p for name, p in self.layer.named_parameters()}
        for name in tensors.keys() & others:
            tensors[name].requires_grad_(False)
        self.gain = others.pop("gain", None)
        self.cells = [types.SimpleNamespace(**{**tensors, **others})]

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class coRNN(torch.nn.Module):
    """Stands in for torchrecurrent.coRNN with frozen parts."""

    __module__ = "torchrecurrent"

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        names = ("weight_hh", "weight_ch", "bias_hh", "bias_ch")
        tensors = {name: torch.ones(3, requires_grad=name not in frozen) for name in names}
        self.cells = [types.SimpleNamespace(**tensors)]


class Leaky(torch.nn.Module):
    """Stands in for snntorch.Leaky. `scale` multiplies its spikes."""

    __module__ = "snntorch"
    beta: torch.Tensor
    threshold: torch.Tensor

    def __init__(self, threshold: Any = 1.0, scale: float = 1.0, **others: Any) -> None:
        super().__init__()
        self.register_buffer("beta", torch.tensor(0.7))
        self.register_buffer("threshold", torch.as_tensor(threshold))
        self.spike_grad, self.scale = Spike.apply, scale
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, z: torch.Tensor, v: torch.Tensor) -> Any:
        v_next = self.beta * v + z - self.threshold * (v > self.threshold)
        return self.scale * (v_next > self.threshold), v_next


def neurons(*modules: torch.nn.Module, **options: Any) -> Any:
    return torch.nn.Sequential(*modules or [torch.nn.Linear(2, 3)], Leaky(**options))


def hooked() -> Any:
    module = neurons()
    module[0].register_forward_hook(lambda module, x, y: 2 * y)
    return module


LINEAR, RELU = torch.nn.Linear(2, 3), torch.nn.ReLU()
ONES = torch.ones(3)
# By what the layer cannot be: a module, and its error.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a shape": (
        lambda: MGU(weight_ih=torch.ones(9, 2)),
        r"weight_ih_l0 of mgu with shape \(6, 2\), got \(9, 2\)",
    ),
    "equations": (
        lambda: MGU(weight_hh=torch.ones(6, 3)),
        "the equations of mgu, got an output .* differs by",
    ),
    "an activation": (lambda: MGU(act=RELU), "with act='Tanh', got 'ReLU'"),
    "learned parameters": (
        lambda: MGU(gain=torch.nn.Parameter(torch.ones(1))),
        "learns only parameters of mgu, got gain",
    ),
    "joined weights": (lambda: coRNN("weight_ch"), "only weight_hh learned; set requires_grad"),
    "modules between": (lambda: neurons(LINEAR, RELU), r"got \['Linear', 'ReLU', 'Leaky'\]"),
    "a forward": (
        lambda: type("Other", (torch.nn.Sequential,), {})(LINEAR, Leaky()),
        "torch.nn.Sequential of .*, got Other",
    ),
    "doubled spikes": (lambda: neurons(scale=2.0), "the equations of leaky"),
    "thresholds": (lambda: neurons(threshold=ONES), r"threshold_l0 .* \(1,\), got \(3,\)"),
    "factors": (
        lambda: neurons(graded_spikes_factor=ONES / torch.arange(1, 4)),
        r"graded_spikes_factor=1, got \[1.0, 0.5, ",
    ),
    "no surrogate": (lambda: neurons(surrogate_disable=True), "surrogate_disable=False, got True"),
    "a surrogate": (
        lambda: neurons(spike_grad=lambda x: (x > 0).to(x.dtype)),
        "spike_grad=.*atan.*, got another surrogate gradient",
    ),
    "no values": (lambda: neurons().to("meta"), "tensors have values, got weight on device meta"),
    "no weights": (lambda: neurons(torch.nn.LazyLinear(3)), "got weight without a shape"),
    "hooks": (hooked, "without parametrizations and hooks, got those of 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layer_cannot_be_is_an_error(name: str) -> None:
    make, message = REFUSED[name]
    module = make()
    library = "torchrecurrent" if type(module).__module__ == "torchrecurrent" else "snntorch"
    convert = getattr(cells, f"from_{library}")
    with pytest.raises(lltm.ArgumentError, match=f"lltm.cells.from_{library}: .*{message}"):
        convert(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_neurons_are_converted_after_calls(dtype: torch.dtype, bias: bool) -> None:
    module = neurons(torch.nn.Linear(2, 3, bias), threshold=ONES[:1]).to(dtype)
    module[1].state = module[0](torch.ones(2, dtype=dtype))  # the result of an operation
    layer: Any = cells.from_snntorch(module.eval())
    assert (layer.weight_ih_l0.dtype, layer.training) == (dtype, False)
    assert layer.bias_ih_l0.requires_grad == bias == bool(layer.bias_ih_l0.any())


def test_a_converted_layer_keeps_mode_dtype_and_frozen_parameters() -> None:
    module = MGU()
    module.layer.weight_hh_l0.requires_grad_(False)
    module.cells[0].bias_ih = torch.zeros(6)  # a buffer
    torch.nn.init.zeros_(module.layer.bias_ih_l0.requires_grad_(False))
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
    given: dict[str, Any]
    for given, message in (
        ({"activation": "relu"}, "activation='tanh', got 'relu'"),
        ({"stateful": True}, "stateful=False, got True"),
        ({"kernel_regularizer": "l2"}, "kernel_regularizer=None, got 'L2'"),
        ({"dtype": "mixed_bfloat16"}, "got compute_dtype='bfloat16'"),
        ({"dropout": 0.5}, "dropout=0, got 0.5"),
    ):
        module = keras.layers.GRU(3, reset_after=False, return_sequences=True, **given)
        module.build((4, None, 2))
        with pytest.raises(ValueError, match=f"from_keras: .*{message}"):
            cells.from_keras(module)
    module.cell.dropout = 0  # as the error says
    with torch.no_grad():
        assert cells.from_keras(module).bias_ih_l0.requires_grad
    for option, got in {"backbone_units": 7, "mode": "no_gate", "proj_size": 5}.items():
        with pytest.raises(ValueError, match=f"from_ncps: .* {option}=.*, got {got!r}"):
            cells.from_ncps(ncps.CfC(2, 3, **{"backbone_units": 3, option: got}))
    module = ncps.CfC(2, 3, backbone_units=3)
    module.rnn_cell.time_a.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"from_ncps: .* all or none of backbone\.0\.bias, ff1"):
        cells.from_ncps(module)
    settings: dict[str, Any]
    for kind, settings, message in (
        ("Leaky", {"reset_mechanism": "zero"}, "reset_mechanism='subtract', got 'zero'"),
        ("Leaky", {"spike_grad": snntorch.surrogate.fast_sigmoid()}, "got another surrogate"),
        ("Leaky", {"learn_graded_spikes_factor": True}, "got 1.graded_spikes_factor"),
        ("RSynaptic", {"learn_threshold": True}, "got 1.threshold"),
        ("RSynaptic", {"threshold": torch.rand(3)}, "threshold=1, got .0"),
    ):
        settings |= {"alpha": 0.8, "linear_features": 3} if kind == "RSynaptic" else {}
        neuron = getattr(snntorch, kind)(beta=0.9, **settings)
        with pytest.raises(ValueError, match=f"from_snntorch: expected module.*{message}"):
            cells.from_snntorch(torch.nn.Sequential(torch.nn.Linear(2, 3), neuron))


@pytest.mark.slow
def test_neurons_of_norse_start_from_their_potentials() -> None:
    norse = pytest.importorskip("norse.torch")
    leak, threshold = torch.tensor(-65.0), torch.tensor(-50.0)
    for kind in ("LIF", "LSNN"):
        parameters: Any = getattr(norse, f"{kind}Parameters")
        make = getattr(norse, f"{kind}Recurrent")
        module = make(2, 3, p=parameters(v_leak=leak, v_th=threshold, v_reset=leak)).double()
        layer, x = cells.from_norse(module), 1e4 * torch.randn(9, 4, 2, dtype=torch.float64)
        torch.testing.assert_close(layer(x)[0][0], module(x)[0])
        with pytest.raises(ValueError, match=r"from_norse: .* a fixed v_leak, the initial value"):
            cells.from_norse(make(2, 3, p=parameters(v_leak=leak.clone().requires_grad_())))
    with pytest.raises(ValueError, match="activation='lsnn_step', got 'lsnn_adjoint_step'"):
        cells.from_norse(make(2, 3, adjoint=True))


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
