"""Leaky integrate-and-fire neurons of second order: a synaptic current s and a potential v.

    s' = alpha s + z_s   v' = beta v + s' - t (1 if v > t, else 0)   h' = 1 if v' > t, else 0

snnTorch's Synaptic, reset by subtraction: J. K. Eshraghian, M. Ward, E. Neftci, X. Wang, G. Lenz,
G. Dwivedi, M. Bennamoun, D. S. Jeong, W. D. Lu: Training spiking neural networks using lessons from
deep learning. Proceedings of the IEEE, 2023. In backward, a spike is an arctangent, as in snnTorch.

Notable: rsynaptic without the recurrent weights. The output is a tuple of h, s and v.
"""

import lltm

from ._spikes import Spike


@lltm.cell(
    gates=("s",),
    reads={"s": "x"},
    outputs=("h", "s", "v"),
    parameters={"alpha": 0.9, "beta": 0.8, "threshold": lltm.scalar(1.0)},
    bounded=True,
)
def synaptic(z, s, v, alpha, beta, threshold):
    reset = Spike.apply(v - threshold).detach()
    s_next = alpha.clamp(0, 1) * s + z.s
    v_next = beta.clamp(0, 1) * v + s_next - reset * threshold
    return Spike.apply(v_next - threshold), s_next, v_next
