"""nBRC, recurrently neuromodulated bistable cell: each unit can store a bit.

    a = 1 + tanh(z_a)   u = sigmoid(z_u)   h' = u h + (1 - u) tanh(W x + b + a h)

N. Vecoven et al.: A bio-inspired bistable recurrent cell allows for long-lasting memory. PLOS ONE,
2021.

Notable: a unit is bistable where its feedback a exceeds 1.
"""

import torch

import lltm


@lltm.cell(gates=("a", "u", "x"), reads={"x": "x"}, bounded=True)
def nbr(z, h):
    a, u = 1 + torch.tanh(z.a), torch.sigmoid(z.u)
    return u * h + (1 - u) * torch.tanh(z.x + a * h)
