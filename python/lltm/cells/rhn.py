"""RHN, recurrent highway network: a step is a highway network, here of three layers.

    n = tanh(z_n)   u = sigmoid(z_u)   s' = u n + (1 - u) s   in each layer, from s = h to h' = s'

J. G. Zilly, R. K. Srivastava, J. Koutník, J. Schmidhuber: Recurrent highway networks. ICML 2017.

Notable: only the first layer reads x. The gates of each later layer share a GEMM of s.
"""

import torch

import lltm

LATER = ("n_2", "u_2", "n_3", "u_3")


@lltm.cell(gates=("n_1", "u_1", *LATER), reads=dict.fromkeys(LATER, "product"), bounded=True)
def rhn(z, h):
    s = torch.lerp(h, torch.tanh(z.n_1), torch.sigmoid(z.u_1))
    s = torch.lerp(s, torch.tanh(z.n_2(s)), torch.sigmoid(z.u_2(s)))
    return torch.lerp(s, torch.tanh(z.n_3(s)), torch.sigmoid(z.u_3(s)))
