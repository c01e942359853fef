"""Converters of other libraries' modules into layers with the same weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..custom.modules import CustomLayer


def _converted(
    name: str,
    hidden: int,
    tensors: Mapping[str, Tensor],
    run: Callable[[Tensor], Tensor],
    **options: Any,
) -> CustomLayer:
    """Returns a layer with these tensors, after comparing it with the module. Default: zeros."""
    cell = getattr(importlib.import_module(__package__), name)
    weight = tensors["weight_ih_l0"]
    columns = weight.shape[1] + hidden * len(cell.Layer._HEADER.gates_input)
    options |= {"dtype": weight.dtype, "device": weight.device}
    layer: CustomLayer = cell.Layer(columns, hidden, **options)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            parameter.copy_(tensors.get(key, torch.zeros(())))
        x = torch.linspace(-1, 1, 12 * columns).to(weight).view(4, 3, columns)
        x[..., weight.shape[1] :] = 1
        expected, output = run(x), copy.deepcopy(layer).eval()(x)[0]
    if expected.shape != output.shape or not torch.allclose(output, expected, 1e-3, 1e-3):
        raise ValueError(f"lltm.cells: expected a module with the equations of {name}")
    return layer


def _stacked(cell: Any, *names: str) -> dict[str, Any]:
    """Concatenates matrices that the cell has separately. A bias may be missing."""
    weights = [getattr(cell, f"weight_{name}") for name in names]
    pairs = zip(names, weights, strict=True)
    biases = [
        getattr(cell, f"bias_{name}", weight.new_zeros(len(weight))) for name, weight in pairs
    ]
    return {"weight_hh": torch.cat(weights), "bias_hh": torch.cat(biases)}


# Names of cells, and the tensors whose names differ.
_SAME = ("ATR", "CFN", "LiGRU", "MGU", "MUT1", "MUT3", "NBR", "UGRNN")
_TORCHRECURRENT: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    **{name: (name.lower(), lambda cell: {}) for name in _SAME},
    "coRNN": ("cornn", lambda cell: _stacked(cell, "hh", "ch")),
    "IndRNN": (
        "indrnn",
        lambda cell: {"u": cell.vector_u, "bias_ih": cell.bias_ih + cell.bias_hh, "bias_hh": ()},
    ),
    "MinimalRNN": ("minimal_rnn", lambda cell: _stacked(cell, "hh", "mm")),
    "MultiplicativeLSTM": ("multiplicative_lstm", lambda cell: _stacked(cell, "mh", "hh")),
    "PeepholeLSTM": (
        "peephole_lstm",
        lambda cell: dict(zip(("p_i", "p_f", "p_o"), cell.weight_ph.chunk(3), strict=True)),
    ),
}


def from_torchrecurrent(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a layer of torchrecurrent, such as ``MGU``."""
    name = type(module).__name__
    if name not in _TORCHRECURRENT:
        expected = ", ".join(_TORCHRECURRENT)
        raise ValueError(
            f"lltm.cells: expected a module of torchrecurrent ({expected}), got {name}"
        )
    ours, differing = _TORCHRECURRENT[name]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "dt", "gamma", "epsilon")
    tensors = {}
    for k, cell in enumerate(module.cells):
        found = {name: getattr(cell, name) for name in names if hasattr(cell, name)}
        for name, value in {**found, **differing(cell)}.items():
            tensors[f"{name}_l{k}"] = torch.as_tensor(value, dtype=cell.weight_ih.dtype)
    options = {name: getattr(module, name) for name in ("num_layers", "dropout", "batch_first")}
    same = copy.deepcopy(module).eval()
    return _converted(ours, module.hidden_size, tensors, lambda x: same(x)[0], **options)


def from_keras(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a GRU of Keras with ``reset_after=False`` and
    ``return_sequences=True``."""
    if module.reset_after:
        raise ValueError("lltm.cells: expected reset_after=False; lltm.GRU has the other equations")
    keras = importlib.import_module("keras")
    weights = [torch.tensor(weight) for weight in module.get_weights()]
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0")
    pairs = zip(names, weights, strict=False)  # without bias if use_bias=False
    tensors = {name: weight.T if weight.dim() == 2 else weight for name, weight in pairs}

    def run(x: Tensor) -> Tensor:
        return torch.tensor(keras.ops.convert_to_numpy(module(x.numpy())))

    return _converted("keras_gru", module.units, tensors, run, batch_first=True)


def from_ncps(module: Any) -> CustomLayer:
    """Returns a layer with the weights of ``ncps.torch.CfC``, with as many backbone units as units.

    Its input is that of the module, and H columns with the time step, which are 1 by default.
    """
    cell, hidden = module.rnn_cell, module.state_size
    backbone, *heads = (cell.backbone[0], cell.ff1, cell.ff2, cell.time_a, cell.time_b)
    if backbone.out_features != hidden:
        raise ValueError(f"lltm.cells: expected backbone_units={hidden}, as units")
    weight_x, weight_h = backbone.weight.split([module.input_size, hidden], 1)
    tensors = {
        "weight_ih_l0": weight_x,
        "weight_hh_l0": torch.cat([weight_h, *(head.weight for head in heads)]),
        "bias_hh_l0": torch.cat([part.bias for part in (backbone, *heads)]),
    }
    options = {"batch_first": module.batch_first}
    return _converted("cfc", hidden, tensors, lambda x: module(x[..., :-hidden])[0], **options)
