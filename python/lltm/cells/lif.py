"""Recurrent leaky integrate-and-fire neurons, learned by a surrogate gradient.

    v' = 0.9 v + z_v - h   h' = 1 if v' > 1, else 0; backward, dh'/dv' = 1 / (1 + 10 |v' - 1|)^2

E. O. Neftci, H. Mostafa, F. Zenke: Surrogate gradient learning in spiking neural networks. IEEE
Signal Processing Magazine, 2019; the surrogate is SuperSpike's: F. Zenke, S. Ganguli: SuperSpike:
Supervised learning in multilayer spiking neural networks. Neural Computation, 2018.

Notable: the output is a tuple of the spikes h and the membrane potential v of every step. The cell
calls a torch.autograd.Function, whose backward is traced. The reset, the element-wise effect of h
on v', has no gradient.
"""

import lltm

from ._spikes import SuperSpike


@lltm.cell(gates=("v",), outputs=("h", "v"), bounded=True)
def lif(z, h, v):
    v_next = 0.9 * v + z.v - h.detach()
    return SuperSpike.apply(v_next - 1, 10), v_next
