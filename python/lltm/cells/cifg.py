"""CIFG: an LSTM whose input and forget gates are coupled.

    i = sigmoid(z_i)   c' = (1 - i) c + i tanh(z_g)   h' = sigmoid(z_o) tanh(c')

K. Greff, R. K. Srivastava, J. Koutník, B. R. Steunebrink, J. Schmidhuber: LSTM: A search space
odyssey. IEEE Transactions on Neural Networks and Learning Systems, 2017 (with peepholes).

Notable: three gates instead of four, and |c'| <= 1.
"""

import torch

import lltm


@lltm.cell(gates=("i", "g", "o"), bounded=True)
def cifg(z, c):
    i, g, o = torch.sigmoid(z.i), torch.tanh(z.g), torch.sigmoid(z.o)
    c_next = (1 - i) * c + i * g
    return o * torch.tanh(c_next), c_next
