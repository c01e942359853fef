"""Converters of other libraries' modules into layers with the same weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._C import ArgumentError
from ..custom.cell import Cell
from ..custom.cell import cell as custom_cell
from ..custom.modules import CustomLayer

Run = Callable[[Tensor], Any]


def _check(converter: str, module: Any, *expected: str) -> str:
    """Returns which "library.Class" of the expected ones the module is, or raises an error."""
    for base in type(module).__mro__:
        name = f"{base.__module__.partition('.')[0]}.{base.__name__.removesuffix('Base')}"
        if name in expected:
            return name
    kind = module if isinstance(module, type) else type(module)
    got = f"{'the class ' * (kind is module)}{kind.__module__}.{kind.__qualname__}"
    raise ArgumentError(
        f"lltm.cells.{converter}: expected module to be {' or '.join(expected)}, got {got}"
    )


def _check_options(converter: str, found: Any, **expected: Any) -> None:
    """Checks options of a module, which are attributes of `found` or its items."""
    for name, value in expected.items():
        got = found.get(name, value) if isinstance(found, dict) else getattr(found, name, value)
        if got != value:
            raise ArgumentError(
                f"lltm.cells.{converter}: expected module with {name}={value!r}, got {got!r}"
            )


def _converted(
    converter: str,
    name: str,
    module: Any,
    hidden: int,
    tensors: Mapping[str, Any],
    run: Run,
    options: dict[str, Any],
    tolerance: float = 1e-3,
) -> CustomLayer:
    """Returns a layer with these tensors, or zeros, after comparing it with the module's output."""
    where = f"lltm.cells.{converter}: expected module"
    cell = _given() if name == "slstm" else getattr(importlib.import_module(__package__), name)
    weight = tensors["weight_ih_l0"]
    if weight.is_meta:
        raise ArgumentError(f"{where} to have values, got parameters on the device meta")
    columns = weight.shape[1] + hidden * len(cell.Layer._HEADER.gates_input)
    kind = {"dtype": weight.dtype, "device": weight.device}
    layer: CustomLayer = cell.Layer(columns, hidden, **options, **kind)
    layer.train(getattr(module, "training", True))
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            given = tensors.get(key, 0)
            tensor = torch.as_tensor(given, dtype=weight.dtype)
            if tensor.numel() > 1 and tensor.shape != parameter.shape:
                raise ArgumentError(
                    f"{where} to have the tensor {key} of {name} with shape"
                    f" {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
                )
            parameter.copy_(tensor)
            # The module learns neither numbers nor biases that it does not have.
            parameter.requires_grad_(isinstance(given, Tensor) and given.requires_grad)
        x = torch.linspace(-1, 1, 12 * columns).to(weight).view(4, 3, columns)
        expected, output = run(x), copy.deepcopy(layer).eval()(x)[0]
    got, eps = "another shape", max(torch.finfo(y.dtype).eps for y in (expected, output))
    if expected.shape == output.shape:
        error = (expected.to(output) - output).abs().max() / (1 + output.abs().max())
        if error <= max(tolerance, 4 * eps):
            return layer
        got = f"an error of {error.item():.1e}"
    raise ArgumentError(f"{where} to have the equations of {name}, got {got} of its output")


def _given() -> Cell:
    """Returns the sLSTM without weight_ih: its gates read the input."""
    plain = importlib.import_module(__package__).slstm
    reads: Any = dict.fromkeys(plain.gates, ("input", "h"))
    states = plain.Layer._HEADER.states
    made = custom_cell(plain.gates, reads=reads, states=states, bounded=True, name=plain.name)
    return made(plain.function)


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


def from_torchrecurrent(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a layer of torchrecurrent, such as ``MGU``."""
    names = (f"torchrecurrent.{name}" for name in _TORCHRECURRENT)
    _, _, name = _check("from_torchrecurrent", module, *names).partition(".")
    ours, others = _TORCHRECURRENT[name]
    tensors: dict[str, Any] = {}
    usual = {"act": "relu" if name in ("LiGRU", "IndRNN") else "tanh", "gate_act": "sigmoid"}
    for k, cell in enumerate(module.cells):
        for act in filter(partial(hasattr, cell), usual):
            option = act.replace("act", "nonlinearity")
            used = {option: type(getattr(cell, act)).__name__.lower()}
            _check_options("from_torchrecurrent", used, **{option: usual[act]})
        found = {name: getattr(cell, name) for name in _NAMES if hasattr(cell, name)}
        tensors |= {f"{name}_l{k}": value for name, value in {**found, **others(cell)}.items()}
    options = {name: getattr(module, name) for name in ("num_layers", "dropout", "batch_first")}
    same = copy.deepcopy(module).eval()
    sizes = "from_torchrecurrent", ours, module, module.hidden_size
    return _converted(*sizes, tensors, lambda x: same(x)[0], options)


def from_keras(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a GRU of Keras with ``reset_after=False`` and
    ``return_sequences=True``."""
    _check("from_keras", module, "keras.GRU")
    plain = {"return_state": False, "go_backwards": False, "dropout": 0, "recurrent_dropout": 0}
    expected = {"reset_after": False, "return_sequences": True, "built": True, "stateful": False}
    _check_options("from_keras", module, **expected, **plain)
    for name, activation in {"activation": "tanh", "recurrent_activation": "sigmoid"}.items():
        used = {name: getattr(module, name).__name__}
        _check_options("from_keras", used, **{name: activation})
    numpy = importlib.import_module("keras").ops.convert_to_numpy
    values = [weight.value for weight in module.weights]
    device = values[0].device if isinstance(values[0], Tensor) else None
    weight_x, weight_h, *bias = (
        torch.tensor(numpy(value), device=device).requires_grad_(weight.trainable)
        for weight, value in zip(module.weights, values, strict=True)
    )
    tensors = {"weight_ih_l0": weight_x.T, "weight_hh_l0": weight_h.T, "bias_ih_l0": sum(bias)}

    def run(x: Tensor) -> Any:
        return torch.tensor(numpy(module(x.cpu().numpy())))

    sizes = "from_keras", "keras_gru", module, module.units
    return _converted(*sizes, tensors, run, {"batch_first": True})


def from_ncps(module: Any) -> CustomLayer:
    """Returns a layer with the weights of ``ncps.torch.CfC`` with as many backbone units as units.

    The last H columns of its input are the time step, which is 1 by default in ncps.
    """
    _check("from_ncps", module, "ncps.CfC")
    cell, hidden = module.rnn_cell, module.state_size
    found = {"mixed_memory": module.use_mixed, "wirings": hasattr(module, "wiring")}
    _check_options("from_ncps", found, mixed_memory=False, wirings=False)
    _check_options("from_ncps", module, return_sequences=True, proj_size=None)
    _check_options("from_ncps", cell, mode="default", backbone_layers=1)
    first, activation = cell.backbone
    name = type(activation).__name__.lower().replace("lecun", "lecun_tanh")
    found = {"backbone_units": first.out_features, "activation": name}
    _check_options("from_ncps", found, backbone_units=hidden, activation="lecun_tanh")
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

    sizes = "from_ncps", "cfc", module, hidden
    return _converted(*sizes, tensors, run, {"batch_first": module.batch_first})


def from_xlstm(module: Any) -> CustomLayer:
    """Returns a layer with the recurrent weights and heads of an ``sLSTMCell`` of xlstm or TiRex.

    As for the cell, the input is the part of the pre-activations that ``sLSTMLayer`` computes, 4H
    columns. The output is h with H columns, before the group norm.
    """
    _check("from_xlstm", module, "xlstm.sLSTMCell", "tirex.sLSTMCell")
    weight, bias, config = module._recurrent_kernel_, module._bias_, module.config
    _check_options("from_xlstm", config, function="slstm", gradient_recurrent_cut=False)
    _check_options("from_xlstm", config, gradient_recurrent_clipval=None)
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
    sizes = "from_xlstm", "slstm", module, len(weight) * weight.shape[2]
    return _converted(*sizes, tensors, run, options, tolerance)
