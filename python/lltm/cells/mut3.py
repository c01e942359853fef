"""MUT3, a mutation of the GRU found by search, whose update gate reads tanh(h).

    u = sigmoid(W_u x + b_u + U_u tanh(h))   r = sigmoid(z_r)   n = tanh(W_n x + b_n + U_n (r h))
    h' = (1 - u) h + u n

R. Jozefowicz et al.: An empirical exploration of recurrent network architectures. ICML 2015.
"""

import torch

import lltm


@lltm.cell(gates=("u", "r", "n"), reads=dict.fromkeys("un", ("x", "product")), bounded=True)
def mut3(z, h):
    u, r = torch.sigmoid(z.u(torch.tanh(h))), torch.sigmoid(z.r)
    return (1 - u) * h + u * torch.tanh(z.n(r * h))
