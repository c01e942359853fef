"""Minimal gated unit: a GRU whose one gate both resets and updates.

    f = sigmoid(z_f)   h' = (1 - f) h + f tanh(W x + b_x + f (U h + b_h))

G.-B. Zhou, J. Wu, C.-L. Zhang, Z.-H. Zhou: Minimal gated unit for recurrent neural networks.
International Journal of Automation and Computing, 2016.

Notable: the paper has U (f h), a GEMM whose input is a gate, which no cell can have here. This is
the form that torch.nn's GRU takes: the gate multiplies what the GEMM gives, and the candidate
needs what x gives (n_x) and what h gives (n_h) apart.
"""

import torch

import lltm


@lltm.cell(gates=("f", "n_x", "n_h"), reads={"n_x": "x", "n_h": "h"}, bounded=True)
def mgu(z, h):
    f = torch.sigmoid(z.f)
    return (1 - f) * h + f * torch.tanh(z.n_x + f * z.n_h)
