"""ALIF: recurrent integrate-and-fire neurons whose threshold b rises with each spike (LSNN).

    u = v + dt tau_mem_inv (v_leak - v + i)   d = b + dt tau_adapt_inv (v_th - b)
    h' = 1 if u > d, else 0   v' = (1 - h') u + h' v_reset   b' = d + beta h'
    i' = (1 - dt tau_syn_inv) i + z_i

G. Bellec, D. Salaj, A. Subramoney, R. Legenstein, W. Maass: Long short-term memory and learning-to-
learn in networks of spiking neurons. NeurIPS 2018; the equations of norse's LSNN.

Notable: the output is a tuple of the spikes h, the potential v, the current i and the threshold b.
"""

import lltm

from ._spikes import SuperSpike
from .norse_lif import INITIAL

ADAPTING = {**INITIAL, "tau_adapt_inv": 1 / 800, "beta": 1.8}


@lltm.cell(
    gates=("i",),
    states={"b": 1.0},
    outputs=("h", "v", "i", "b"),
    parameters={name: lltm.scalar(value) for name, value in ADAPTING.items()},
    bounded=True,
)
def alif(z, v, i, b, tau_syn_inv, tau_mem_inv, v_leak, v_th, v_reset, tau_adapt_inv, beta):
    u = v + 1e-3 * tau_mem_inv * (v_leak - v + i)
    d = b + 1e-3 * tau_adapt_inv * (v_th - b)
    spike = SuperSpike.apply(u - d)
    fired = spike.detach()
    i_next = i - 1e-3 * tau_syn_inv * i + z.i
    return spike, (1 - fired) * u + fired * v_reset, i_next, d + fired * beta
