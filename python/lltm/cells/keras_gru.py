"""The original GRU, whose reset gate multiplies h before the GEMM.

    u = sigmoid(z_u)   r = sigmoid(z_r)   n = tanh(W_n x + b + U_n (r h))   h' = u h + (1 - u) n

K. Cho et al.: Learning phrase representations using RNN encoder-decoder for statistical machine
translation. EMNLP 2014.

Notable: GRU(reset_after=False) in Keras. In ONNX, GRU with linear_before_reset=0: W, R and the
halves of B are the weights and biases here.
"""

import torch

import lltm


@lltm.cell(gates=("u", "r", "n"), reads={"n": ("x", "product")}, bounded=True)
def keras_gru(z, h):
    u, r = torch.sigmoid(z.u), torch.sigmoid(z.r)
    return u * h + (1 - u) * torch.tanh(z.n(r * h))
