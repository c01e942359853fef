"""DreamerV3's block GRU: its gates multiply a normalized value v, with a block of weights per head.

    v = silu(a norm(z_v))   r, n, u = U v + b   h' = u' tanh(sigmoid(r) n) + (1 - u') h
    norm(z) = z / sqrt(mean(z^2) + 1e-4)        u' = sigmoid(u - 1)

D. Hafner, J. Pasukonis, J. Ba, T. Lillicrap: Mastering diverse control tasks through world models.
Nature, 2025; the code of 2024 has 8 blocks.

Notable: use it with ``heads=8``. The norm is over all heads, as in the code. There, x also contains
a dense layer of h.
"""

import torch
import torch.nn.functional as F

import lltm

READS = dict.fromkeys(("r", "n", "u"), "product")


@lltm.cell(gates=("v", "r", "n", "u"), reads=READS, parameters={"a": 1.0}, bounded=True)
def block_gru(z, h, a):
    v = F.silu(F.rms_norm(z.v, z.v.shape[-1:], a, 1e-4))
    r, u = torch.sigmoid(z.r(v)), torch.sigmoid(z.u(v) - 1)
    return u * torch.tanh(r * z.n(v)) + (1 - u) * h
