"""RG-LRU, real-gated linear recurrent unit, of Griffin and RecurrentGemma.

    r, i = sigmoid(z_r, z_i)   a = exp(-8 softplus(alpha) r)   h' = a h + sqrt(1 - a^2) i v

S. De et al.: Griffin: Mixing gated linear recurrences with local attention for efficient language
models. 2024.

Notable: v is given, as the last H columns of the input; in the papers, x = v. softplus(alpha) is
computed once a call. The first step of RecurrentGemma omits sqrt(1 - a^2).
"""

import torch
import torch.nn.functional as F

import lltm

READS = {"r": "x", "i": "x", "v": "input"}


def initial(alpha):
    """Sets a, for r = 1, to a random value between 0.9 and 0.999."""
    a = torch.empty_like(alpha).uniform_(0.9**2, 0.999**2).sqrt()
    return torch.log(torch.expm1(-a.log() / 8))


@lltm.cell(gates=("r", "i", "v"), reads=READS, parameters={"alpha": initial})
def rg_lru(z, h, alpha):
    rate = 8 * F.softplus(alpha)
    log_a = -rate * torch.sigmoid(z.r)
    gain = torch.sqrt(-torch.expm1(2 * log_a))
    return torch.exp(log_a) * h + gain * torch.sigmoid(z.i) * z.v
