"""JANET, just another network: an LSTM with only a forget gate.

    h' = sigmoid(z_f) h + (1 - sigmoid(z_f - 1)) tanh(z_g)

J. van der Westhuizen, J. Lasenby: The unreasonable effectiveness of the forget gate. 2018.

Notable: h is the only state. The factors of old and new values add up to more than 1, so |h'| may
exceed 1: not bounded. The paper initializes the biases of f to the log of times up to the longest.
"""

import torch

import lltm


@lltm.cell(gates=("f", "g"))
def janet(z, h):
    f, taken = torch.sigmoid(z.f), 1 - torch.sigmoid(z.f - 1)
    return f * h + taken * torch.tanh(z.g)
