"""minLSTM: an LSTM whose gates depend only on x, with forget and input gates that add up to 1.

    f = sigmoid(W_f x + b_f)   i = sigmoid(W_i x + b_i)   h' = (f h + i (W_n x + b_n)) / (f + i)

L. Feng et al.: Were RNNs all we needed? 2024.
"""

import torch

import lltm


@lltm.cell(gates=("f", "i", "n"), reads={"f": "x", "i": "x", "n": "x"})
def minlstm(z, h):
    f, i = torch.sigmoid(z.f), torch.sigmoid(z.i)
    return (f * h + i * z.n) / (f + i)
