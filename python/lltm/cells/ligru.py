"""LiGRU, the light GRU: without a reset gate, and with ReLU.

    u = sigmoid(z_u)   h' = u h + (1 - u) relu(z_n)

M. Ravanelli, P. Brakel, M. Omologo, Y. Bengio: Light gated recurrent units for speech recognition.
IEEE Transactions on Emerging Topics in Computational Intelligence, 2018.

Notable: the paper normalizes W x over the batch, to limit the ReLU. A cell computes each batch
element separately, so this cell does not. h' is not bounded.
"""

import torch

import lltm


@lltm.cell(gates=("u", "n"))
def ligru(z, h):
    u = torch.sigmoid(z.u)
    return u * h + (1 - u) * torch.relu(z.n)
