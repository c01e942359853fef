"""Recurrent spiking neurons of second order: a synaptic current and a membrane potential.

    s' = alpha s + z_s   v' = beta v + s' - (1 if v > 1, else 0)   h' = 1 if v' > 1, else 0

snnTorch's RSynaptic, reset by subtraction: J. K. Eshraghian, M. Ward, E. Neftci, X. Wang, G. Lenz,
G. Dwivedi, M. Bennamoun, D. S. Jeong, W. D. Lu: Training spiking neural networks using lessons from
deep learning. Proceedings of the IEEE, 2023. In backward, a spike is an arctangent, as in snnTorch.

Notable: the output is a tuple of the spikes h, the current s and the potential v of every step, as
snnTorch returns them. Learned decays, one alpha and one beta per hidden unit, clamped to [0, 1].
"""

import lltm

from ._spikes import Spike


@lltm.cell(
    gates=("s",), outputs=("h", "s", "v"), parameters={"alpha": 0.9, "beta": 0.8}, bounded=True
)
def rsynaptic(z, s, v, alpha, beta):
    s_next = alpha.clamp(0, 1) * s + z.s
    v_next = beta.clamp(0, 1) * v + s_next - Spike.apply(v - 1).detach()
    return Spike.apply(v_next - 1), s_next, v_next
