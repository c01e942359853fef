"""MinimalRNN: x is embedded, and a single gate mixes the embedding into h.

    v = tanh(W x + b)   u = sigmoid(U_h h + U_v v + b_u)   h' = u h + (1 - u) v

M. Chen: MinimalRNN: Toward more interpretable and trainable recurrent neural networks. 2017.
"""

import torch

import lltm


@lltm.cell(gates=("v", "u", "w"), reads={"v": "x", "u": "h", "w": "product"}, bounded=True)
def minimal_rnn(z, h):
    v = torch.tanh(z.v)
    u = torch.sigmoid(z.u + z.w(v))
    return u * h + (1 - u) * v
