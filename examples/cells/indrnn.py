"""IndRNN: each unit is recurrent with itself alone.

    h' = relu(W x + b + u h)

S. Li, W. Li, C. Cook, C. Zhu, Y. Gao: Independently recurrent neural network (IndRNN): Building a
longer and deeper RNN. CVPR 2018.

Notable: the one gate reads x alone, so that weight_hh is empty and no step has a GEMM; what is
recurrent is a parameter of the cell, drawn from 0 to 1 at first. h' is not bounded.
"""

import torch

import lltm


@lltm.cell(gates=("x",), reads={"x": "x"}, parameters={"u": torch.nn.init.uniform_})
def indrnn(z, h, u):
    return torch.relu(z.x + u * h)
