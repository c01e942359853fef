"""Layers for C++ programs without PyTorch, one sample at a time: <lltm/realtime.h>."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import _check
from .modules import Layer

__all__ = ["save"]


def save(layer: Layer[Any], path: str | os.PathLike[str]) -> None:
    """Writes a layer to a file that ``lltm::realtime::Layer`` loads.

    The file stores the weights in float32. Dropout, checkpoint_steps and batch_first have no effect
    there.

    Args:
        layer: an LSTM, GRU, RNN, LLTM or a custom cell's layer, on any device; with any number of
            layers, one direction, no projection and one head
        path: the file; by convention, it ends in .rt

    Raises:
        ArgumentError: if the layer has another form, or if the cell has products, means, gates in
            the input or other outputs than h
        RuntimeError: if the file cannot be written
    """
    where = "realtime.save"
    is_layer = isinstance(layer, Layer)
    packed = is_layer and layer._prepacked
    got = f"a {type(layer).__name__}{', whose weights are packed' * packed}"
    _check.expect(is_layer and not packed, where, "layer to be a layer of lltm", got)
    for name, plain in (("bidirectional", False), ("proj_size", 0), ("heads", 1)):
        value = getattr(layer, name, plain)
        _check.expect(value == plain, where, f"a layer with {name} = {plain}", value)
    named = (getattr(layer, name) for name in layer._names)
    parameters = [parameter.detach() for parameter in named if parameter is not None]
    sizes = (layer.num_layers, layer.hidden_size)
    arguments = (layer._CELL, parameters, bool(layer.bias), *sizes, os.fspath(path))
    _check.call(torch.ops.lltm._save_realtime, *arguments)
