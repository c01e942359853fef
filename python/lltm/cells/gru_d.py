"""GRU-D: a GRU for sequences with missing values, whose h decays with the time between values.

    k = exp(-relu(z_d)) h   r, u = sigmoid(z_r, z_u)   n = tanh(W_n x + b + U_n (r k))
    h' = (1 - u) k + u n    z_r and z_u multiply k by the recurrent weights

Z. Che, S. Purushotham, K. Cho, D. Sontag, Y. Liu: Recurrent neural networks for multivariate time
series with missing values. Scientific Reports, 2018.

Notable: x consists of the values, filled in where they are missing, their mask, and the times since
the last values, from which the paper computes z_d. Filling in does not depend on h.
"""

import torch

import lltm

READS = {"d": "x", **dict.fromkeys(("r", "u", "n"), ("x", "product"))}


@lltm.cell(gates=("d", "r", "u", "n"), reads=READS, bounded=True)
def gru_d(z, h):
    kept = torch.exp(-torch.relu(z.d)) * h
    r, u = torch.sigmoid(z.r(kept)), torch.sigmoid(z.u(kept))
    return (1 - u) * kept + u * torch.tanh(z.n(r * kept))
