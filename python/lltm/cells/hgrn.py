"""HGRN, hierarchically gated recurrent network: a complex state and forget gates with lower bounds.

    f = gamma + (1 - gamma) sigmoid(z_f)   (h', i') = f e^(i theta) (h, i) + (1 - f) silu(z_h, z_i)

Z. Qin, S. Yang, Y. Zhong: Hierarchically gated recurrent neural network for sequence modeling.
NeurIPS 2023.

Notable: the output is a tuple of the real part h and the imaginary part i. All gates depend only on
x. cos(theta) and sin(theta) are computed once a call. The paper derives gamma from all layers.
"""

import torch
import torch.nn.functional as F

import lltm

READS = dict.fromkeys(("f", "h", "i"), "x")
INITIAL = {"theta": 0.0, "gamma": 0.0}


@lltm.cell(gates=("f", "h", "i"), reads=READS, outputs=("h", "i"), parameters=INITIAL)
def hgrn(z, h, i, theta, gamma):
    f = gamma + (1 - gamma) * torch.sigmoid(z.f)
    a, b = torch.cos(theta), torch.sin(theta)
    h_next = f * (a * h - b * i) + (1 - f) * F.silu(z.h)
    return h_next, f * (a * i + b * h) + (1 - f) * F.silu(z.i)
