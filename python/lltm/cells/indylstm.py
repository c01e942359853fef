"""IndyLSTM: an LSTM in which each hidden unit is recurrent only with itself.

    i = sigmoid(z_i + u_i h), in the same way f, o, and g with tanh   c' = f c + i g
    h' = o tanh(c')

P. Gonnet, T. Deselaers: IndyLSTMs: Independently recurrent LSTMs. ICASSP 2020.

Notable: the gates depend only on x, so weight_hh is empty and steps have no GEMM. The recurrent
weights are parameters of the cell.
"""

import torch

import lltm

GATES = ("i", "f", "g", "o")
READS = dict.fromkeys(GATES, "x")
INITIAL = {f"u_{gate}": 0.0 for gate in GATES}


@lltm.cell(gates=GATES, reads=READS, parameters=INITIAL, bounded=True)
def indylstm(z, h, c, u_i, u_f, u_g, u_o):
    i, f = torch.sigmoid(z.i + u_i * h), torch.sigmoid(z.f + u_f * h)
    c_next = f * c + i * torch.tanh(z.g + u_g * h)
    return torch.sigmoid(z.o + u_o * h) * torch.tanh(c_next), c_next
