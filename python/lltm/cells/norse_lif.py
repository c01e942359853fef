"""norse's LIF: recurrent leaky integrate-and-fire neurons with currents and time constants.

    s = i + z_i   u = v + dt tau_mem_inv (v_leak - v + s)   i' = s - dt tau_syn_inv s
    h' = 1 if u > v_th, else 0   v' = (1 - h') u + h' v_reset

C. Pehle, J. E. Pedersen: Norse: A deep learning library for spiking neural networks. 2021. In
backward, dh'/du = 1 / (1 + |u - v_th|)^2, as norse computes SuperSpike.

Notable: the output is a tuple of the spikes h, the potential v and the current i. dt is 1 ms. The
time constants and voltages are parameters with a single value.
"""

import lltm

from ._spikes import SuperSpike

INITIAL = {"tau_syn_inv": 200, "tau_mem_inv": 100, "v_leak": 0, "v_th": 1, "v_reset": 0}


@lltm.cell(
    gates=("i",),
    outputs=("h", "v", "i"),
    parameters={name: lltm.scalar(value) for name, value in INITIAL.items()},
    bounded=True,
)
def norse_lif(z, v, i, tau_syn_inv, tau_mem_inv, v_leak, v_th, v_reset):
    jump = i + z.i
    u = v + 1e-3 * tau_mem_inv * (v_leak - v + jump)
    spike = SuperSpike.apply(u - v_th)
    fired = spike.detach()
    return spike, (1 - fired) * u + fired * v_reset, jump - 1e-3 * tau_syn_inv * jump
