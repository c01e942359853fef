"""T-LSTM, time-aware LSTM: a part of c, its short-term memory, decays with the time step dt.

    s = tanh(U_d c + b_d)   k = c - s + s / log(e + dt)   c' = f k + i g   h' = o tanh(c')

I. M. Baytas, C. Xiao, X. Zhang, F. Wang, A. K. Jain, J. Zhou: Patient subtyping via time-aware LSTM
networks. KDD 2017.

Notable: dt is given, as the last H columns of the input.
"""

import math

import torch

import lltm

READS = {"d": "product", "dt": "input"}


@lltm.cell(gates=("i", "f", "g", "o", "d", "dt"), reads=READS, bounded=True)
def t_lstm(z, c):
    short = torch.tanh(z.d(c))
    kept = c - short + short / torch.log(math.e + torch.relu(z.dt))
    c_next = torch.sigmoid(z.f) * kept + torch.sigmoid(z.i) * torch.tanh(z.g)
    return torch.sigmoid(z.o) * torch.tanh(c_next), c_next
