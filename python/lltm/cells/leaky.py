"""Leaky integrate-and-fire neurons of first order.

    v' = beta v + z_v - t (1 if v > t, else 0)   h' = 1 if v' > t, else 0

snnTorch's Leaky, reset by subtraction: J. K. Eshraghian, M. Ward, E. Neftci, X. Wang, G. Lenz,
G. Dwivedi, M. Bennamoun, D. S. Jeong, W. D. Lu: Training spiking neural networks using lessons from
deep learning. Proceedings of the IEEE, 2023. In backward, a spike is an arctangent, as in snnTorch.

Notable: not recurrent; rsynaptic is. The output is a tuple of the spikes h and the potential v.
"""

import lltm

from ._spikes import Spike


@lltm.cell(
    gates=("v",),
    reads={"v": "x"},
    outputs=("h", "v"),
    parameters={"beta": 0.9, "threshold": lltm.scalar(1.0)},
    bounded=True,
)
def leaky(z, v, beta, threshold):
    reset = Spike.apply(v - threshold).detach()
    v_next = beta.clamp(0, 1) * v + z.v - reset * threshold
    return Spike.apply(v_next - threshold), v_next
