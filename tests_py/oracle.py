"""The sequence and its gradients in NumPy: exact enough to judge any dtype.

It computes in long double for float64, which is slow, and in float64 for narrower ones. Nothing
here is shared with the package, so it judges lltm.reference too.
"""

from __future__ import annotations

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


def sequence(
    x: Array,
    h_0: Array,
    c_0: Array,
    weights: Array,
    bias: Array,
    batch_sizes: list[int],
    reverse: bool,
    grads: tuple[Array, Array, Array],
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array, Array, Array]]:
    """Runs forward and backward over packed rows x (N, I).

    Returns (output (N, H), h_n, c_n) and, for the gradients of those, the gradients of
    (x, h_0, c_0, weights, bias).
    """
    hidden = h_0.shape[1]
    ends = np.cumsum(batch_sizes)
    rows_of = [slice(end - size, end) for end, size in zip(ends, batch_sizes, strict=True)]
    order = list(zip(rows_of, batch_sizes, strict=True))[:: -1 if reverse else 1]

    h, c = h_0.copy(), c_0.copy()
    output = np.zeros((len(x), hidden), x.dtype)
    saved = []
    for rows, n in order:
        X = np.concatenate([h[:n], x[rows]], axis=1)
        z = X @ weights.T + bias
        i, o = sigmoid(z[:, :hidden]), sigmoid(z[:, hidden : 2 * hidden])
        g = elu(z[:, 2 * hidden :])
        c[:n] += i * g
        t = np.tanh(c[:n])
        h[:n] = o * t
        output[rows] = h[:n]
        saved.append((X, i, o, g, t))

    d_output, dh, dc = grads[0], grads[1].copy(), grads[2].copy()
    dx, d_weights, d_bias = np.zeros_like(x), np.zeros_like(weights), np.zeros_like(bias)
    for (rows, n), (X, i, o, g, t) in zip(reversed(order), reversed(saved), strict=True):
        dh_here = dh[:n] + d_output[rows]
        dc[:n] += dh_here * o * (1 - t * t)
        dz_i = dc[:n] * g * i * (1 - i)
        dz_o = dh_here * t * o * (1 - o)
        dz_g = dc[:n] * i * np.where(g > 0, 1, g + 1)
        dz = np.concatenate([dz_i, dz_o, dz_g], axis=1)
        dX = dz @ weights
        dh[:n], dx[rows] = dX[:, :hidden], dX[:, hidden:]
        d_weights += dz.T @ X
        d_bias += dz.sum(axis=0)
    return (output, h, c), (dx, dh, dc, d_weights, d_bias)
