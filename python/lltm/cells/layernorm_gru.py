"""GRU with layer normalization: norm(v) is the layer norm of v over the hidden units.

    r = sigmoid(a_r norm(z_r) + b_r), in the same way u   v(z) = a norm(z) + b
    n = tanh(v(z_n_x) + r v(z_n_h))   h' = (1 - u) n + u h

J. L. Ba, J. R. Kiros, G. E. Hinton: Layer normalization. 2016.

Notable: r and u have one norm of the sum of their terms from x and h, as in layernorm_lstm. The
paper normalizes the terms separately.
"""

import torch

import lltm

GATES = ("r", "u", "n_x", "n_h")
READS = {"n_x": "x", "n_h": "h"}
INITIAL = {f"a_{gate}": 1.0 for gate in GATES} | {f"b_{gate}": 0.0 for gate in GATES}


@lltm.cell(gates=GATES, reads=READS, parameters=INITIAL, bounded=True)
def layernorm_gru(z, h, a_r, a_u, a_n_x, a_n_h, b_r, b_u, b_n_x, b_n_h):
    r, u, n_x, n_h = map(lltm.layer_norm, z)
    r, u = torch.sigmoid(a_r * r + b_r), torch.sigmoid(a_u * u + b_u)
    n = torch.tanh(a_n_x * n_x + b_n_x + r * (a_n_h * n_h + b_n_h))
    return (1 - u) * n + u * h
