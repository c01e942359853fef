"""Compatibility with torch.nn.LSTM: arguments, attributes, methods."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import lltm

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 3, "bias": False},
]


def pair(options: dict[str, Any]) -> tuple[lltm.LLTM, nn.LSTM]:
    return lltm.LLTM(3, 5, **options), nn.LSTM(3, 5, **options)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(lltm.LLTM, nn.LSTM), (lltm.LLTMCell, nn.LSTMCell)], ids=["layer", "cell"]
)
def test_forward_has_the_parameters_of_pytorch_s(ours: Any, theirs: Any) -> None:
    found, expected = (
        [(p.name, p.default) for p in inspect.signature(module.forward).parameters.values()]
        for module in (ours, theirs)
    )
    added = [("reset", None)] if issubclass(theirs, nn.RNNBase) else []
    assert found == expected + added


def test_proj_size_has_the_position_of_nn_lstm_s() -> None:
    arguments = (3, 5, 2, True, False, 0.0, False, 0, "cpu", torch.float64)
    for layer in (lltm.LLTM(*arguments), nn.LSTM(*arguments)):
        assert layer.proj_size == 0
        assert {p.dtype for p in layer.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("num_layers", np.int64(2), 2),
        ("hidden_size", np.int32(5), 5),
        ("dropout", np.float64(0.25), 0.25),
        ("dropout", 0, 0.0),
        ("bidirectional", np.bool_(True), True),
        ("batch_first", 0, False),
    ],
)
def test_numpy_numbers_and_integers_for_bools_become_python_s(
    name: str, given: Any, kept: Any
) -> None:
    layer = lltm.LLTM(**{"input_size": 3, "hidden_size": 5, "num_layers": 2, name: given})
    found = getattr(layer, name)
    assert (type(found), found) == (type(kept), kept)
    plain = lltm.LLTM(**{"input_size": 3, "hidden_size": 5, "num_layers": 2, name: kept})
    assert repr(layer) == repr(plain)
    assert layer(torch.randn(6, 4, 3))[0].shape == plain(torch.randn(6, 4, 3))[0].shape


def test_a_cell_accepts_numpy_numbers() -> None:
    arguments: Any = (np.int64(3), np.int64(5), np.bool_(False))
    cell = lltm.LLTMCell(*arguments)
    assert repr(cell) == "lltm.LLTMCell(3, 5, bias=False)"
    assert (type(cell.input_size), type(cell.hidden_size)) == (int, int)


def test_attributes_describe_the_layer() -> None:
    for layer in (lltm.LLTM(3, 5), lltm.LLTM(3, 5).prepack()):
        assert (layer.mode, layer.proj_size) == ("LLTM", 0)


METHODS = [
    *("check_forward_args", "check_hidden_size", "check_input", "permute_hidden"),
    *("get_expected_cell_size", "get_expected_hidden_size", "flatten_parameters"),
]


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_parameters_of_nn_lstm_s(name: str) -> None:
    found = inspect.signature(getattr(lltm.LLTM, name)).parameters
    assert list(found) == list(inspect.signature(getattr(nn.LSTM, name)).parameters)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "packed"])
def test_the_expected_sizes_are_those_of_nn_lstm(options: dict[str, Any], kind: str) -> None:
    x, batch_sizes = torch.randn(6, 4, 3), None
    if kind == "packed":
        x, batch_sizes, *_ = pack_sequence([torch.randn(2, 3), torch.randn(1, 3)])
    ours, lstm = pair(options)
    for layer in (ours, ours.prepack()):
        for name in ("get_expected_hidden_size", "get_expected_cell_size"):
            size = getattr(layer, name)(x, batch_sizes)
            assert size == getattr(lstm, name)(x, batch_sizes)
        state = torch.zeros(size), torch.zeros(size)
        layer.check_forward_args(x, state, batch_sizes)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_checks_reject_the_same_as_nn_lstm_s(options: dict[str, Any]) -> None:
    ours, lstm = pair(options)
    x, (rows, batch_sizes, *_) = torch.randn(6, 4, 3), pack_sequence([torch.randn(2, 3)])
    size = ours.get_expected_hidden_size(x, None)
    good, bad = torch.zeros(size), torch.zeros(*size[:2], 6)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("check_input", (x[..., :2], None)),
        ("check_input", (x[0], None)),
        ("check_input", (x, batch_sizes)),
        ("check_input", (rows[:, :2], batch_sizes)),
        ("check_hidden_size", (bad, size)),
        ("check_hidden_size", (bad, size, "a text of one's own: {}, {}")),
        ("check_forward_args", (x, (bad, good), None)),
        ("check_forward_args", (x, (good, bad), None)),
    ]
    for name, arguments in cases:
        for layer in (ours, lstm):
            with pytest.raises(RuntimeError) as caught:
                getattr(layer, name)(*arguments)
            if layer is ours:
                assert type(caught.value) is lltm.ArgumentError
                assert str(caught.value).startswith("lltm::LLTM: ")
    with pytest.raises(lltm.ArgumentError, match=r"a text of one's own: \(.*, 5\), \(.*, 6\)$"):
        ours.check_hidden_size(bad, size, "a text of one's own: {}, {}")


def test_states_are_permuted_as_nn_lstm_s() -> None:
    ours, lstm = pair({})
    state = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        ours.permute_hidden(state, order), lstm.permute_hidden(state, order), rtol=0, atol=0
    )
    assert ours.permute_hidden(state, None) is state
