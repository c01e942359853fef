"""ATR, addition-subtraction twin-gated network: both gates share their two GEMMs.

    p = W x + b_x   q = U h + b_h   h' = sigmoid(p + q) p + sigmoid(p - q) h

B. Zhang et al.: Simplifying neural machine translation with addition-subtraction twin-gated
recurrent networks. EMNLP 2018.

Notable: as many weights as an RNN without gates.
"""

import torch

import lltm


@lltm.cell(gates=("p", "q"), reads={"p": "x", "q": "h"})
def atr(z, h):
    return torch.sigmoid(z.p + z.q) * z.p + torch.sigmoid(z.p - z.q) * h
