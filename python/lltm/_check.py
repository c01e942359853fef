"""Checks on arguments that never reach an operator, in the operators' words.

`where` is the name that the text begins with: `lltm::LLTM: expected h_0 of shape ..., got ...`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def integer(where: str, name: str, value: Any) -> int:
    """A size: an int above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"lltm::{where}: expected {name} to be an int, got {_type(value)}")
    if value <= 0:
        raise ValueError(f"lltm::{where}: expected {name} to be positive, got {value}")
    return value


def boolean(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"lltm::{where}: expected {name} to be a bool, got {_type(value)}")
    return value


def probability(where: str, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"lltm::{where}: expected {name} to be a number, got {_type(value)}")
    if not 0 <= value <= 1:
        raise ValueError(f"lltm::{where}: expected {name} to lie in [0, 1], got {value}")
    return float(value)


def tensor(where: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"lltm::{where}: expected {name} to be a tensor, got {_type(value)}")
    return value


def optional_tensor(where: str, name: str, value: Any) -> Tensor | None:
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(
            f"lltm::{where}: expected {name} to be a tensor or None, got {_type(value)}"
        )
    return value


def state(where: str, names: tuple[str, str], value: Any) -> tuple[Tensor, Tensor]:
    """A pair of tensors, (h, c)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} values" if isinstance(value, (tuple, list)) else _type(value)
        raise TypeError(
            f"lltm::{where}: expected state to be a pair ({', '.join(names)}), got {got}"
        )
    return tensor(where, names[0], value[0]), tensor(where, names[1], value[1])


def shape(where: str, name: str, value: Tensor, expected: tuple[int, ...]) -> Tensor:
    if value.shape != expected:
        raise ValueError(
            f"lltm::{where}: expected {name} of shape {expected}, got {tuple(value.shape)}"
        )
    return value


def _type(value: Any) -> str:
    return type(value).__name__
