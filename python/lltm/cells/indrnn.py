"""IndRNN: each hidden unit is recurrent only with itself.

    h' = relu(W x + b + u h)

S. Li, W. Li, C. Cook, C. Zhu, Y. Gao: Independently recurrent neural network (IndRNN): Building a
longer and deeper RNN. CVPR 2018.

Notable: the only gate depends only on x, so weight_hh is empty and steps have no GEMM. The
recurrent weight u is a parameter of the cell, initialized between 0 and 1. h' is not bounded.
"""

import torch

import lltm


@lltm.cell(gates=("x",), reads={"x": "x"}, parameters={"u": torch.nn.init.uniform_})
def indrnn(z, h, u):
    return torch.relu(z.x + u * h)
