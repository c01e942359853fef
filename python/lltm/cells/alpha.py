"""Spiking neurons whose response to an input is the difference of two exponentials.

    e' = (1 - r) (alpha e + z_i)   i' = (1 - r) (beta i - z_i)   v' = k (e' + i')
    r = 1 if v > t, else 0         h' = 1 if v' > t, else 0      k = log alpha / log(beta/alpha) + 1

snnTorch's Alpha, reset to zero: J. K. Eshraghian, M. Ward, E. Neftci, X. Wang, G. Lenz,
G. Dwivedi, M. Bennamoun, D. S. Jeong, W. D. Lu: Training spiking neural networks using lessons from
deep learning. Proceedings of the IEEE, 2023. In backward, a spike is an arctangent, as in snnTorch.

Notable: not recurrent. The output is a tuple of h, e, i and v. k is computed once a call.
"""

import torch

import lltm

from ._spikes import Spike


@lltm.cell(
    gates=("i",),
    reads={"i": "x"},
    outputs=("h", "e", "i", "v"),
    parameters={"alpha": 0.9, "beta": 0.8, "threshold": lltm.scalar(1.0)},
    bounded=True,
)
def alpha(z, e, i, v, alpha, beta, threshold):
    alpha, beta = alpha.clamp(0, 1), beta.clamp(0, 1)
    k = torch.log(alpha) / (torch.log(beta) - torch.log(alpha)) + 1
    kept = 1 - Spike.apply(v - threshold).detach()
    e_next, i_next = kept * (alpha * e + z.i), kept * (beta * i - z.i)
    v_next = k * (e_next + i_next)
    return Spike.apply(v_next - threshold), e_next, i_next, v_next
