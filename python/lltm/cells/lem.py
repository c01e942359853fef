"""LEM, long expressive memory: two states with learned time steps.

    s = dt sigmoid(z_s)   c' = (1 - s) c + s tanh(z_c)
    t = dt sigmoid(z_t)   h' = (1 - t) h + t tanh(W x + b + U c')

T. K. Rusch et al.: Long expressive memory for sequence modeling. ICLR 2022.

Notable: a GEMM of the new state c'. dt is a parameter.
"""

import torch

import lltm


@lltm.cell(gates=("t", "s", "c", "h"), reads={"h": ("x", "product")}, parameters={"dt": 1.0})
def lem(z, h, c, dt):
    s, t = dt * torch.sigmoid(z.s), dt * torch.sigmoid(z.t)
    c_next = (1 - s) * c + s * torch.tanh(z.c)
    return (1 - t) * h + t * torch.tanh(z.h(c_next)), c_next
