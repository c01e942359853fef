"""LiGRU, the light GRU: without a reset gate, and with ReLU.

    u = sigmoid(z_u)   h' = u h + (1 - u) relu(z_n)

M. Ravanelli, P. Brakel, M. Omologo, Y. Bengio: Light gated recurrent units for speech recognition.
IEEE Transactions on Emerging Topics in Computational Intelligence, 2018.

Notable: the paper normalises W x over the batch, which keeps ReLU in check; a cell computes each
element alone, so this one does not. h' is not bounded.
"""

import torch

import lltm


@lltm.cell(gates=("u", "n"))
def ligru(z, h):
    u = torch.sigmoid(z.u)
    return u * h + (1 - u) * torch.relu(z.n)
