"""UGRNN: an update gate between the old h and the h of a tanh RNN.

    g = sigmoid(z_g)   h' = g h + (1 - g) tanh(z_c)

J. Collins, J. Sohl-Dickstein, D. Sussillo: Capacity and trainability in recurrent neural networks.
ICLR 2017.

Notable: the smallest gated cell, with two GEMM blocks instead of the GRU's three.
"""

import torch

import lltm


@lltm.cell(gates=("c", "g"), bounded=True)
def ugrnn(z, h):
    g = torch.sigmoid(z.g)
    return g * h + (1 - g) * torch.tanh(z.c)
