"""Converters of other libraries' modules into layers with the same weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..custom.modules import CustomLayer

Run = Callable[[Tensor], Tensor]


def _converted(
    name: str, hidden: int, tensors: Mapping[str, Any], run: Run, **options: Any
) -> CustomLayer:
    """Returns a layer with these tensors, or zeros, after comparing it with the module's output."""
    cell = getattr(importlib.import_module(__package__), name)
    weight = tensors["weight_ih_l0"]
    columns = weight.shape[1] + hidden * len(cell.Layer._HEADER.gates_input)
    options |= {"dtype": weight.dtype, "device": weight.device}
    layer: CustomLayer = cell.Layer(columns, hidden, **options)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.copy_(torch.as_tensor(tensors.get(key, 0), dtype=weight.dtype))
        x = torch.linspace(-1, 1, 12 * columns).to(weight).view(4, 3, columns)
        x[..., weight.shape[1] :] = 1
        expected, output = run(x), copy.deepcopy(layer).eval()(x)[0]
    if expected.shape != output.shape or not torch.allclose(output, expected, 1e-3, 1e-3):
        raise ValueError(f"lltm.cells: expected a module with the equations of {name}")
    return layer


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
    name = type(module).__name__
    if name not in _TORCHRECURRENT:
        raise ValueError(f"lltm.cells: expected one of {', '.join(_TORCHRECURRENT)}, got {name}")
    ours, others = _TORCHRECURRENT[name]
    tensors: dict[str, Any] = {}
    for k, cell in enumerate(module.cells):
        found = {name: getattr(cell, name) for name in _NAMES if hasattr(cell, name)}
        tensors |= {f"{name}_l{k}": value for name, value in {**found, **others(cell)}.items()}
    options = {name: getattr(module, name) for name in ("num_layers", "dropout", "batch_first")}
    same = copy.deepcopy(module).eval()
    return _converted(ours, module.hidden_size, tensors, lambda x: same(x)[0], **options)


def from_keras(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a GRU of Keras with ``reset_after=False`` and
    ``return_sequences=True``."""
    if module.reset_after:
        raise ValueError("lltm.cells: expected reset_after=False; lltm.GRU has the other equations")
    numpy = importlib.import_module("keras").ops.convert_to_numpy
    weight_x, weight_h, *bias = map(torch.tensor, module.get_weights())
    tensors = {"weight_ih_l0": weight_x.T, "weight_hh_l0": weight_h.T, "bias_ih_l0": sum(bias)}

    def run(x: Tensor) -> Tensor:
        return torch.tensor(numpy(module(x.numpy())))

    return _converted("keras_gru", module.units, tensors, run, batch_first=True)


def from_ncps(module: Any) -> CustomLayer:
    """Returns a layer with the weights of ``ncps.torch.CfC`` with as many backbone units as units.

    The last H columns of its input are the time step, which is 1 by default in ncps.
    """
    cell, hidden = module.rnn_cell, module.state_size
    parts = (cell.backbone[0], cell.ff1, cell.ff2, cell.time_a, cell.time_b)
    if parts[0].out_features != hidden:
        raise ValueError(f"lltm.cells: expected backbone_units={hidden}, as units")
    weight_x, weight_h = parts[0].weight.split([module.input_size, hidden], 1)
    tensors = {
        "weight_ih_l0": weight_x,
        "weight_hh_l0": torch.cat([weight_h, *(part.weight for part in parts[1:])]),
        "bias_hh_l0": torch.cat([part.bias for part in parts]),
    }
    options = {"batch_first": module.batch_first}
    return _converted("cfc", hidden, tensors, lambda x: module(x[..., :-hidden])[0], **options)
