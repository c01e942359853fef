"""CFN, chaos-free network: without input, h decays to 0.

    f = sigmoid(z_f)   i = sigmoid(z_i)   h' = f tanh(h) + i tanh(W x + b)

T. Laurent, J. von Brecht: A recurrent neural network without chaos. ICLR 2017.
"""

import torch

import lltm


@lltm.cell(gates=("f", "i", "x"), reads={"x": "x"})
def cfn(z, h):
    f, i = torch.sigmoid(z.f), torch.sigmoid(z.i)
    return f * torch.tanh(h) + i * torch.tanh(z.x)
