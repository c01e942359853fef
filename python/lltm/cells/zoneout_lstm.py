"""LSTM with zoneout: random units keep their old h or c.

    c' = m_c c + (1 - m_c) c_lstm   h' = m_h h + (1 - m_h) o tanh(c_lstm)   c_lstm = f c + i g

D. Krueger et al.: Zoneout: Regularizing RNNs by randomly preserving hidden activations. ICLR 2017.

Notable: m_h and m_c are given, as the last 2 H columns of the input: zeros and ones in training,
the zoneout probability in evaluation.
"""

import torch

import lltm


@lltm.cell(gates=("i", "f", "g", "o", "m_h", "m_c"), reads={"m_h": "input", "m_c": "input"})
def zoneout_lstm(z, h, c):
    c_lstm = torch.sigmoid(z.f) * c + torch.sigmoid(z.i) * torch.tanh(z.g)
    h_lstm = torch.sigmoid(z.o) * torch.tanh(c_lstm)
    return torch.lerp(h_lstm, h, z.m_h), torch.lerp(c_lstm, c, z.m_c)
