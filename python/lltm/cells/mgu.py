"""Minimal gated unit: a GRU with a single gate for reset and update.

    f = sigmoid(z_f)   h' = (1 - f) h + f tanh(W x + b + U (f h))

G.-B. Zhou, J. Wu, C.-L. Zhang, Z.-H. Zhou: Minimal gated unit for recurrent neural networks.
International Journal of Automation and Computing, 2016.
"""

import torch

import lltm


@lltm.cell(gates=("f", "n"), reads={"n": ("x", "product")}, bounded=True)
def mgu(z, h):
    f = torch.sigmoid(z.f)
    return (1 - f) * h + f * torch.tanh(z.n(f * h))
