"""minGRU: a GRU whose gates depend only on x.

    u = sigmoid(W_u x + b_u)   h' = (1 - u) h + u (W_n x + b_n)

L. Feng et al.: Were RNNs all we needed? 2024.
"""

import torch

import lltm


@lltm.cell(gates=("n", "u"), reads={"n": "x", "u": "x"})
def mingru(z, h):
    u = torch.sigmoid(z.u)
    return (1 - u) * h + u * z.n
