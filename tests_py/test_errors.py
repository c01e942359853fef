"""Invalid input: exception type; message with argument, expected and actual value."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

# Valid arguments: T = 6, B = 4, I = 3, H = 5.
PARAMETERS = {"weight_ih": randn(15, 8), "bias_ih": randn(15)}
CELL: dict[str, Any] = {"input": randn(4, 3), "h": randn(4, 5), "c": randn(4, 5), **PARAMETERS}
SEQUENCE: dict[str, Any] = {
    "input": randn(6, 4, 3),
    "h_0": randn(4, 5),
    "c_0": randn(4, 5),
    **PARAMETERS,
    "batch_sizes": None,
}
SIZES = torch.tensor([4, 3, 2])
PACKED: dict[str, Any] = {**SEQUENCE, "input": randn(9, 3), "batch_sizes": SIZES}

# Argument, invalid value, exception, end of the message.
Row = tuple[str, Any, type[Exception], str]
DTYPES = "of dtype float64, float32, bfloat16 or float16"

# fmt: off
BAD_CELL: list[Row] = [
    ("input", torch.tensor(1.0), ValueError, "input of shape (B, I), got ()"),
    ("weight_ih", randn(15, 4), ValueError, "weight_ih of shape (3H, H+I), got (15, 4)"),
    ("weight_ih", randn(15, 8).bfloat16(), TypeError, "input of dtype bfloat16, got float32"),
    ("weight_ih", randn(15, 8).to(torch.int64), TypeError, f"weight_ih {DTYPES}, got int64"),
]
RESET, MASK = torch.zeros(6, 4, dtype=torch.bool), "recurrent_mask"
BAD_SEQUENCE: list[Row] = [
    ("reset", RESET[0], ValueError, "reset of shape (6, 4), got (4,)"),
    ("recurrent_mask", randn(5), ValueError, f"{MASK} of shape (4, 5), got (5,)"),
]
ORDERED = "batch_sizes without negative or increasing values"
BAD_PACKED: list[Row] = [
    ("input", randn(3, 3, 3), ValueError, "input of shape (N, I), got (3, 3, 3)"),
    ("input", randn(8, 3), ValueError,
     "batch_sizes with the sum 8, the number of input rows, got the sum 9"),
    ("batch_sizes", torch.tensor([3, 3, 3]), ValueError,
     "batch_sizes to begin with 4, the batch size of h_0, got 3"),
    ("batch_sizes", torch.tensor([4, 2, 3]), ValueError, f"{ORDERED}, got 3 after 2"),
]
BAD_CHECKPOINT_STEPS: list[Row] = [
    ("checkpoint_steps", -1, ValueError, "checkpoint_steps to be at least 0, got -1"),
]
# The dispatcher has other messages for these calls.
NO_CELL: list[Row] = [
    (name, [1.0], TypeError, f"{name} to be a tensor{' or None' * (name == 'bias_ih')}, got list")
    for name in CELL
]
NO_SEQUENCE: list[Row] = [
    # The operator runs a step.
    ("input", randn(4, 3), ValueError, "input of shape (T, B, I), got (4, 3)"),
    *(
        (name, [1.0], TypeError, f"{name} to be a tensor{' or None' * (name == 'bias_ih')}, got")
        for name in SEQUENCE if name != "batch_sizes"
    ),
    ("batch_sizes", [4, 3, 2], TypeError, "batch_sizes to be a tensor or None, got list"),
    ("reverse", 1, TypeError, "reverse to be a bool, got int"),
    ("reset", [[True]], TypeError, "reset to be a tensor or None, got list"),
    ("recurrent_mask", [[1.0]], TypeError, f"{MASK} to be a tensor or None, got list"),
]
NO_CHECKPOINT_STEPS: list[Row] = [
    ("checkpoint_steps", 2.0, TypeError, "checkpoint_steps to be an int, got float"),
    ("checkpoint_steps", 2**63, ValueError,
     f"checkpoint_steps of at most {2**63 - 1}, got {2**63}"),
]
# fmt: on


def in_functional(name: str, arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    first, second = ("h", "c") if name == "step" else ("h_0", "c_0")
    state = arguments.pop(first), arguments.pop(second)
    return getattr(lltm.functional, name)("lltm", arguments.pop("input"), state, **arguments)


def in_torch_ops(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(torch.ops.lltm, name)(**{"cell": "lltm", **arguments})


Way = Callable[[str, dict[str, Any]], Any]


def requiring_grad(name: str, arguments: dict[str, Any]) -> Any:
    arguments = {
        key: value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse
        else value
        for key, value in arguments.items()
    }
    return in_torch_ops(name, arguments)


WAYS = (in_functional, in_torch_ops, requiring_grad)

# From 2.15 on, PyTorch converts operator errors before lltm's binding.
TRANSLATED = support.TORCH < (2, 15) and support.COMPILED_BINDING
OF_TORCH_OPS = lltm.ArgumentError if TRANSLATED else ValueError


def refuses(
    call: Callable[[], Any],
    error: type[Exception],
    op: str,
    text: str,
    value_error: type[Exception] = lltm.ArgumentError,
) -> None:
    with pytest.raises(error, match=f"^lltm::{op}: expected {re.escape(text)}") as caught:
        call()
    assert type(caught.value) is (value_error if error is ValueError else error)


def function_rows() -> Iterator[Any]:
    """Entries for all ways to call the function."""
    for name, good, rows, ways in (
        ("step", CELL, BAD_CELL, WAYS),
        ("step", CELL, NO_CELL, (in_functional,)),
        ("sequence", SEQUENCE, BAD_SEQUENCE, WAYS),
        ("sequence", SEQUENCE, NO_SEQUENCE, (in_functional,)),
        ("sequence", PACKED, BAD_PACKED, WAYS),
        ("sequence", SEQUENCE, BAD_CHECKPOINT_STEPS, WAYS),
        ("sequence", SEQUENCE, NO_CHECKPOINT_STEPS, (in_functional,)),
    ):
        for argument, value, error, text in rows:
            for way in ways:
                arguments = {**good, argument: value}
                yield pytest.param(way, name, arguments, error, text, id=f"{way.__name__}-{text}")


@pytest.mark.parametrize(("way", "name", "arguments", "error", "text"), list(function_rows()))
def test_a_function_rejects(
    way: Way, name: str, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    value_error = lltm.ArgumentError if way is in_functional else OF_TORCH_OPS
    refuses(lambda: way(name, arguments), error, name, text, value_error)


def test_an_argument_of_another_hidden_size_does_not_determine_other_sizes() -> None:
    layer = torch.nn.GRU(4, 6)
    arguments = (torch.zeros(5, 2, 4), torch.zeros(6, 2), None, *layer.parameters())
    with pytest.raises(ValueError, match=r"expected h_0 of shape \(2, 6\), got \(6, 2\)"):
        torch.ops.lltm.sequence("gru", *arguments)


STEP_OF_LSTM: dict[str, Any] = {
    **CELL,
    "cell": "lstm",
    "weight_ih": randn(20, 3),
    "weight_hh": randn(20, 5),
    "bias_ih": randn(20),
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cell": "unknown"}, f"cell to be one of {', '.join(support.CELLS)} or a serialized "),
        ({"cell": "gru"}, "no c, since the cell gru has none, got a tensor"),
        ({"c": None}, "c to be a tensor, got an undefined tensor"),
        ({"weight_ih": randn(8, 4)}, "weight_hh of shape (8, 2), got (20, 5)"),
        ({"cell": "gru", "c": None, "weight_hh": randn(15, 5)},
         "weight_ih of shape (3H, I), got (20, 3)"),
    ],
)  # fmt: skip
def test_the_cell_and_its_two_matrices_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^lltm::step: expected {re.escape(text)}"):
        in_torch_ops("step", {**STEP_OF_LSTM, **change})


X, ROW = randn(6, 4, 3), randn(4, 3)
STATE = randn(1, 4, 5), randn(1, 4, 5)
STEP = randn(4, 5), randn(4, 5)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch calls nested tensors a prototype
    NESTED = tuple(
        torch.nested.nested_tensor([randn(2, 3), randn(4, 3)], layout=layout)
        for layout in (torch.strided, torch.jagged)
    )
WHOSE = "of the parameters"
TENSOR_OR_PACKED = "input to be a tensor or a PackedSequence"

# fmt: off
# Options of the constructor, the arguments of the call.
BAD_LAYER: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (randn(6, 4, 2),), ValueError, "input of shape (T, B, 3) or (T, 3), got (6, 4, 2)"),
    ({"batch_first": True}, (randn(6, 4, 2),), ValueError,
     "input of shape (B, T, 3) or (T, 3), got (6, 4, 2)"),
    ({}, (randn(3),), ValueError, "input of shape (T, B, 3) or (T, 3), got (3,)"),
    ({}, ([1.0],), TypeError, f"{TENSOR_OR_PACKED}, got list"),
    *(({}, (x,), TypeError, f"{TENSOR_OR_PACKED}, got a nested tensor; convert it")
      for x in NESTED),
    ({}, (X, (NESTED[0], STATE[1])), TypeError, "h_0 to be a tensor, got a nested tensor"),
    ({}, (pack_sequence([randn(2, 4)]),), ValueError, "input of packed shape (N, 3), got (2, 4)"),
    ({}, (X, STATE[0]), TypeError, "hx to be a tuple (h_0, c_0), got Tensor"),
    ({}, (X, (*STATE, None)), TypeError, "hx to be a tuple (h_0, c_0), got 3 values"),
    ({}, (X, (STATE[0], None)), TypeError, "c_0 to be a tensor, got NoneType"),
    ({}, (X, STEP), ValueError, "h_0 of shape (1, 4, 5), got (4, 5)"),
    ({"num_layers": 2}, (X, STATE), ValueError, "h_0 of shape (2, 4, 5), got (1, 4, 5)"),
    ({}, (X[:, 0], STATE), ValueError, "h_0 of shape (1, 5), got (1, 4, 5)"),
    ({"bidirectional": True}, (pack_sequence([randn(2, 3), randn(1, 3)]), STATE), ValueError,
     "h_0 of shape (2, 2, 5), got (1, 4, 5)"),
    *(({}, (X, None, reset), error, f"reset {text}") for reset, error, text in (
        (torch.zeros(6, 4), TypeError, "of dtype bool, got float32"),
        (RESET[0], ValueError, "of shape (6, 4), got (4,)"),
    )),
    *(
        ({"num_layers": layers, "dtype": dtype}, (x,), error, f"input {text}")
        for layers in (1, 2)
        for dtype, x, error, text in (
            (None, X.double(), TypeError, f"of dtype float32, the dtype {WHOSE}, got float64"),
            (None, X.to("meta"), RuntimeError, f"on device cpu, the device {WHOSE}, got meta"),
        )
    ),
]
BAD_STEP: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (randn(4, 2),), ValueError, "input of shape (B, 3) or (3,), got (4, 2)"),
    ({}, (None,), TypeError, "input to be a tensor, got NoneType"),
    *(({}, (x,), TypeError, "input to be a tensor, got a nested tensor") for x in NESTED),
    ({}, (ROW, randn(2, 4, 5)), TypeError, "hx to be a tuple (h, c), got Tensor"),
    ({}, (ROW, (STEP[0], 0)), TypeError, "c to be a tensor, got int"),
    ({}, (ROW, (randn(4, 6), STEP[1])), ValueError, "h of shape (4, 5), got (4, 6)"),
    ({}, (randn(3), (randn(5), randn(1, 5))), ValueError, "c of shape (5,), got (1, 5)"),
    ({}, (ROW.double(),), TypeError, f"input of dtype float32, the dtype {WHOSE}, got float64"),
    ({}, (ROW.to("meta"),), RuntimeError, f"input on device cpu, the device {WHOSE}, got meta"),
]
BAD_SIZES: list[Row] = [
    (name, *row)
    for name in ("input_size", "hidden_size")
    for row in (
        (0, ValueError, f"{name} to be positive, got 0"),
        (5.0, TypeError, f"{name} to be an int, got float"),
        (2**62, ValueError, f"{name} of at most {2**27}, got {2**62}"),
    )
] + [
    ("bias", 2, TypeError, "bias to be a bool, got int"),
]
BAD_OPTIONS: list[Row] = [
    ("num_layers", 0, ValueError, "num_layers to be positive, got 0"),
    ("num_layers", True, TypeError, "num_layers to be an int, got bool"),
    ("num_layers", np.bool_(True), TypeError, "num_layers to be an int, got bool"),
    ("num_layers", 10**30, ValueError, f"num_layers of at most {2**16}, got {10**30}"),
    ("checkpoint_steps", 2**63, ValueError,
     f"checkpoint_steps of at most {2**63 - 1}, got {2**63}"),
    ("checkpoint_steps", -1, ValueError, "checkpoint_steps to be at least 0, got -1"),
    ("batch_first", "False", TypeError, "batch_first to be a bool, got str"),
    ("bidirectional", "yes", TypeError, "bidirectional to be a bool, got str"),
    ("dropout", float("nan"), ValueError, "dropout to be in [0, 1], got nan"),
    ("dropout", "0.5", TypeError, "dropout to be a number, got str"),
    ("recurrent_dropout", -0.1, ValueError, "recurrent_dropout to be in [0, 1], got -0.1"),
    ("proj_size", None, TypeError, "proj_size to be an int, got NoneType"),
]
BAD_PROJECTION: list[Row] = [
    ("proj_size", 2, ValueError, "proj_size to be 0, got 2: an LLTM has no projection"),
]
# Messages about the states of cells without c.
BAD_LAYER_WITHOUT_C: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (X, STATE), TypeError, "h_0 to be a tensor, got tuple"),
    ({}, (X, STEP[0]), ValueError, "h_0 of shape (1, 4, 5), got (4, 5)"),
]
BAD_STEP_WITHOUT_C: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (ROW, STEP), TypeError, "h to be a tensor, got tuple"),
    ({}, (ROW, randn(4, 6)), ValueError, "h of shape (4, 5), got (4, 6)"),
]
# fmt: on
# Modules that return a pair have the messages for a pair.
GOOD: dict[str, Any] = {"input_size": 3, "hidden_size": 5}


def made_and_called(make: Callable[..., Any], options: dict[str, Any], given: Any) -> Any:
    return make(**GOOD, **options)(*given)


def prepacked(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options).prepack()


def rows_of(make: Any) -> tuple[list[Any], list[Row]]:
    """The messages are for its states."""
    is_layer, has_c = not make.__name__.endswith("Cell"), len(make._STATES) > 1
    calls, without_c = (
        (BAD_LAYER, BAD_LAYER_WITHOUT_C) if is_layer else (BAD_STEP, BAD_STEP_WITHOUT_C)
    )
    if not has_c:
        calls = [row for row in calls if len(row[1]) == 1 or row[1][1] is None] + without_c
    options = BAD_SIZES + (BAD_OPTIONS if is_layer else []) + BAD_PROJECTION * (make is lltm.LLTM)
    known = inspect.signature(make).parameters
    return calls, [row for row in options if row[0] in known]


def module_rows() -> Iterator[Any]:
    for name in (name for name in lltm.reference.__all__ if name[0].isupper()):
        calls, constructions = rows_of(getattr(lltm, name))
        for place in (lltm, lltm.reference):
            make, where = getattr(place, name), f"{place.__name__}.{name}"
            for options, given, error, text in calls:
                call = partial(made_and_called, make, options, given)
                yield pytest.param(call, error, name, text, id=f"{where}-{text}")
            for argument, value, error, text in constructions:
                call = partial(make, **{**GOOD, argument: value})
                yield pytest.param(call, error, name, text, id=f"{where}()-{text}")
    for name in ("LLTM", "GRU"):
        for options, given, error, text in rows_of(getattr(lltm, name))[0]:
            if "on device" in text:
                continue  # the operator reports a prepacked layer's bias
            text = text.replace(WHOSE, "of the prepacked layer")
            call = partial(made_and_called, partial(prepacked, getattr(lltm, name)), options, given)
            yield pytest.param(call, error, name, text, id=f"prepacked {name}-{text}")


@pytest.mark.parametrize(("call", "error", "op", "text"), list(module_rows()))
def test_a_module_rejects(
    call: Callable[[], Any], error: type[Exception], op: str, text: str
) -> None:
    refuses(call, error, op, text)


PROJECTED = ("h_0", "c_0", "bias_ih", "bias_hh", "weight_hh", "weight_hr", "weight_ih")


@pytest.mark.parametrize("steps", [0, 1, 40])  # the second is a short call
@pytest.mark.parametrize("name", PROJECTED)
def test_a_projected_lstm_checks_its_arguments(name: str, steps: int) -> None:
    layer = lltm.LSTM(3, 40, proj_size=2)
    arguments = {"h_0": randn(1, 4, 2), "c_0": randn(1, 4, 40)}
    arguments.update((n.removesuffix("_l0"), p.detach()) for n, p in layer.named_parameters())
    packed = layer.prepack().get_buffer("packed_weights_l0")
    sizes = 3, 40, 1, False, False, 0.0, 0.0, 0
    for wrong, error, text in (
        (arguments[name].double(), TypeError, "of dtype float32, the dtype of the input, got"),
        (arguments[name].to("meta"), RuntimeError, "on device cpu, the device of the input, got"),
        (arguments[name][..., :1], ValueError, "of shape"),
        (arguments[name].view(-1)[0], ValueError, "of shape"),
    ):
        if name == "weight_ih" and text != "of shape":
            continue  # the error names the input
        h_0, c_0, *parameters = {**arguments, name: wrong}.values()
        # A prepacked layer has its dtype from bias_ih.
        given = [(parameters, False)]
        given += [([packed, *parameters[2:]], True)] * (
            name not in ("weight_ih", "weight_hh", "bias_ih")
        )
        for weights, prepacked in given:
            call = partial(torch.ops.lltm.layer, "lstm", randn(steps, 4, 3), [h_0, c_0], weights)
            run = partial(call, True, *sizes, prepacked)
            refuses(run, error, "LSTM", f"{name} {text}", OF_TORCH_OPS)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([[8]], ValueError, "of shape (T,), got (1, 1)"),
        ([8.0], TypeError, "of dtype int64, got float32"),
        ([-1, 9], ValueError, "without negative or increasing values, got -1"),
        ([3, 5], ValueError, "without negative or increasing values, got 5 after 3"),
        ([2**62, 2**62], ValueError, "with a sum below 2^63"),
        *(
            (sizes, ValueError, f"with the sum 8, the number of input rows, got the sum {sizes[0]}")
            for sizes in ([0], [9], [2**62])
        ),
    ],
)
def test_layers_check_batch_sizes_before_they_plan(
    sizes: Any, error: type[Exception], text: str, bidirectional: bool
) -> None:
    batch_sizes = torch.as_tensor(sizes)
    projected = lltm.LSTM(3, 5, proj_size=2, bidirectional=bidirectional)
    layer = lltm.GRU(3, 5, bidirectional=bidirectional)
    packed = PackedSequence(randn(8, 3), batch_sizes)
    with support.threads(2):  # two directions run concurrently
        for module in (layer, layer.prepack(), projected):
            name = "LSTM" if module is projected else "GRU"
            refuses(partial(module, packed), error, name, f"batch_sizes {text}")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("order", "error", "text"),
    [
        (torch.tensor([0, 1, 2]), ValueError, "of shape (2,), got (3,)"),
        (torch.tensor([0.0, 1.0]), TypeError, "of dtype int64, got float32"),
        (torch.tensor([0, 2]), ValueError, "to be in [0, 2), got 2"),
    ],
)
def test_wrong_orders_of_a_packed_batch_are_named(
    order: Tensor, error: type[Exception], text: str, index: int
) -> None:
    orders = [torch.tensor([1, 0]), torch.tensor([1, 0])]
    orders[index] = order
    packed = randn(4, 3), torch.tensor([2, 2]), *orders
    name = ("sorted_indices", "unsorted_indices")[index]
    for layer in (lltm.GRU(3, 5), lltm.GRU(3, 5).prepack()):
        refuses(partial(layer, PackedSequence(*packed)), error, "GRU", f"{name} {text}")


@pytest.mark.parametrize("module", [lltm.LSTM, lltm.RNN, lltm.LLTM])
def test_dropout_without_a_second_layer_warns_the_caller(module: Any) -> None:
    with pytest.warns(
        UserWarning, match="num_layers greater than 1, but got dropout=0.5"
    ) as caught:
        module(3, 5, dropout=0.5)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("dropout", 2.0, "to be in [0, 1], got 2"),
        ("recurrent_dropout", -1.0, "to be in [0, 1], got -1"),
        ("hidden_size", -6, "to be positive, got -6"),
        ("hidden_size", 2**62, f"of at most {2**27}, got {2**62}"),
    ],
)
def test_options_that_were_changed_are_checked_as_in_the_constructor(
    name: str, value: float, text: str
) -> None:
    layer = lltm.GRU(3, 5, num_layers=2)
    setattr(layer, name, value)
    refuses(partial(layer, X), ValueError, "GRU", f"{name} {text}")


@support.needs_packed_weights
def test_a_prepacked_layer_without_bias_names_its_weights() -> None:
    packed = lltm.LLTM(3, 5, bias=False).prepack()
    text = "weights from prepack of dtype float64, the dtype of the input, got float32"
    refuses(lambda: packed(X.double()), TypeError, "sequence", text)


X1, H1, C1 = CELL["input"], CELL["h"], CELL["c"]


# fmt: off
NO_OPERATOR_S: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: lltm.functional.step("lltm", X1, H1, CELL["weight_ih"]), "step",
     "states to be a tuple (h, c), got Tensor"),
    (lambda: lltm.functional.sequence("lltm", X, (H1,) * 3, CELL["weight_ih"]), "sequence",
     "states to be a tuple (h_0, c_0), got 3 values"),
    (lambda: lltm.functional.prepack("lltm", 3), "prepack",  # type: ignore[arg-type]
     "weight_ih to be a tensor, got int"),
    *((lambda f=f, a=a, k=k: in_functional(f, {**a, k: NESTED[0]}), f,
       f"{k} to be a tensor, got a nested tensor")
      for f, a, k in (("step", CELL, "h"), ("sequence", SEQUENCE, "input"))),
]
# fmt: on


@pytest.mark.parametrize(("call", "op", "text"), NO_OPERATOR_S)
def test_a_function_rejects_values_that_operators_do_not_accept(
    call: Callable[[], Any], op: str, text: str
) -> None:
    refuses(call, TypeError, op, text)


def on_meta(name: str, arguments: dict[str, Any], way: Way) -> Any:
    return way(name, {key: value.to("meta") for key, value in arguments.items()})


def under_vmap(name: str, arguments: dict[str, Any], way: Way) -> Any:
    samples = {key: value.expand(2, *value.shape) for key, value in arguments.items()}
    return torch.vmap(lambda given: way(name, given))(samples)


def under_autocast(name: str, arguments: dict[str, Any], way: Way) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return way(name, arguments)


def with_fake_tensors(name: str, arguments: dict[str, Any], way: Way) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return way(name, arguments)


@pytest.mark.parametrize("way", [in_functional, in_torch_ops])
@pytest.mark.parametrize("place", [on_meta, under_vmap, under_autocast, with_fake_tensors])
def test_a_wrong_shape_has_the_same_error(place: Callable[..., Any], way: Way) -> None:
    value_error = lltm.ArgumentError if way is in_functional else OF_TORCH_OPS
    call = partial(place, "step", {**CELL, "h": randn(4, 6)}, way)
    refuses(call, ValueError, "step", "h of shape (4, 5), got (4, 6)", value_error)


def test_errors_of_pytorch_keep_their_class() -> None:
    losses = torch.ones(2, 3), torch.tensor([0])
    for call, error in (
        (lambda: torch.ops.aten.view(torch.ones(3), [2]), RuntimeError),
        (lambda: torch.ops.aten.cross_entropy_loss(*losses), ValueError),
        (lambda: torch.ones(3)[5], IndexError),
        (lambda: torch.ones(3).sum(dtype=3), TypeError),  # type: ignore[call-overload]
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error


def test_the_low_level_pair_s_forward_rejects() -> None:
    arguments = X1, CELL["weight_ih"], CELL["bias_ih"], H1[:2], C1
    text = "old_h of shape (4, 5), got (2, 5)"
    refuses(lambda: lltm._C.forward(*arguments), ValueError, "forward", text)


def test_the_low_level_pair_rejects_other_types() -> None:
    compiled = "incompatible function arguments"  # pybind11's
    message = compiled if support.COMPILED_BINDING else "expected old_cell to be a tensor, got str"
    with pytest.raises(TypeError, match=message):
        lltm._C.forward(X1, CELL["weight_ih"], CELL["bias_ih"], H1, "c")  # type: ignore[arg-type]


def freed(tensor: Any) -> Tensor:
    """Frees the storage, as FSDP does."""
    made: Tensor = tensor
    made.untyped_storage().resize_(0)
    return made


def of_projection() -> Any:
    layer = lltm.LSTM(3, 5, proj_size=2)
    freed(layer.weight_hr_l0)
    return layer.prepack()


def after_forward(twice: bool) -> None:
    layer: Any = lltm.LSTM(3, 5)
    y = layer(X)[0].sum()
    freed(layer.weight_hh_l0)
    torch.autograd.grad(y, layer.weight_hh_l0, create_graph=twice)


def of_weights(make: Any, *given: Any, dtype: torch.dtype | None = None) -> Any:
    module = make(3, 5)
    freed(next(p for name, p in module.named_parameters() if name.startswith("weight_hh")))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        return module(*given) if given else module.prepack()


SLSTM = lltm.cells.slstm


@pytest.mark.parametrize(
    ("op", "name", "call"),
    [
        ("sequence", "weight_hh", lambda: of_weights(lltm.LSTM, X)),
        ("sequence", "weight_hh", lambda: of_weights(lltm.GRU, X, dtype=torch.bfloat16)),
        ("prepack", "weight_hh_l0", lambda: of_weights(lltm.LSTM)),
        ("prepack", "weight_hr_l0", of_projection),
        ("sequence_backward", "weight_hh", lambda: after_forward(False)),
        ("sequence_backward", "weight_hh", lambda: after_forward(True)),
        ("step", "n", lambda: lltm.functional.step(
            SLSTM.text, ROW, (*(randn(4, 5) for _ in range(2)), freed(randn(4, 5)), randn(4, 5)),
            randn(20, 3), randn(20, 5))),
        ("sequence", "input", lambda: torch.vmap(
            lambda x: in_torch_ops("sequence", {**SEQUENCE, "input": x})
         )(freed(randn(2, 6, 4, 3)))),
    ],
)  # fmt: skip
def test_a_tensor_without_its_elements_is_named(
    op: str, name: str, call: Callable[[], Any]
) -> None:
    """attack.py frees each argument of each operator; here are casts, packing and derivatives."""
    expected = rf"^lltm::{op}: expected {name} with storage of at least \d+ bytes, got 0"
    with pytest.raises(RuntimeError, match=expected):
        call()


def test_random_arguments_of_every_operator_crash_nothing() -> None:
    support.run_python("attack.py", os.environ.get("LLTM_TEST_SEED", "0"), "2000")
