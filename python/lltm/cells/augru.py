"""AUGRU: a GRU whose update gate is multiplied by an attention score a.

    r, u = sigmoid(z_r, z_u)   n = tanh(z_n_x + r z_n_h)   h' = (1 - a u) h + a u n

G. Zhou et al.: Deep interest evolution network for click-through rate prediction. AAAI 2019.

Notable: a is given, as the last H columns of the input.
"""

import torch

import lltm


@lltm.cell(gates=("r", "u", "n_x", "n_h", "a"), reads={"n_x": "x", "n_h": "h", "a": "input"})
def augru(z, h):
    r, u = torch.sigmoid(z.r), z.a * torch.sigmoid(z.u)
    return (1 - u) * h + u * torch.tanh(z.n_x + r * z.n_h)
