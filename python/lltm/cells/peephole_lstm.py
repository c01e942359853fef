"""LSTM with peepholes: the gates read the state c.

    i = sigmoid(z_i + p_i c)    f = sigmoid(z_f + p_f c)    c' = f c + i tanh(z_g)
    o = sigmoid(z_o + p_o c')   h' = o tanh(c')

F. A. Gers, J. Schmidhuber: Recurrent nets that time and count. IJCNN 2000. With tanh of c', as in
K. Greff et al.: LSTM: A search space odyssey, 2017.

Notable: the cell has parameters, one value per hidden unit. The output gate reads the new state.
"""

import torch

import lltm


@lltm.cell(
    gates=("i", "f", "g", "o"), parameters={"p_i": 0.0, "p_f": 0.0, "p_o": 0.0}, bounded=True
)
def peephole_lstm(z, c, p_i, p_f, p_o):
    i, f = torch.sigmoid(z.i + p_i * c), torch.sigmoid(z.f + p_f * c)
    c_next = f * c + i * torch.tanh(z.g)
    o = torch.sigmoid(z.o + p_o * c_next)
    return o * torch.tanh(c_next), c_next
