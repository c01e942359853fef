"""MUT1, a mutation of the GRU found by search, with an update gate that depends only on x.

    u = sigmoid(W_u x + b_u)   r = sigmoid(z_r)   n = tanh(U_n (r h) + tanh(W_n x + b_n))
    h' = (1 - u) h + u n

R. Jozefowicz et al.: An empirical exploration of recurrent network architectures. ICML 2015.
The paper has x instead of W_n x + b_n.
"""

import torch

import lltm

READS = {"u": "x", "x": "x", "n": "product"}


@lltm.cell(gates=("u", "r", "x", "n"), reads=READS, bounded=True)
def mut1(z, h):
    u, r = torch.sigmoid(z.u), torch.sigmoid(z.r)
    return (1 - u) * h + u * torch.tanh(z.n(r * h) + torch.tanh(z.x))
