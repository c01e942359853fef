"""CfC, closed-form continuous-time network, for sequences with time steps dt.

    v = 1.7159 tanh(0.666 z_v)   s = sigmoid((U_a v + b_a) dt + U_b v + b_b)
    h' = (1 - s) tanh(U_f v + b_f) + s tanh(U_g v + b_g)

R. Hasani et al.: Closed-form continuous-time neural networks. Nature Machine Intelligence, 2022.

Notable: dt is given, as the last H columns of the input. The backbone v has H units.
"""

import torch

import lltm

READS = {**dict.fromkeys(("f", "g", "a", "b"), "product"), "dt": "input"}


@lltm.cell(gates=("v", "f", "g", "a", "b", "dt"), reads=READS, bounded=True)
def cfc(z):
    v = 1.7159 * torch.tanh(0.666 * z.v)
    s = torch.sigmoid(z.a(v) * z.dt + z.b(v))
    return (1 - s) * torch.tanh(z.f(v)) + s * torch.tanh(z.g(v))
