"""The cells over a sequence and their gradients in NumPy: exact enough to judge any dtype.

It computes in long double for float64, which is slow, and in float64 for narrower ones. Nothing
here is shared with the package, so it judges lltm.reference too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]  # of np.longdouble or np.float64


def array(tensor: torch.Tensor) -> Array:
    wider = np.longdouble if tensor.dtype == torch.float64 else np.float64
    return tensor.detach().cpu().to(torch.float64).numpy().astype(wider)


def sigmoid(z: Array) -> Array:
    with np.errstate(over="ignore"):  # infinity is the right limit
        return 1 / (1 + np.exp(-z))


def elu(z: Array) -> Array:
    return np.where(z > 0, z, np.expm1(np.minimum(z, 0)))


def sigmoid_backward(y: Array) -> Array:
    slope: Array = y * (1 - y)
    return slope


# ---- the cells: from the two linear maps, of x and of h, and the state -------------
#
# A step returns h', c' and its gradients' function: of the gradients of h' and c', those of the
# two maps, of h beside its map, and of c. A cell without c passes on what it gets.

Backward = Callable[[Array, Array], tuple[Array, Array, Array | float, Array]]


def lltm(z_x: Array, z_h: Array, h: Array, c: Array) -> tuple[Array, Array, Backward]:
    z_i, z_o, z_g = np.split(z_x + z_h, 3, axis=1)
    i, o, g = sigmoid(z_i), sigmoid(z_o), elu(z_g)
    c_next = c + i * g
    t = np.tanh(c_next)

    def backward(dh: Array, dc: Array) -> tuple[Array, Array, Array | float, Array]:
        dc = dc + dh * o * (1 - t * t)
        dz_i = dc * g * sigmoid_backward(i)
        dz_o = dh * t * sigmoid_backward(o)
        dz = np.concatenate([dz_i, dz_o, dc * i * np.where(g > 0, 1, g + 1)], axis=1)
        return dz, dz, 0.0, dc

    return o * t, c_next, backward


def lstm(z_x: Array, z_h: Array, h: Array, c: Array) -> tuple[Array, Array, Backward]:
    z_i, z_f, z_g, z_o = np.split(z_x + z_h, 4, axis=1)
    i, f, g, o = sigmoid(z_i), sigmoid(z_f), np.tanh(z_g), sigmoid(z_o)
    c_next = f * c + i * g
    t = np.tanh(c_next)

    def backward(dh: Array, dc: Array) -> tuple[Array, Array, Array | float, Array]:
        dc = dc + dh * o * (1 - t * t)
        dz_i, dz_f = dc * g * sigmoid_backward(i), dc * c * sigmoid_backward(f)
        dz_g, dz_o = dc * i * (1 - g * g), dh * t * sigmoid_backward(o)
        dz = np.concatenate([dz_i, dz_f, dz_g, dz_o], axis=1)
        return dz, dz, 0.0, dc * f

    return o * t, c_next, backward


def gru(z_x: Array, z_h: Array, h: Array, c: Array) -> tuple[Array, Array, Backward]:
    x_r, x_u, x_n = np.split(z_x, 3, axis=1)
    h_r, h_u, h_n = np.split(z_h, 3, axis=1)
    r, u = sigmoid(x_r + h_r), sigmoid(x_u + h_u)
    n = np.tanh(x_n + r * h_n)

    def backward(dh: Array, dc: Array) -> tuple[Array, Array, Array | float, Array]:
        dz_n = dh * (1 - u) * (1 - n * n)
        dz_r, dz_u = dz_n * h_n * sigmoid_backward(r), dh * (h - n) * sigmoid_backward(u)
        dz_x = np.concatenate([dz_r, dz_u, dz_n], axis=1)
        return dz_x, np.concatenate([dz_r, dz_u, dz_n * r], axis=1), dh * u, dc

    return (1 - u) * n + u * h, c, backward


CELLS = {"lltm": lltm, "lstm": lstm, "gru": gru}


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

    Weights and biases are those of x and those of h. Returns (output (N, H), h_n, c_n) and, for
    the gradients of those, the gradients of (x, h_0, c_0), of the weights and of the biases.
    """
    step = CELLS[cell]
    (w_x, w_h), (b_x, b_h) = weights, biases
    ends = np.cumsum(batch_sizes)
    rows_of = [slice(end - size, end) for end, size in zip(ends, batch_sizes, strict=True)]
    order = list(zip(rows_of, batch_sizes, strict=True))[:: -1 if reverse else 1]

    h, c = h_0.copy(), c_0.copy()
    output = np.zeros((len(x), h_0.shape[1]), x.dtype)
    saved = []
    for rows, n in order:
        read = h[:n].copy()
        h[:n], c[:n], backward = step(x[rows] @ w_x.T + b_x, read @ w_h.T + b_h, read, c[:n].copy())
        output[rows] = h[:n]
        saved.append((read, backward))

    d_output, dh, dc = grads[0], grads[1].copy(), grads[2].copy()
    dx = np.zeros_like(x)
    d_w_x, d_w_h, d_b_x, d_b_h = (np.zeros_like(p) for p in (w_x, w_h, b_x, b_h))
    for (rows, n), (read, backward) in zip(reversed(order), reversed(saved), strict=True):
        dz_x, dz_h, beside, dc[:n] = backward(dh[:n] + d_output[rows], dc[:n])
        dx[rows], dh[:n] = dz_x @ w_x, dz_h @ w_h + beside
        d_w_x += dz_x.T @ x[rows]
        d_w_h += dz_h.T @ read
        d_b_x += dz_x.sum(axis=0)
        d_b_h += dz_h.sum(axis=0)
    return (output, h, c), (dx, dh, dc, d_w_x, d_w_h, d_b_x, d_b_h)
