"""Checkpoint files: names, the tutorial's bias (1, 3H)."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import lltm


def test_a_checkpoint_of_the_tutorial_s_module_loads() -> None:
    checkpoint = OrderedDict(weights=torch.randn(15, 8), bias=torch.randn(1, 15))
    cell = lltm.LLTMCell(3, 5)
    assert not any(cell.load_state_dict(checkpoint))
    assert torch.equal(cell.weights, checkpoint["weights"])
    assert cell.bias is not None
    assert torch.equal(cell.bias, checkpoint["bias"][0])
    assert checkpoint["bias"].shape == (1, 15), "the caller's checkpoint was changed"


def test_a_layer_also_loads_biases_with_a_single_row() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2, bidirectional=True)
    checkpoint = {
        name: value.unsqueeze(0) if "bias" in name else value
        for name, value in lltm.LLTM(3, 5, 2, bidirectional=True).state_dict().items()
    }
    assert not any(layer.load_state_dict(checkpoint))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, checkpoint[name].reshape(value.shape)), name


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_inside_another_module(assign: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = lltm.LLTMCell(3, 5, device="meta" if assign else None)

    model = Model()
    checkpoint = {"rnn.weights": torch.randn(15, 8), "rnn.bias": torch.randn(1, 15)}
    assert not any(model.load_state_dict(checkpoint, assign=assign))
    assert model.rnn.bias is not None
    assert torch.equal(model.rnn.bias, checkpoint["rnn.bias"][0])
