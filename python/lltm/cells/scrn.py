"""SCRN, structurally constrained RNN: a slow context s next to the hidden state.

    s' = (1 - alpha) (W_s x + b_s) + alpha s   h' = sigmoid(W x + b + U h + V s')

T. Mikolov et al.: Learning longer memory in recurrent neural networks. 2014.

Notable: a GEMM of the new context s'. Its decay alpha is a parameter.
"""

import torch

import lltm

READS = {"s": "x", "v": "product"}


@lltm.cell(gates=("s", "h", "v"), reads=READS, parameters={"alpha": 0.95}, bounded=True)
def scrn(z, s, alpha):
    s_next = (1 - alpha) * z.s + alpha * s
    return torch.sigmoid(z.h + z.v(s_next)), s_next
