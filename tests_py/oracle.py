"""NumPy oracle: cells over a sequence, with gradients, exact enough for every dtype.

Computes in long double for float64, which is slow, and otherwise in float64. It calls the equations
of lltm.reference, for derivatives with complex numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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


FUNCTIONS: dict[Any, Callable[[Any], Any]] = {
    torch.sigmoid: lambda x: 1 / (1 + np.exp(-x)),
    torch.tanh: np.tanh,
    F.elu: lambda x: np.where(x.real > 0, x, np.expm1(x)),
    torch.relu: lambda x: np.where(x.real > 0, x, 0),
}


class Values(np.ndarray[Any, Any]):
    """An array that PyTorch's functions accept."""

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return FUNCTIONS[function](*args)


def _step(
    cell: str, z: Sequence[Array], states: Sequence[Array]
) -> tuple[list[Array], Callable[[Sequence[Array]], list[Array]]]:
    """States after a step, and a function for the gradients of z and prior states."""
    function: Any = lltm.reference._EQUATIONS[cell].function
    inputs = [x.view(Values) for x in (*z, *states)]

    def backward(gradients: Sequence[Array]) -> list[Array]:
        """f(x + ih) = f(x) + ih f'(x), because h is so small that h * h is 0."""
        h, found = 2.0**-700, []
        for k, x in enumerate(inputs):
            changed = [*inputs[:k], x + 1j * x.dtype.type(h), *inputs[k + 1 :]]
            after = function(changed[: len(z)], *changed[len(z) :])
            slopes = (np.imag(y) / h for y in after)
            found.append(sum(g * slope for g, slope in zip(gradients, slopes, strict=True)))
        return [np.asarray(gradient) for gradient in found]

    return [np.asarray(y) for y in function(inputs[: len(z)], *inputs[len(z) :])], backward


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
