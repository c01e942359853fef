"""Multiplicative LSTM: the gates read m, a product of x and h, instead of h.

    m = (W_m x) (U_m h)   i, f, o = sigmoid(W x + U m)   g = tanh(W_g x + U_g m)
    c' = f c + i g   h' = o tanh(c')

B. Krause, L. Lu, I. Murray, S. Renals: Multiplicative LSTM for sequence modelling. 2016.
"""

import torch

import lltm

READS = {"x": "x", "h": "h", **dict.fromkeys(("i", "f", "g", "o"), ("x", "product"))}


@lltm.cell(gates=("x", "i", "f", "g", "o", "h"), reads=READS, bounded=True)
def multiplicative_lstm(z, c):
    m = z.x * z.h
    i, f, o = torch.sigmoid(z.i(m)), torch.sigmoid(z.f(m)), torch.sigmoid(z.o(m))
    c_next = f * c + i * torch.tanh(z.g(m))
    return o * torch.tanh(c_next), c_next
