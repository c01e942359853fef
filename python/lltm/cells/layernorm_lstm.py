"""LSTM with layer normalization: norm(v) is the layer norm of v over the hidden units.

    i = sigmoid(a_i norm(z_i) + b_i), in the same way f, o, and g with tanh
    c' = f c + i g   h' = o tanh(norm(c'))

J. L. Ba, J. R. Kiros, G. E. Hinton: Layer normalization. 2016.

Notable: each gate has a norm with gain and shift. c' has a norm without them.
"""

import torch

import lltm

GATES = ("i", "f", "g", "o")
INITIAL = {f"a_{gate}": 1.0 for gate in GATES} | {f"b_{gate}": 0.0 for gate in GATES}


@lltm.cell(gates=GATES, parameters=INITIAL, bounded=True)
def layernorm_lstm(z, c, a_i, a_f, a_g, a_o, b_i, b_f, b_g, b_o):
    i, f, g, o = map(lltm.layer_norm, (z.i, z.f, z.g, z.o))
    i, f, o = (torch.sigmoid(v) for v in (a_i * i + b_i, a_f * f + b_f, a_o * o + b_o))
    c_next = f * c + i * torch.tanh(a_g * g + b_g)
    return o * torch.tanh(lltm.layer_norm(c_next)), c_next
