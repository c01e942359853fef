"""Minimal gated unit: a GRU with a single gate for reset and update.

    f = sigmoid(z_f)   h' = (1 - f) h + f tanh(W x + b_x + f (U h + b_h))

G.-B. Zhou, J. Wu, C.-L. Zhang, Z.-H. Zhou: Minimal gated unit for recurrent neural networks.
International Journal of Automation and Computing, 2016.

Notable: the paper has U (f h), a GEMM that reads a gate, which cells do not support. As in
torch.nn's GRU, the gate multiplies the GEMM's result instead, and the candidate needs the
contributions of x (n_x) and h (n_h) separately.
"""

import torch

import lltm


@lltm.cell(gates=("f", "n_x", "n_h"), reads={"n_x": "x", "n_h": "h"}, bounded=True)
def mgu(z, h):
    f = torch.sigmoid(z.f)
    return (1 - f) * h + f * torch.tanh(z.n_x + f * z.n_h)
