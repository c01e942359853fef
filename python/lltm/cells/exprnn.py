"""expRNN: an orthogonal recurrent matrix, the exponential of a skew-symmetric one, and modReLU.

    h' = sign(z) relu(|z| + b)

M. Lezcano-Casado, D. Martínez-Rubio: Cheap orthogonal constraints in neural networks: A simple
parametrization of the orthogonal and unitary group. ICML 2019.

Notable: a parametrization of PyTorch makes the matrix orthogonal. It runs once a call::

    orthogonal = torch.nn.utils.parametrizations.orthogonal
    orthogonal(layer, "weight_hh_l0", orthogonal_map="matrix_exp")

The paper has no biases other than b: use ``bias=False``.
"""

import torch

import lltm


@lltm.cell(gates=("h",), parameters={"b": 0.0})
def exprnn(z, b):
    return torch.sign(z.h) * torch.relu(z.h.abs() + b)
