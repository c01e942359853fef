"""sLSTM: an LSTM with exponential gates, a normalizer n and a stabilizer m.

    m' = max(log f + m, z_i)   c' = exp(log f + m - m') c + exp(z_i - m') tanh(z_z)
    h' = sigmoid(z_o) c' / n'  n' = exp(log f + m - m') n + exp(z_i - m')    log f = logsigmoid(z_f)

M. Beck, K. Pöppel, M. Spanring, A. Auer, O. Prudnikova, M. Kopp, G. Klambauer, J. Brandstetter,
S. Hochreiter: xLSTM: Extended long short-term memory. NeurIPS 2024.

Notable: three states in addition to h. m cancels in c' / n', so it has no gradient; its initial
value -inf makes the first step forget the initial state. With `heads=` of the layer, the recurrent
weights have a block per head, as in the paper.
"""

import math

import torch
from torch.nn.functional import logsigmoid

import lltm


@lltm.cell(gates=("i", "f", "z", "o"), states={"m": -math.inf}, bounded=True)
def slstm(z, c, n, m):
    kept = logsigmoid(z.f) + m.detach()
    m_next = torch.maximum(kept, z.i).detach()
    f, i = torch.exp(kept - m_next), torch.exp(z.i - m_next)
    c_next, n_next = f * c + i * torch.tanh(z.z), f * n + i
    return torch.sigmoid(z.o) * c_next / n_next, c_next, n_next, m_next
