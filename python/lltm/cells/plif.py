"""PLIF, leaky integrate-and-fire neurons that learn their membrane time constant.

    u = v + sigmoid(w) (z_v - v)   h' = 1 if u > 1, else 0   v' = (1 - h') u

W. Fang, Z. Yu, Y. Chen, T. Masquelier, T. Huang, Y. Tian: Incorporating learnable membrane time
constant to enhance learning of spiking neural networks. ICCV 2021.

Notable: not recurrent. The output is a tuple of the spikes h and the potential v. A layer has a
single w, where sigmoid(w) = 1 / tau is computed once a call. The reset has a gradient.
"""

import torch

import lltm

from ._spikes import Spike


@lltm.cell(
    gates=("v",),
    reads={"v": "x"},
    outputs=("h", "v"),
    parameters={"w": lltm.scalar(0.0)},
    bounded=True,
)
def plif(z, v, w):
    inverse_tau = torch.sigmoid(w)
    u = v + inverse_tau * (z.v - v)
    spike = Spike.apply(u - 1)
    return spike, (1 - spike) * u
