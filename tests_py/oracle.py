"""NumPy oracle: cells over a sequence, with gradients, exact enough for every dtype.

Computes in long double for float64, which is slow, and otherwise in float64. The equations are
called from lltm.reference with dual numbers for exact derivatives: the oracle also checks them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import lltm

Array = npt.NDArray[Any]  # of np.longdouble or np.float64


def array(tensor: torch.Tensor) -> Array:
    wider = np.longdouble if tensor.dtype == torch.float64 else np.float64
    return tensor.detach().cpu().to(torch.float64).numpy().astype(wider)


def _sigmoid(x: Array) -> tuple[Array, Array]:
    with np.errstate(over="ignore"):  # infinity is the right limit
        y = 1 / (1 + np.exp(-x))
    return y, y * (1 - y)


def _tanh(x: Array) -> tuple[Array, Array]:
    y = np.tanh(x)
    return y, 1 - y * y


def _elu(x: Array) -> tuple[Array, Array]:
    y = np.expm1(np.minimum(x, 0))
    return np.where(x > 0, x, y), np.where(x > 0, 1, y + 1)


def _relu(x: Array) -> tuple[Array, Array]:
    return np.maximum(x, 0), np.where(x > 0, 1, 0)


FUNCTIONS: dict[Any, Callable[[Array], tuple[Array, Array]]] = {
    torch.sigmoid: _sigmoid,
    torch.tanh: _tanh,
    F.elu: _elu,
    torch.relu: _relu,
}


class Dual:
    """An array and elementwise derivatives by some inputs; missing derivatives are 0."""

    def __init__(self, value: Any, slopes: Mapping[int, Any]) -> None:
        self.value, self.slopes = value, dict(slopes)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Dual, ...] = (), kwargs: Any = None
    ) -> Dual:
        (x,) = args
        value, slope = FUNCTIONS[function](x.value)
        return cls(value, {k: slope * d for k, d in x.slopes.items()})

    def _with(self, other: Dual | float, value: Any, own: Any, others: Any) -> Dual:
        slopes = {k: own * d for k, d in self.slopes.items()}
        if isinstance(other, Dual):
            for k, d in other.slopes.items():
                slopes[k] = slopes.get(k, 0) + others * d
        return Dual(value, slopes)

    def __add__(self, other: Dual | float) -> Dual:
        return self._with(other, self.value + _value(other), 1, 1)

    def __sub__(self, other: Dual | float) -> Dual:
        return self._with(other, self.value - _value(other), 1, -1)

    def __rsub__(self, other: float) -> Dual:
        return self._with(other, other - self.value, -1, 0)

    def __mul__(self, other: Dual | float) -> Dual:
        return self._with(other, self.value * _value(other), _value(other), self.value)

    __radd__, __rmul__ = __add__, __mul__


def _value(x: Dual | float) -> Any:
    return x.value if isinstance(x, Dual) else x


def _step(
    cell: str, z: Sequence[Array], states: Sequence[Array]
) -> tuple[list[Array], Callable[[Sequence[Array]], list[Array]]]:
    """States after a step, and a function for the gradients of z and prior states."""
    function: Any = lltm.reference._EQUATIONS[cell].function
    inputs = [Dual(x, {k: np.ones_like(x)}) for k, x in enumerate((*z, *states))]
    after: Sequence[Dual] = function(inputs[: len(z)], *inputs[len(z) :])

    def backward(gradients: Sequence[Array]) -> list[Array]:
        sums = [np.zeros_like(x.value) for x in inputs]
        for y, gradient in zip(after, gradients, strict=True):
            for k, slope in y.slopes.items():
                sums[k] += gradient * slope
        return sums

    return [y.value for y in after], backward


def sequence(
    cell: str,
    x: Array,
    h_0: Array,
    c_0: Array,
    weights: tuple[Array, Array],
    biases: tuple[Array, Array],
    batch_sizes: list[int],
    reverse: bool,
    grads: tuple[Array, Array, Array],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Runs forward and backward over packed rows x (N, I).

    Weights and biases are for x and for h. Returns (output (N, H), h_n, c_n), and the gradients of
    (x, h_0, c_0), of weights and of biases. A cell without c passes c through.
    """
    equations = lltm.reference._EQUATIONS[cell]
    gates_x, gates_h = list(equations.gates_x), list(equations.gates_h)
    gates = gates_x + [gate for gate in gates_h if gate not in gates_x]
    count = len(inspect.signature(equations.function).parameters) - 1
    (w_x, w_h), (b_x, b_h) = weights, biases
    ends = np.cumsum(batch_sizes)
    rows_of = [slice(end - size, end) for end, size in zip(ends, batch_sizes, strict=True)]
    order = list(zip(rows_of, batch_sizes, strict=True))[:: -1 if reverse else 1]

    last = [h_0.copy(), c_0.copy()]
    output = np.zeros((len(x), h_0.shape[1]), x.dtype)
    saved = []
    for rows, n in order:
        before = [state[:n].copy() for state in last[:count]]
        from_x = np.split(x[rows] @ w_x.T + b_x, len(gates_x), axis=1)
        from_h = np.split(before[0] @ w_h.T + b_h, len(gates_h), axis=1)
        parts = {gate: np.zeros_like(from_x[0]) for gate in gates}
        for gate, part in zip(gates_x + gates_h, from_x + from_h, strict=True):
            parts[gate] += part
        after, backward = _step(cell, list(parts.values()), before)
        for state, value in zip(last, after, strict=False):
            state[:n] = value
        output[rows] = last[0][:n]
        saved.append((before[0], backward))

    d_output, *d_last = grads[0], grads[1].copy(), grads[2].copy()
    dx = np.zeros_like(x)
    d_w_x, d_w_h, d_b_x, d_b_h = (np.zeros_like(p) for p in (w_x, w_h, b_x, b_h))
    for (rows, n), (read, backward) in zip(reversed(order), reversed(saved), strict=True):
        d_after = [d_last[0][:n] + d_output[rows], d_last[1][:n]][:count]
        d_before = backward(d_after)
        dz = dict(zip(gates, d_before, strict=False))
        dz_x = np.concatenate([dz[gate] for gate in gates_x], axis=1)
        dz_h = np.concatenate([dz[gate] for gate in gates_h], axis=1)
        d_states = d_before[len(gates) :]
        d_states[0] += dz_h @ w_h
        for d, value in zip(d_last, d_states, strict=False):
            d[:n] = value
        dx[rows] = dz_x @ w_x
        d_w_x += dz_x.T @ x[rows]
        d_w_h += dz_h.T @ read
        d_b_x += dz_x.sum(axis=0)
        d_b_h += dz_h.sum(axis=0)
    return (output, *last), (dx, *d_last, d_w_x, d_w_h, d_b_x, d_b_h)
