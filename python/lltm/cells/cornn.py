"""coRNN, coupled oscillatory RNN: each hidden unit is a damped, driven oscillator.

    v' = v + dt (tanh(W x + b + U h + V v) - gamma h - epsilon v)   h' = h + dt v'

T. K. Rusch, S. Mishra: Coupled oscillatory recurrent neural network (coRNN): An accurate and
(gradient) stable architecture for learning long time dependencies. ICLR 2021.

Notable: a GEMM of each state. dt, gamma and epsilon are parameters.
"""

import torch

import lltm

INITIAL = {"dt": 0.1, "gamma": 1.0, "epsilon": 1.0}


@lltm.cell(gates=("h", "v"), reads={"v": "product"}, parameters=INITIAL)
def cornn(z, h, v, dt, gamma, epsilon):
    v_next = v + dt * (torch.tanh(z.h + z.v(v)) - gamma * h - epsilon * v)
    return h + dt * v_next, v_next
