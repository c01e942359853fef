"""Argument checks in Python, with messages in the form of the operators.

`where` is the first name in a message: `lltm::LLTM: expected h_0 of shape ..., got ...`.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from ._C import ArgumentError

# A Proxy replaces a tensor in a call that torch.fx traces.
TENSORS: Any = (Tensor, Proxy)

# The product of two such sizes and the element size fits 64 bits.
LARGEST_SIZE = 2**27
MOST_LAYERS = 2**16


def expect(
    right: bool, where: str, expected: str, got: object, error: type[Exception] = ArgumentError
) -> None:
    """Raises an error in the form of the operators' errors, unless `right` is true."""
    if not right:
        raise error(f"lltm::{where}: expected {expected}, got {got}")


def any_integer(where: str, name: str, value: Any) -> int:
    if type(value) is int:  # fast path
        return value
    right = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    expect(right, where, f"{name} to be an int", _type(value), TypeError)
    return int(value)


def integer(where: str, name: str, value: Any, least: int = 1, largest: int = LARGEST_SIZE) -> int:
    """Checks a size, including NumPy integers."""
    size = any_integer(where, name, value)
    if not least <= size <= largest:
        bound = "to be positive" if least == 1 else f"to be at least {least}"
        bound = bound if size < least else f"of at most {largest}"
        expect(False, where, f"{name} {bound}", value)
    return size


checkpoint_steps = partial(integer, least=0, largest=2**63 - 1)  # 0: disabled


def boolean(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        expect(False, where, f"{name} to be a bool", _type(value), TypeError)
    return bool(value)


def flag(where: str, name: str, value: Any) -> bool:
    """Checks a bool like torch.nn does: 0, 1 and NumPy bools are accepted."""
    if isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return boolean(where, name, value)


def probability(where: str, name: str, value: Any) -> float:
    right = isinstance(value, numbers.Real) and not isinstance(value, bool)
    expect(right, where, f"{name} to be a number", _type(value), TypeError)
    expect(0 <= float(value) <= 1, where, f"{name} to be in [0, 1]", value)
    return float(value)


def tensor(where: str, name: str, value: Any, expected: str = "a tensor") -> Tensor:
    # Reading the shape of a nested tensor would raise an internal error of PyTorch.
    if not isinstance(value, TENSORS) or is_nested(value):
        got = "a nested tensor" if is_nested(value) else _type(value)
        raise TypeError(f"lltm::{where}: expected {name} to be {expected}, got {got}")
    result: Tensor = value
    return result


def is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


def optional_tensor(where: str, name: str, value: Any) -> Tensor | None:
    return None if value is None else tensor(where, name, value, "a tensor or None")


def optional_dtype(where: str, name: str, value: Any) -> torch.dtype | None:
    right = value is None or isinstance(value, torch.dtype)
    expect(right, where, f"{name} to be a torch.dtype or None", _type(value), TypeError)
    return value  # type: ignore[no-any-return]


def states(where: str, names: Sequence[str], value: Any, argument: str = "state") -> list[Tensor]:
    """Checks a tuple of states. `argument` is its name in the caller's signature."""
    if not isinstance(value, (tuple, list)) or len(value) != len(names):
        got = _type(value)
        if isinstance(value, (tuple, list)):
            got = f"{len(value)} value{'s' * (len(value) != 1)}"
        raise TypeError(
            f"lltm::{where}: expected {argument} to be a tuple ({', '.join(names)}), got {got}"
        )
    return [tensor(where, name, state) for name, state in zip(names, value, strict=True)]


def alike(where: str, names: Sequence[str], states: Sequence[Tensor], input: Any) -> None:
    """Checks that states, at least three, have equal shapes and the input's dtype and device."""
    if not all(isinstance(value, Tensor) for value in (input, *states)):  # proxies
        return
    # If only h differs, its shape is the wrong one.
    expected = (states[1] if states[1].shape == states[2].shape else states[0]).shape
    for name, state in zip(names, states, strict=True):
        like(where, name, state, input, "input")
        shape(where, name, state, tuple(expected))
        memory(where, name, state)


def like(where: str, name: str, value: Tensor, other: Tensor, of: str) -> None:
    """Checks the device and dtype of a tensor against another. Autocast converts dtypes."""
    if value.device != other.device:
        raise RuntimeError(
            f"lltm::{where}: expected {name} on device {other.device}, the device of the {of}, got"
            f" {value.device}"
        )
    if value.dtype != other.dtype and not (
        value.is_floating_point() and torch.is_autocast_enabled(other.device.type)
    ):
        raise TypeError(
            f"lltm::{where}: expected {name} of dtype {dtype(other.dtype)}, the dtype of the {of},"
            f" got {dtype(value.dtype)}"
        )


def shape(where: str, name: str, value: Any, expected: Any) -> Tensor:
    known = isinstance(value, Tensor) and isinstance(expected, tuple)  # no proxies
    if known and value.shape != expected:
        raise ArgumentError(
            f"lltm::{where}: expected {name} of shape {tuple(expected)}, got {tuple(value.shape)}"
        )
    result: Tensor = value
    return result


def memory(where: str, name: str, value: Tensor) -> None:
    """Checks that the storage has all elements, before an operation of PyTorch reads them."""
    if torch.compiler.is_compiling() or type(value) not in (Tensor, torch.nn.Parameter):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.numel() == 0:
        return
    strides = zip(value.shape, value.stride(), strict=True)
    last = value.storage_offset() + sum((size - 1) * stride for size, stride in strides)
    needed, got = (last + 1) * value.itemsize, value.untyped_storage().nbytes()
    expected = f"{name} with storage of at least {needed} bytes"
    expect(needed <= got, where, expected, got, RuntimeError)


def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator, and converts its errors to ArgumentError.

    Up to PyTorch 2.14, the binding has already converted them. From 2.15 on, PyTorch translates C++
    errors first, to a plain ValueError.
    """
    try:
        return operator(*args, **kwargs)
    except ValueError as error:
        if isinstance(error, ArgumentError) or not str(error).startswith("lltm::"):
            raise
        raise ArgumentError(*error.args) from None


def dtype(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _type(value: Any) -> str:
    return type(value).__name__
