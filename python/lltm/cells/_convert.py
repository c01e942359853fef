"""Converters of other libraries' modules into layers with the same weights."""

from __future__ import annotations

import copy
import importlib
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._C import ArgumentError
from ..custom.cell import Cell
from ..custom.cell import cell as custom_cell
from ..custom.modules import CustomLayer
from ._spikes import Spike

Run = Callable[[Tensor], Any]


def _check(converter: str, module: Any, *expected: str) -> str:
    """Returns which "library.Class" of the expected ones the module is, or raises an error."""
    for base in type(module).__mro__:
        name = f"{base.__module__.partition('.')[0]}.{base.__name__.removesuffix('Base')}"
        if name in expected:
            return name
    got = f"{type(module).__module__}.{type(module).__qualname__}"
    raise ArgumentError(
        f"lltm.cells.{converter}: expected module to be {' or '.join(expected)}, got {got}"
    )


def _check_options(converter: str, module: Any, expected: Mapping[str, Any]) -> None:
    """Compares attributes, of functions and modules their names."""
    for name, value in expected.items():
        got = getattr(module, name, value)
        got = getattr(got, "__name__", type(got).__name__) if callable(got) else got
        if got != value:
            hint = f"; for inference, set module.cell.{name} = 0" if "dropout" in name else ""
            raise ArgumentError(
                f"lltm.cells.{converter}: expected module with {name}={value!r}, got {got!r}{hint}"
            )


def _converted(
    name: str,
    module: Any,
    hidden: int,
    tensors: Mapping[str, Any],
    run: Run,
    tolerance: float = 1e-3,
    **options: Any,
) -> CustomLayer:
    """Returns a layer with these tensors, or zeros, after comparing it with the module's output."""
    cell = _slstm() if name == "slstm" else getattr(importlib.import_module(__package__), name)
    weight = tensors["weight_ih_l0"]
    columns = weight.shape[1] + hidden * len(cell.Layer._HEADER.gates_input)
    options |= {"dtype": weight.dtype, "device": weight.device}
    layer: CustomLayer = cell.Layer(columns, hidden, **options)
    layer.train(getattr(module, "training", True))
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            given = tensors.get(key, 0)
            tensor = torch.as_tensor(given, dtype=weight.dtype)
            if tensor.numel() > 1 and tensor.shape != parameter.shape:
                raise ArgumentError(
                    f"lltm.cells: expected module to have the tensor {key} of {name} with shape"
                    f" {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
                )
            parameter.copy_(tensor)
            # The module learns neither numbers nor biases that it does not have.
            parameter.requires_grad_(isinstance(given, Tensor) and given.requires_grad)
        x = torch.linspace(-1, 1, 12 * columns).to(weight).view(4, 3, columns)
        expected, output = run(x), copy.deepcopy(layer).eval()(x)[0]
        if isinstance(output, tuple):
            expected, output = torch.cat(expected, -1), torch.cat(output, -1)
    error = math.inf
    if expected.shape == output.shape:
        error = ((expected - output).abs().max() / (1 + output.abs().max())).item()
    if error <= max(tolerance, *(4 * torch.finfo(y.dtype).eps for y in (expected, output))):
        return layer
    got = f"an output of shape {tuple(expected.shape)} that differs by {error:.1e}"
    raise ArgumentError(f"lltm.cells: expected module to have the equations of {name}, got {got}")


def _slstm() -> Cell:
    """Returns the sLSTM without weight_ih: its gates read the input."""
    slstm = importlib.import_module(__package__).slstm
    reads: Any = dict.fromkeys(slstm.gates, ("input", "h"))
    states = slstm.Layer._HEADER.states
    made = custom_cell(slstm.gates, reads=reads, states=states, bounded=True, name=slstm.name)
    return made(slstm.function)


def _joined(cell: Any, *names: str) -> dict[str, Any]:
    parts = {kind: [getattr(cell, f"{kind}_{name}") for name in names] for kind in _KINDS}
    return {f"{kind}_hh": torch.cat(tensors) for kind, tensors in parts.items()}


_KINDS = ("weight", "bias")
# Our cells, and the tensors with other names.
_TORCHRECURRENT: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    **{name: (name.lower(), lambda cell: {}) for name in ("LiGRU", "MGU", "MUT1", "MUT3", "UGRNN")},
    "coRNN": ("cornn", lambda cell: _joined(cell, "hh", "ch")),
    "MultiplicativeLSTM": ("multiplicative_lstm", lambda cell: _joined(cell, "mh", "hh")),
    "IndRNN": (
        "indrnn",
        lambda cell: {"u": cell.vector_u, "bias_ih": cell.bias_ih + cell.bias_hh, "bias_hh": ()},
    ),
    "PeepholeLSTM": (
        "peephole_lstm",
        lambda cell: dict(zip(("p_i", "p_f", "p_o"), cell.weight_ph.chunk(3), strict=True)),
    ),
}
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "dt", "gamma", "epsilon")


@torch.enable_grad()  # joined weights then say if the module learns them
def from_torchrecurrent(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a layer of torchrecurrent, such as ``MGU``."""
    names = (f"torchrecurrent.{name}" for name in _TORCHRECURRENT)
    _, _, name = _check("from_torchrecurrent", module, *names).partition(".")
    ours, others = _TORCHRECURRENT[name]
    tensors: dict[str, Any] = {}
    usual = {"act": "ReLU" if name in ("LiGRU", "IndRNN") else "Tanh", "gate_act": "Sigmoid"}
    for k, cell in enumerate(module.cells):
        _check_options("from_torchrecurrent", cell, usual)
        found = {name: getattr(cell, name) for name in _NAMES if hasattr(cell, name)}
        tensors |= {f"{name}_l{k}": value for name, value in {**found, **others(cell)}.items()}
    options = {name: getattr(module, name) for name in ("num_layers", "dropout", "batch_first")}
    same = copy.deepcopy(module).eval()
    return _converted(ours, module, module.hidden_size, tensors, lambda x: same(x)[0], **options)


@torch.enable_grad()
def from_keras(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a GRU of Keras with ``reset_after=False`` and
    ``return_sequences=True``."""
    _check("from_keras", module, "keras.GRU")
    usual: dict[str, Any] = {"built": True, "reset_after": False, "return_sequences": True}
    usual |= dict.fromkeys(("return_state", "go_backwards", "stateful"), False)
    usual |= {"dropout": 0, "recurrent_dropout": 0}
    usual |= {"activation": "tanh", "recurrent_activation": "sigmoid"}
    _check_options("from_keras", module, usual)
    numpy = importlib.import_module("keras").ops.convert_to_numpy
    weight_x, weight_h, *bias = (
        torch.tensor(numpy(weight)).requires_grad_(weight.trainable) for weight in module.weights
    )
    tensors = {"weight_ih_l0": weight_x.T, "weight_hh_l0": weight_h.T, "bias_ih_l0": sum(bias)}

    def run(x: Tensor) -> Any:
        return torch.tensor(numpy(module(x.numpy())))

    return _converted("keras_gru", module, module.units, tensors, run, batch_first=True)


@torch.enable_grad()
def from_ncps(module: Any) -> CustomLayer:
    """Returns a layer with the weights of ``ncps.torch.CfC`` with as many backbone units as units.

    The last H columns of its input are the time step, which is 1 by default in ncps.
    """
    _check("from_ncps", module, "ncps.CfC")
    cell, hidden = module.rnn_cell, module.state_size
    usual = {"wired_mode": False, "use_mixed": False, "return_sequences": True, "proj_size": None}
    _check_options("from_ncps", module, usual)
    _check_options("from_ncps", cell, {"mode": "default", "backbone_layers": 1})
    first, activation = cell.backbone
    backbone = types.SimpleNamespace(backbone_units=first.out_features, activation=activation)
    _check_options("from_ncps", backbone, {"backbone_units": hidden, "activation": "LeCun"})
    parts = [first, *(getattr(cell, name) for name in ("ff1", "ff2", "time_a", "time_b"))]
    weight_x, weight_h = first.weight.split([module.input_size, hidden], 1)
    tensors = {
        "weight_ih_l0": weight_x,
        "weight_hh_l0": torch.cat([weight_h, *(part.weight for part in parts[1:])]),
        "bias_hh_l0": torch.cat([part.bias for part in parts]),
    }

    def run(x: Tensor) -> Any:
        x[..., module.input_size :] = 1  # the time step of ncps
        return module(x[..., : module.input_size])[0]

    return _converted("cfc", module, hidden, tensors, run, batch_first=module.batch_first)


@torch.enable_grad()
def from_xlstm(module: Any) -> CustomLayer:
    """Returns a layer with the recurrent weights and heads of an ``sLSTMCell`` of xlstm or TiRex.

    As for the cell, the input is the part of the pre-activations that ``sLSTMLayer`` computes, 4H
    columns. The output is h with H columns, before the group norm.
    """
    _check("from_xlstm", module, "xlstm.sLSTMCell", "tirex.sLSTMCell")
    weight, bias, config = module._recurrent_kernel_, module._bias_, module.config
    usual = {"gradient_recurrent_cut": False, "gradient_recurrent_clipval": None}
    _check_options("from_xlstm", config, {"function": "slstm", **usual})
    swapped = weight.shape[1] < weight.shape[2]  # the layout of CUDA kernels, and of TiRex
    if swapped:
        weight, bias = weight.mT, bias.view(len(weight), 4, -1).transpose(0, 1).flatten()
    first = getattr(config, "input_shape", "BSGNH")[0] == "B"
    shape = getattr(config, "output_shape", "BNSH")
    axes = [shape.index(axis) for axis in ("BSNH" if first else "SBNH") if axis in shape]
    tensors = {
        "weight_ih_l0": weight.new_empty(0, 0),
        "weight_hh_l0": weight.squeeze(0),
        "bias_hh_l0": bias,
    }

    def run(x: Tensor) -> Any:
        return module(x, None)[0].permute(axes).flatten(2)

    options = {"heads": len(weight), "batch_first": first}
    tolerance = 3e-2 if swapped else 1e-3  # in these layouts, modules compute in bfloat16
    hidden = len(weight) * weight.shape[2]
    return _converted("slstm", module, hidden, tensors, run, tolerance, **options)


# Our cells, and their parameters.
_SNNTORCH = {
    "Leaky": ("leaky", ["beta", "threshold"]),
    "Synaptic": ("synaptic", ["alpha", "beta", "threshold"]),
    "Alpha": ("alpha", ["alpha", "beta", "threshold"]),
    "RSynaptic": ("rsynaptic", ["alpha", "beta"]),
}


@torch.enable_grad()
def from_snntorch(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a ``torch.nn.Sequential`` of a ``torch.nn.Linear`` and a
    neuron of snnTorch: ``Leaky``, ``Synaptic``, ``Alpha`` or ``RSynaptic``.

    Both compute a step of a sequence. The output is a tuple of the spikes and states of every step.
    A decay that the neuron shares between units becomes a value per unit.
    """
    pair = [*module] if isinstance(module, torch.nn.Sequential) else [module]
    linear, neuron = pair[0], pair[-1]
    names = (f"snntorch.{name}" for name in _SNNTORCH)
    _, _, kind = _check("from_snntorch", neuron, *names).partition(".")
    _check("from_snntorch", linear, "torch.Linear")
    name, parameters = _SNNTORCH[kind]
    usual: dict[str, Any] = dict.fromkeys(("init_hidden", "inhibition", "state_quant"), False)
    usual |= {"reset_delay": True, "reset_mechanism": "zero" if kind == "Alpha" else "subtract"}
    usual |= {"graded_spikes_factor": 1, "all_to_all": True, "threshold": 1}
    _check_options("from_snntorch", neuron, {k: x for k, x in usual.items() if k not in parameters})
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    ours, theirs = (torch.autograd.grad(f(x).sum(), x)[0] for f in (Spike.apply, neuron.spike_grad))
    if not torch.allclose(ours, theirs):
        raise ArgumentError(
            "lltm.cells.from_snntorch: expected module with spike_grad=snntorch.surrogate.atan(),"
            " got another surrogate gradient"
        )
    recurrent = getattr(neuron, "recurrent", None)
    tensors = {f"{k}_ih_l0": getattr(linear, k) for k in _KINDS}
    tensors |= {f"{k}_hh_l0": getattr(recurrent, k) for k in _KINDS if recurrent is not None}
    tensors |= {f"{k}_l0": getattr(neuron, k) for k in parameters}
    outputs = getattr(importlib.import_module(__package__), name).outputs

    def run(x: Tensor) -> Any:
        buffers, first = dict(neuron._buffers), recurrent is None  # of its last call
        steps = [[x.new_zeros(x.shape[1], linear.out_features) for _ in outputs]]
        for z in linear(x):
            steps.append([value.to(x) for value in neuron(z, *steps[-1][first:])])
        neuron._buffers.update(buffers)
        return [torch.stack(values) for values in zip(*steps[1:], strict=True)]

    given = {k: () if x is None else x for k, x in tensors.items()}
    return _converted(name, module, linear.out_features, given, run)


@torch.enable_grad()
def from_norse(module: Any) -> CustomLayer:
    """Returns a layer with the weights of norse's ``LIFRecurrent`` or ``LSNNRecurrent``.

    The output is a tuple of the spikes and states of every step. The layer also learns the weights
    from a neuron to itself, which norse keeps at 0 by default.
    """
    kind = _check("from_norse", module, "norse.LIFRecurrent", "norse.LSNNRecurrent")
    _check_options("from_norse", module.p, {"method": "super"})
    name = "norse_lif" if "LIF" in kind else "alif"
    tensors = {"weight_ih_l0": module.input_weights, "weight_hh_l0": module.recurrent_weights}
    for key in getattr(importlib.import_module(__package__), name).parameters:
        unit = module.dt / 1e-3 if key.startswith("tau") else 1  # the cell's step is 1 ms
        tensors[f"{key}_l0"] = unit * torch.as_tensor(getattr(module.p, key))
    same = copy.copy(module)
    same.record_states = True

    def run(x: Tensor) -> Any:
        spikes, (_, *states) = same(x)
        return [spikes, *(state.to(spikes) for state in states)]

    return _converted(name, module, int(module.hidden_size), tensors, run)
