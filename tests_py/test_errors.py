"""Bad input: the type of the error, and a text that names the argument, what was expected, what
came."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

# Good arguments: T = 6, B = 4, I = 3, H = 5.
CELL: dict[str, Any] = {
    "input": torch.randn(4, 3),
    "h": torch.randn(4, 5),
    "c": torch.randn(4, 5),
    "weights": torch.randn(15, 8),
    "bias": torch.randn(15),
}
SEQUENCE: dict[str, Any] = {
    "input": torch.randn(6, 4, 3),
    "h_0": torch.randn(4, 5),
    "c_0": torch.randn(4, 5),
    "weights": torch.randn(15, 8),
    "bias": torch.randn(15),
    "batch_sizes": None,
}
PACKED: dict[str, Any] = {
    **SEQUENCE,
    "input": torch.randn(9, 3),
    "batch_sizes": torch.tensor([4, 3, 2]),
}

BAD_CELL: list[tuple[str, Any, type[Exception], str]] = [
    ("input", torch.randn(3), ValueError, "expected input of shape (B, I), got (3,)"),
    ("input", torch.randn(1, 4, 3), ValueError, "expected input of shape (B, I), got (1, 4, 3)"),
    ("input", torch.randn(2, 3), ValueError, "expected input of shape (4, 3), got (2, 3)"),
    ("input", torch.randn(4, 2), ValueError, "expected weights of shape (15, 7), got (15, 8)"),
    ("h", torch.randn(4, 6), ValueError, "expected h of shape (4, 5), got (4, 6)"),
    ("h", torch.randn(5), ValueError, "expected h of shape (4, 5), got (5,)"),
    ("h", torch.randn(1, 5), ValueError, "expected h of shape (4, 5), got (1, 5)"),
    ("c", torch.randn(3, 5), ValueError, "expected c of shape (4, 5), got (3, 5)"),
    ("weights", torch.randn(15), ValueError, "expected weights of shape (3H, H+I), got (15,)"),
    (
        "weights",
        torch.randn(16, 8),
        ValueError,
        "expected weights of shape (3H, H+I), got (16, 8)",
    ),
    (
        "weights",
        torch.randn(8, 15),
        ValueError,
        "expected weights of shape (3H, H+I), got (8, 15)",
    ),
    ("bias", torch.randn(5), ValueError, "expected bias of shape (15,), got (5,)"),
    ("bias", torch.randn(1, 15), ValueError, "expected bias of shape (15,), got (1, 15)"),
    (
        "input",
        torch.ones(4, 3, dtype=torch.int64),
        TypeError,
        "expected input of dtype float64, float32, bfloat16 or float16, got int64",
    ),
    (
        "h",
        torch.randn(4, 5).double(),
        TypeError,
        "expected h of dtype float32, got float64",
    ),
    ("c", torch.randn(4, 5).half(), TypeError, "expected c of dtype float32, got float16"),
    (
        "weights",
        torch.randn(15, 8).bfloat16(),
        TypeError,
        "expected weights of dtype float32, got bfloat16",
    ),
    ("bias", torch.randn(15).double(), TypeError, "expected bias of dtype float32, got float64"),
    (
        "h",
        torch.empty(4, 5, device="meta"),
        RuntimeError,
        "expected h on device cpu, got meta",
    ),
    (
        "weights",
        torch.randn(15, 8).to_sparse(),
        RuntimeError,
        "expected weights of layout Strided, got Sparse",
    ),
]

BAD_SEQUENCE: list[tuple[str, Any, type[Exception], str]] = [
    ("input", torch.randn(4, 3), ValueError, "expected input of shape (T, B, I), got (4, 3)"),
    ("input", torch.randn(6, 2, 3), ValueError, "expected input of shape (6, 4, 3), got (6, 2, 3)"),
    ("input", torch.randn(6, 4, 2), ValueError, "expected weights of shape (15, 7), got (15, 8)"),
    ("h_0", torch.randn(1, 4, 5), ValueError, "expected h_0 of shape (B, H), got (1, 4, 5)"),
    ("h_0", torch.randn(4, 6), ValueError, "expected h_0 of shape (4, 5), got (4, 6)"),
    ("c_0", torch.randn(4, 6), ValueError, "expected c_0 of shape (4, 5), got (4, 6)"),
    ("weights", torch.randn(16, 8), ValueError, "expected weights of shape (3H, H+I)"),
    ("bias", torch.randn(16), ValueError, "expected bias of shape (15,), got (16,)"),
    ("c_0", torch.randn(4, 5).double(), TypeError, "expected c_0 of dtype float32, got float64"),
    (
        "input",
        torch.ones(6, 4, 3, dtype=torch.bool),
        TypeError,
        "expected input of dtype float64, float32, bfloat16 or float16, got bool",
    ),
]

BAD_PACKED: list[tuple[str, Any, type[Exception], str]] = [
    ("input", torch.randn(3, 3, 3), ValueError, "expected input of shape (N, I), got (3, 3, 3)"),
    ("input", torch.randn(8, 3), ValueError, "expected input of shape (9, I)"),
    ("input", torch.randn(10, 3), ValueError, "expected input of shape (9, I)"),
    (
        "batch_sizes",
        torch.tensor([3, 3, 3]),
        ValueError,
        "expected batch_sizes to begin with 4, the batch size of h_0, got 3",
    ),
    (
        "batch_sizes",
        torch.tensor([4, 2, 3]),
        ValueError,
        "expected batch_sizes without negative or increasing values, got 3 after 2",
    ),
    (
        "batch_sizes",
        torch.tensor([4, 4, 4, -3]),
        ValueError,
        "expected batch_sizes without negative or increasing values, got -3 after 4",
    ),
    (
        "batch_sizes",
        torch.tensor([[4, 3, 2]]),
        ValueError,
        "expected batch_sizes of shape (T,), got (1, 3)",
    ),
    (
        "batch_sizes",
        torch.tensor([4, 3, 2], dtype=torch.int32),
        TypeError,
        "expected batch_sizes of dtype int64, got int32",
    ),
    (
        "batch_sizes",
        torch.tensor([4.0, 3.0, 2.0]),
        TypeError,
        "expected batch_sizes of dtype int64, got float32",
    ),
]


def in_functional(name: str, arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    first, second = ("h", "c") if name == "cell" else ("h_0", "c_0")
    state = arguments.pop(first), arguments.pop(second)
    return getattr(lltm.functional, name)(arguments.pop("input"), state, **arguments)


def in_functional_with_state(*state: Any) -> Any:
    return lltm.functional.sequence(SEQUENCE["input"], state, SEQUENCE["weights"])


def in_torch_ops(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(torch.ops.lltm, name)(**arguments)


Way = Callable[[str, dict[str, Any]], Any]


def requiring_grad(name: str, arguments: dict[str, Any], way: Way = in_torch_ops) -> Any:
    """Through autograd's kernel and what it calls."""
    arguments = {
        key: value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse
        else value
        for key, value in arguments.items()
    }
    return way(name, arguments)


def on_meta(name: str, arguments: dict[str, Any], way: Way = in_torch_ops) -> Any:
    """Without data, as in a compiled graph."""
    arguments = {
        key: value.to("meta") if isinstance(value, Tensor) and key != "batch_sizes" else value
        for key, value in arguments.items()
    }
    return way(name, arguments)


WAYS = [in_functional, in_torch_ops, requiring_grad]

# What torch.ops raises for wrong shapes and values. From 2.15 on PyTorch makes Python errors of an
# operator's before our binding sees them.
TRANSLATED = support.TORCH < (2, 15) and support.COMPILED_BINDING
OF_TORCH_OPS = lltm.ArgumentError if TRANSLATED else ValueError


def refuses(
    call: Callable[[], Any],
    error: type[Exception],
    op: str,
    text: str,
    value_error: type[Exception] = lltm.ArgumentError,
) -> None:
    with pytest.raises(error, match=f"^{re.escape(op)}: {re.escape(text)}") as caught:
        call()
    # Wrong shapes and values: a ValueError, and a RuntimeError as PyTorch's own.
    assert type(caught.value) is (value_error if error is ValueError else error)


def way_refuses(
    way: Way,
    name: str,
    arguments: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    value_error = lltm.ArgumentError if way is in_functional else OF_TORCH_OPS
    refuses(lambda: way(name, arguments), error, f"lltm::{name}", text, value_error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("argument", "value", "error", "text"), BAD_CELL)
def test_cell_refuses(
    way: Any, argument: str, value: Any, error: type[Exception], text: str
) -> None:
    way_refuses(way, "cell", {**CELL, argument: value}, error, text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("argument", "value", "error", "text"), BAD_SEQUENCE)
def test_sequence_refuses(
    way: Any, argument: str, value: Any, error: type[Exception], text: str
) -> None:
    way_refuses(way, "sequence", {**SEQUENCE, argument: value}, error, text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("argument", "value", "error", "text"), BAD_PACKED)
def test_packed_sequence_refuses(
    way: Any, argument: str, value: Any, error: type[Exception], text: str
) -> None:
    way_refuses(way, "sequence", {**PACKED, argument: value}, error, text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        *BAD_SEQUENCE,
        ("checkpoint_steps", -1, ValueError, "expected checkpoint_steps to be at least 0, got -1"),
    ],
)
def test_checkpointed_sequence_refuses(
    way: Any, argument: str, value: Any, error: type[Exception], text: str
) -> None:
    arguments = {**SEQUENCE, "checkpoint_steps": 2, argument: value}
    way_refuses(way, "sequence", arguments, error, text)


# ----- one wrong shape --------------------------------------------------------

# T = 6, B = 4, I = 3, H = 5; N = 9. By operator, the shapes in letters; what several of these
# arguments have in common is what most of them say.
STATES = {"h_0": "BH", "c_0": "BH"}
PARAMETERS = {"weights": "GX", "bias": "G"}
LETTERS = {"T": 6, "B": 4, "I": 3, "H": 5, "N": 9, "G": 15, "X": 8, "S": 20, "R": 24, "K": 2}
SHAPES: dict[str, tuple[str, dict[str, str], tuple[Any, ...]]] = {
    "cell": ("cell", {"input": "BI", "h": "BH", "c": "BH", **PARAMETERS}, ()),
    "cell_backward": (
        "cell_backward",
        {"input": "BI", "h": "BH", "c": "BH", **PARAMETERS, "activations": "BS", "grad_h": "BH"},
        (None, [True] * 5),
    ),
    "sequence": ("sequence", {"input": "TBI", **STATES, **PARAMETERS}, ()),
    "packed": ("sequence", {"input": "NI", **STATES, **PARAMETERS}, ()),
    "backward": ("sequence_backward", {"input": "TBI", **STATES, **PARAMETERS}, ("RS", "TBH", 0)),
    "packed backward": (
        "sequence_backward",
        {"input": "NI", **STATES, **PARAMETERS},
        ("NS", "NH", 0),
    ),
    "checkpointed backward": (
        "sequence_backward",
        {"input": "TBI", **STATES, **PARAMETERS},
        ("KBH", "TBH", 3),
    ),
}


def call_of_shapes(name: str) -> tuple[Any, dict[str, Any]]:
    """An operator, and good arguments by name."""
    op, letters, rest = SHAPES[name]
    arguments: dict[str, Any] = {
        argument: torch.zeros([LETTERS[letter] for letter in letters_of])
        for argument, letters_of in letters.items()
    }
    if "packed" in name.split():
        arguments["batch_sizes"] = torch.tensor([4, 3, 2])
    if op == "cell_backward":
        arguments["grad_c"], arguments["output_mask"] = rest
    if op == "sequence_backward":
        saved, output, checkpoint_steps = rest
        arguments.setdefault("batch_sizes", None)
        arguments.update(reverse=False, checkpoint_steps=checkpoint_steps, output_mask=[True] * 5)
        shapes = {"saved": saved, "output": output, "grad_output": output}
        for argument, letters_of in {**shapes, "grad_h_n": "BH", "grad_c_n": "BH"}.items():
            arguments[argument] = torch.zeros([LETTERS[letter] for letter in letters_of])
    return getattr(torch.ops.lltm, op), arguments


def wrong_shapes_of(argument: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Another rank, and each size changed, weights and bias by whole gates too."""
    wrong = [(1, *shape), shape[1:]]
    for d, size in enumerate(shape):
        steps = (1, -1, 3, -3) if argument in ("weights", "bias") and d == 0 else (1, -1)
        wrong += [(*shape[:d], size + step, *shape[d + 1 :]) for step in steps]
    return wrong


@pytest.mark.parametrize("name", SHAPES)
def test_of_arguments_that_disagree_the_error_names_the_one_that_is_alone(name: str) -> None:
    op, arguments = call_of_shapes(name)
    op(**arguments)
    tensors = [key for key, value in arguments.items() if isinstance(value, Tensor)]
    for argument in (key for key in tensors if key != "batch_sizes"):
        right = tuple(arguments[argument].shape)
        for shape in wrong_shapes_of(argument, right):
            named = argument
            if argument == "input" and shape[:-1] == right[:-1]:
                # What I is, input and weights say, so neither is alone.
                named = "weights"
            elif argument == "input" and name == "sequence" and shape[1:] == right[1:]:
                continue  # any T will do
            with pytest.raises(ValueError, match=rf"^lltm::\w+: expected {named} of shape \("):
                op(**{**arguments, argument: torch.zeros(shape)})


@pytest.mark.parametrize("weights", [(45, 24), (60, 28), (48, 25)])
def test_the_expected_shape_is_what_the_other_arguments_say(weights: tuple[int, int]) -> None:
    given = (torch.zeros(4, 8), torch.zeros(4, 16), torch.zeros(4, 16), torch.zeros(weights))
    text = f"expected weights of shape (48, 24), got {weights}"
    with pytest.raises(ValueError, match=f"^lltm::cell: {re.escape(text)}"):
        torch.ops.lltm.cell(*given, torch.zeros(48))


def test_states_that_agree_with_each_other_alone_are_named() -> None:
    with pytest.raises(ValueError, match=r"^lltm::cell: expected h of shape \(4, 5\), got"):
        in_torch_ops("cell", {**CELL, "h": torch.zeros(4, 6), "c": torch.zeros(4, 6)})


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [case for case in BAD_CELL if case[2] is not RuntimeError],
)
def test_the_meta_kernel_refuses_the_same(
    argument: str, value: Any, error: type[Exception], text: str
) -> None:
    way_refuses(on_meta, "cell", {**CELL, argument: value}, error, text)


@pytest.mark.parametrize("name", ["cell", "sequence"])
@pytest.mark.parametrize("argument", ["input", "h", "c", "weights", "bias"])
def test_functions_refuse_what_is_no_tensor(name: str, argument: str) -> None:
    if name == "sequence" and argument in ("h", "c"):
        argument += "_0"
    arguments = {**(CELL if name == "cell" else SEQUENCE), argument: [1.0]}
    or_none = " or None" if argument == "bias" else ""
    refuses(
        lambda: in_functional(name, arguments),
        TypeError,
        f"lltm::{name}",
        f"expected {argument} to be a tensor{or_none}, got list",
    )


@pytest.mark.parametrize(
    ("call", "error", "op", "text"),
    [
        (
            lambda: lltm.functional.cell(CELL["input"], CELL["h"], CELL["weights"]),
            TypeError,
            "lltm::cell",
            "expected state to be a pair (h, c), got Tensor",
        ),
        (
            lambda: in_functional_with_state(CELL["h"], CELL["h"], CELL["h"]),
            TypeError,
            "lltm::sequence",
            "expected state to be a pair (h_0, c_0), got 3 values",
        ),
        (
            lambda: in_functional("sequence", {**SEQUENCE, "batch_sizes": [4, 3, 2]}),
            TypeError,
            "lltm::sequence",
            "expected batch_sizes to be a tensor or None, got list",
        ),
        (
            lambda: in_functional("sequence", {**SEQUENCE, "checkpoint_steps": 2.0}),
            TypeError,
            "lltm::sequence",
            "expected checkpoint_steps to be an int, got float",
        ),
        (
            lambda: in_functional("sequence", {**SEQUENCE, "reverse": 1}),
            TypeError,
            "lltm::sequence",
            "expected reverse to be a bool, got int",
        ),
    ],
)
def test_functions_refuse_other_mistakes(
    call: Callable[[], Any], error: type[Exception], op: str, text: str
) -> None:
    refuses(call, error, op, text)


# ----- modules ---------------------------------------------------------------

STATE = torch.randn(1, 4, 5), torch.randn(1, 4, 5)
BAD_LAYER: list[tuple[dict[str, Any], Any, Any, type[Exception], str]] = [
    (
        {},
        torch.randn(6, 4, 2),
        None,
        ValueError,
        "expected input of shape (T, B, 3) or (T, 3), got (6, 4, 2)",
    ),
    (
        {"batch_first": True},
        torch.randn(6, 4, 2),
        None,
        ValueError,
        "expected input of shape (B, T, 3) or (T, 3), got (6, 4, 2)",
    ),
    (
        {},
        torch.randn(3),
        None,
        ValueError,
        "expected input of shape (T, B, 3) or (T, 3), got (3,)",
    ),
    (
        {},
        torch.randn(1, 6, 4, 3),
        None,
        ValueError,
        "expected input of shape (T, B, 3) or (T, 3), got (1, 6, 4, 3)",
    ),
    ({}, [1.0], None, TypeError, "expected input to be a tensor or a PackedSequence, got list"),
    (
        {},
        pack_sequence([torch.randn(2, 4)]),
        None,
        ValueError,
        "expected input of packed rows (N, 3), got (2, 4)",
    ),
    (
        {},
        torch.randn(6, 4, 3),
        STATE[0],
        TypeError,
        "expected hx to be a pair (h_0, c_0), got Tensor",
    ),
    (
        {},
        torch.randn(6, 4, 3),
        (*STATE, None),
        TypeError,
        "expected hx to be a pair (h_0, c_0), got 3 values",
    ),
    (
        {},
        torch.randn(6, 4, 3),
        (STATE[0], None),
        TypeError,
        "expected c_0 to be a tensor, got NoneType",
    ),
    (
        {"num_layers": 2},
        torch.randn(6, 4, 3),
        STATE,
        ValueError,
        "expected h_0 of shape (2, 4, 5), got (1, 4, 5)",
    ),
    (
        {},
        torch.randn(6, 4, 3),
        (STATE[0], torch.randn(1, 2, 5)),
        ValueError,
        "expected c_0 of shape (1, 4, 5), got (1, 2, 5)",
    ),
    (
        {},
        torch.randn(6, 3),
        STATE,
        ValueError,
        "expected h_0 of shape (1, 5), got (1, 4, 5)",
    ),
    (
        {"bidirectional": True},
        pack_sequence([torch.randn(2, 3), torch.randn(1, 3)]),
        STATE,
        ValueError,
        "expected h_0 of shape (2, 2, 5), got (1, 4, 5)",
    ),
]


@pytest.mark.parametrize("module", [lltm.LLTM, lltm.reference.LLTM], ids=["lltm", "reference"])
@pytest.mark.parametrize(("options", "input", "state", "error", "text"), BAD_LAYER)
def test_the_layer_refuses(
    module: type[lltm.LLTM],
    options: dict[str, Any],
    input: Any,
    state: Any,
    error: type[Exception],
    text: str,
) -> None:
    refuses(lambda: module(3, 5, **options)(input, state), error, "lltm::LLTM", text)


@pytest.mark.parametrize(
    ("input", "state", "error", "text"),
    [
        (
            torch.randn(4, 2),
            None,
            ValueError,
            "expected input of shape (B, 3) or (3,), got (4, 2)",
        ),
        (
            torch.randn(2, 4, 3),
            None,
            ValueError,
            "expected input of shape (B, 3) or (3,), got (2, 4, 3)",
        ),
        (None, None, TypeError, "expected input to be a tensor, got NoneType"),
        (
            torch.randn(4, 3),
            torch.randn(2, 4, 5),
            TypeError,
            "expected hx to be a pair (h, c), got Tensor",
        ),
        (
            torch.randn(4, 3),
            (torch.randn(4, 5), 0),
            TypeError,
            "expected c to be a tensor, got int",
        ),
        (
            torch.randn(4, 3),
            (torch.randn(4, 6), torch.randn(4, 5)),
            ValueError,
            "expected h of shape (4, 5), got (4, 6)",
        ),
        (
            torch.randn(3),
            (torch.randn(5), torch.randn(1, 5)),
            ValueError,
            "expected c of shape (5,), got (1, 5)",
        ),
    ],
)
def test_the_cell_module_refuses(input: Any, state: Any, error: type[Exception], text: str) -> None:
    refuses(lambda: lltm.LLTMCell(3, 5)(input, state), error, "lltm::LLTMCell", text)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"input_size": 0}, ValueError, "expected input_size to be positive, got 0"),
        ({"hidden_size": -1}, ValueError, "expected hidden_size to be positive, got -1"),
        ({"hidden_size": 5.0}, TypeError, "expected hidden_size to be an int, got float"),
        ({"num_layers": 0}, ValueError, "expected num_layers to be positive, got 0"),
        ({"num_layers": True}, TypeError, "expected num_layers to be an int, got bool"),
        ({"num_layers": 2.0}, TypeError, "expected num_layers to be an int, got float"),
        ({"num_layers": np.bool_(True)}, TypeError, "expected num_layers to be an int, got bool"),
        ({"bias": 2}, TypeError, "expected bias to be a bool, got int"),
        ({"batch_first": None}, TypeError, "expected batch_first to be a bool, got NoneType"),
        ({"bidirectional": "yes"}, TypeError, "expected bidirectional to be a bool, got str"),
        ({"dropout": 1.5}, ValueError, "expected dropout to lie in [0, 1], got 1.5"),
        ({"dropout": float("nan")}, ValueError, "expected dropout to lie in [0, 1], got nan"),
        ({"dropout": "0.5"}, TypeError, "expected dropout to be a number, got str"),
        ({"dropout": True}, TypeError, "expected dropout to be a number, got bool"),
        (
            {"proj_size": 2},
            ValueError,
            "expected proj_size to be 0, got 2: an LLTM has no projection",
        ),
        ({"proj_size": None}, TypeError, "expected proj_size to be an int, got NoneType"),
    ],
    ids=str,
)
def test_the_layer_s_constructor_refuses(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    good = {"input_size": 3, "hidden_size": 5}
    refuses(lambda: lltm.LLTM(**{**good, **arguments}), error, "lltm::LLTM", text)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"input_size": -3}, ValueError, "expected input_size to be positive, got -3"),
        ({"hidden_size": "5"}, TypeError, "expected hidden_size to be an int, got str"),
        ({"bias": None}, TypeError, "expected bias to be a bool, got NoneType"),
    ],
    ids=str,
)
def test_the_cell_s_constructor_refuses(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    good = {"input_size": 3, "hidden_size": 5}
    refuses(lambda: lltm.LLTMCell(**{**good, **arguments}), error, "lltm::LLTMCell", text)


NESTED = [
    pytest.param(layout, id=str(layout).removeprefix("torch."))
    for layout in (torch.strided, torch.jagged)
]


@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_in_our_words(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    text = "expected input to be a tensor or a PackedSequence, got a nested tensor; make one of it"
    for layer in (lltm.LLTM(3, 5), lltm.reference.LLTM(3, 5), lltm.LLTM(3, 5).prepack()):
        refuses(lambda layer=layer: layer(nested), TypeError, "lltm::LLTM", text)  # type: ignore[misc]
    text = "expected input to be a tensor, got a nested tensor"
    refuses(lambda: lltm.LLTMCell(3, 5)(nested), TypeError, "lltm::LLTMCell", text)
    for name, arguments in (("cell", CELL), ("sequence", SEQUENCE)):
        refuses(
            lambda name=name, arguments=arguments: in_functional(  # type: ignore[misc]
                name, {**arguments, "input": nested}
            ),
            TypeError,
            f"lltm::{name}",
            text,
        )


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda x: x.double(),
            TypeError,
            "expected input of dtype float32, that of the parameters, got float64",
        ),
        (
            lambda x: x.long(),
            TypeError,
            "expected input of dtype float32, that of the parameters, got int64",
        ),
        (
            lambda x: x.to("meta"),
            RuntimeError,
            "expected input on device cpu, that of the parameters, got meta",
        ),
    ],
    ids=["float64", "int64", "meta"],
)
def test_an_input_of_another_kind_than_the_parameters_is_what_the_error_names(
    change: Callable[[Tensor], Tensor], error: type[Exception], text: str
) -> None:
    x = change(torch.randn(6, 4, 3))
    for implementation in (lltm, lltm.reference):
        layer, cell = implementation.LLTM(3, 5, num_layers=2), implementation.LLTMCell(3, 5)
        refuses(lambda layer=layer: layer(x), error, "lltm::LLTM", text)  # type: ignore[misc]
        refuses(lambda cell=cell: cell(x[0]), error, "lltm::LLTMCell", text)  # type: ignore[misc]


def test_a_prepacked_layer_names_an_input_of_another_dtype() -> None:
    x = torch.randn(6, 4, 3).double()
    packed = lltm.LLTM(3, 5).prepack()
    text = "expected input of dtype float32, that of the prepacked layer, got float64"
    refuses(lambda: packed(x), TypeError, "lltm::LLTM", text)
    packed = lltm.LLTM(3, 5, bias=False).prepack()
    text = "expected weights from prepack of dtype float64, that of the input, got some of float32"
    refuses(lambda: packed(x), TypeError, "lltm::sequence_prepacked", text)


# ----- the class of wrong shapes and values -----------------------------------


def wrong_shapes(way: Way) -> dict[str, Callable[[], Any]]:
    h = torch.randn(4, 6)
    arguments = {**CELL, "h": h}
    return {
        "eager": lambda: way("cell", arguments),
        "autograd": lambda: requiring_grad("cell", arguments, way),
        "meta": lambda: on_meta("cell", arguments, way),
        "vmap": lambda: torch.vmap(
            lambda *values: way("cell", dict(zip(CELL, values, strict=True)))
        )(*(value.expand(2, *value.shape) for value in arguments.values())),
        "autocast": lambda: under_autocast(lambda: way("cell", arguments)),
        "fake tensors": lambda: with_fake_tensors(lambda: way("cell", arguments)),
    }


def under_autocast(call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call()


def with_fake_tensors(call: Callable[[], Any]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call()


def of_packed_rows(layer: lltm.LLTM | lltm.PrepackedLLTM) -> Any:
    """What only the operator finds: a layer checks all other shapes itself."""
    rows = PackedSequence(torch.randn(9, 3), torch.tensor([4, 5]))
    return layer(rows)


def in_a_cell_with_other_weights() -> Any:
    cell = lltm.LLTMCell(3, 5)
    cell.weights = nn.Parameter(torch.randn(15, 9))
    return cell(torch.randn(4, 3))


OURS: dict[str, Callable[[], Any]] = {
    **{f"function, {name}": call for name, call in wrong_shapes(in_functional).items()},
    "module": lambda: lltm.LLTM(3, 5)(torch.randn(6, 4, 2)),
    "layer's operator": lambda: of_packed_rows(lltm.LLTM(3, 5)),
    "prepacked layer's operator": lambda: of_packed_rows(lltm.LLTM(3, 5).prepack()),
    "cell's operator": in_a_cell_with_other_weights,
    "prepack": lambda: lltm.functional.prepack(torch.randn(16, 8)),
    "low-level pair": lambda: lltm._C.forward(
        CELL["input"], CELL["weights"], CELL["bias"], torch.randn(4, 6), CELL["c"]
    ),
}


@pytest.mark.parametrize("path", OURS)
@pytest.mark.parametrize("handled", [ValueError, RuntimeError, lltm.ArgumentError])
def test_a_wrong_shape_is_caught_as_pytorch_s_and_as_a_value_error(
    path: str, handled: type[Exception]
) -> None:
    with pytest.raises(handled, match=r"^lltm::\w+: expected \w+ ") as caught:
        OURS[path]()
    assert type(caught.value) is lltm.ArgumentError


@pytest.mark.parametrize("path", wrong_shapes(in_torch_ops))
def test_a_wrong_shape_in_torch_ops_is_a_value_error(path: str) -> None:
    with pytest.raises(ValueError, match=r"^lltm::cell: expected h of shape") as caught:
        wrong_shapes(in_torch_ops)[path]()
    assert type(caught.value) is OF_TORCH_OPS


def test_an_operator_s_value_error_that_is_not_ours_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(*arguments: Any) -> Any:
        raise ValueError("another's")

    monkeypatch.setattr(torch.ops.lltm, "cell", other)
    with pytest.raises(ValueError, match=r"^another's$") as caught:
        in_functional("cell", CELL)
    assert type(caught.value) is ValueError


def test_errors_of_pytorch_keep_their_class() -> None:
    for call, error in (
        (lambda: torch.ops.aten.view(torch.ones(3), [2]), RuntimeError),
        (lambda: torch.ops.aten.stack([]), RuntimeError),
        (
            lambda: torch.ops.aten.cross_entropy_loss(torch.ones(2, 3), torch.tensor([0])),
            ValueError,
        ),
        (lambda: nn.functional.one_hot(torch.tensor([-1])), RuntimeError),
        (lambda: torch.ones(3)[5], IndexError),
        (lambda: torch.ones(3).sum(dtype=3), TypeError),  # type: ignore[call-overload]
    ):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error


def test_an_argument_error_is_pickled() -> None:
    # As it comes back from another process.
    error = pickle.loads(pickle.dumps(lltm.ArgumentError("a text")))
    assert (type(error), error.args) == (lltm.ArgumentError, ("a text",))


# ----- the low-level pair ----------------------------------------------------


def test_the_low_level_pair_refuses() -> None:
    x, h, c, weights, bias = CELL.values()
    refuses(
        lambda: lltm._C.forward(x, weights, bias, h[:2], c),
        ValueError,
        "lltm::forward",
        "expected old_h of shape (4, 5), got (2, 5)",
    )
    new_h, new_cell, i, o, g, X, gates = lltm._C.forward(x, weights, bias, h, c)
    tensors = {
        "grad_h": new_h,
        "grad_cell": new_h,
        "new_cell": new_cell,
        "input_gate": i,
        "output_gate": o,
        "candidate_cell": g,
        "X": X,
        "gate_weights": gates,
        "weights": weights,
    }
    lltm._C.backward(*tensors.values())
    for name in ("grad_h", "grad_cell", "new_cell", "input_gate", "output_gate", "candidate_cell"):
        refuses(
            partial(lltm._C.backward, *{**tensors, name: g[:, :4]}.values()),
            ValueError,
            "lltm::backward",
            f"expected {name} of shape (4, 5), got (4, 4)",
        )
    refuses(
        lambda: lltm._C.backward(*{**tensors, "gate_weights": g}.values()),
        ValueError,
        "lltm::backward",
        "expected gate_weights of shape (4, 15), got (4, 5)",
    )
    compiled = "incompatible function arguments"  # pybind11's
    message = compiled if support.COMPILED_BINDING else "expected old_cell to be a tensor, got str"
    with pytest.raises(TypeError, match=message):
        lltm._C.forward(x, weights, bias, h, "c")  # type: ignore[arg-type]


OTHER_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "Sparse": lambda x: x.to_sparse(),
    "Mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_modules_refuse_other_layouts_in_our_words(layout: str) -> None:
    change = OTHER_LAYOUTS[layout]
    x, h = torch.randn(6, 4, 3), torch.randn(1, 4, 5)
    for module, where, good, names in (
        (lltm.LLTM(3, 5), "lltm::LLTM", (x, h, h), ("input", "h_0", "c_0")),
        (lltm.LLTM(3, 5).prepack(), "lltm::LLTM", (x, h, h), ("input", "h_0", "c_0")),
        (lltm.LLTMCell(3, 5), "lltm::LLTMCell", (x[0], h[0], h[0]), ("input", "h", "c")),
    ):
        for k, name in enumerate(names):
            input, h_0, c_0 = (change(y) if i == k else y for i, y in enumerate(good))
            refuses(
                lambda m=module, a=input, s=(h_0, c_0): m(a, s),  # type: ignore[misc]
                RuntimeError,
                where,
                f"expected {name} of layout Strided, got {layout}",
            )


@pytest.mark.filterwarnings("ignore::UserWarning")  # creating such a tensor is deprecated
def test_modules_refuse_quantised_tensors_in_our_words() -> None:
    x, h = torch.randn(6, 4, 3), torch.randn(1, 4, 5)
    quantised, states = (torch.quantize_per_tensor(y, 0.1, 0, torch.quint8) for y in (x, h))
    layer = lltm.LLTM(3, 5)
    text = "expected input of dtype float32, that of the parameters, got quint8"
    refuses(lambda: layer(quantised), TypeError, "lltm::LLTM", text)
    text = "expected h_0 of dtype float32, got quint8"
    refuses(lambda: layer(x, (states, h)), TypeError, "lltm::sequence", text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input_size": 2**62}, f"expected input_size of at most {2**27}, got {2**62}"),
        ({"hidden_size": 2**63 - 1}, f"expected hidden_size of at most {2**27}, got {2**63 - 1}"),
        ({"num_layers": 10**30}, f"expected num_layers of at most {2**16}, got {10**30}"),
        (
            {"checkpoint_steps": 2**63},
            f"expected checkpoint_steps of at most {2**63 - 1}, got {2**63}",
        ),
    ],
    ids=str,
)
def test_sizes_too_large_to_calculate_with_are_refused(
    arguments: dict[str, int], text: str
) -> None:
    good = {"input_size": 3, "hidden_size": 5}
    refuses(lambda: lltm.LLTM(**{**good, **arguments}), ValueError, "lltm::LLTM", text)  # type: ignore[arg-type]
