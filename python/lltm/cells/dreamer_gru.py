"""DreamerV3's GRU: a joint layer norm of all gates, and a reset gate after the GEMM.

    r, n, u = a * norm(z) + b   h' = u' tanh(sigmoid(r) n) + (1 - u') h   u' = sigmoid(u - 1)

D. Hafner et al.: Mastering diverse domains through world models. 2023.

Notable: the three gates have the same mean and variance. Gains a and shifts b are parameters.
"""

import torch

import lltm

INITIAL = {"a_r": 1.0, "a_n": 1.0, "a_u": 1.0, "b_r": 0.0, "b_n": 0.0, "b_u": 0.0}


@lltm.cell(gates=("r", "n", "u"), parameters=INITIAL, bounded=True)
def dreamer_gru(z, h, a_r, a_n, a_u, b_r, b_n, b_u):
    r, n, u = lltm.layer_norm((z.r, z.n, z.u), eps=1e-3)
    r, u = torch.sigmoid(a_r * r + b_r), torch.sigmoid(a_u * u + b_u - 1)
    return u * torch.tanh(r * (a_n * n + b_n)) + (1 - u) * h
