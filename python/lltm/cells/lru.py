"""LRU, linear recurrent unit: a complex diagonal recurrence.

    (h', i') = lambda (h, i) + gamma (z_h, z_i)   lambda = exp(-exp(nu) + i exp(theta))

A. Orvieto, S. L. Smith, A. Gu, A. Fernando, C. Gulcehre, R. Pascanu, S. De: Resurrecting recurrent
neural networks for long sequences. ICML 2023.

Notable: the output is a tuple of the real part h and the imaginary part i, from which another layer
computes Re(C (h, i)) + D x. lambda and gamma = sqrt(1 - |lambda|^2) are computed once a call; the
paper starts with this gamma and learns it.
"""

import math

import torch

import lltm


def ring(nu):
    """|lambda| is between 0.5 and 0.99, uniform in its disk."""
    return torch.log(-0.5 * torch.empty_like(nu).uniform_(0.5**2, 0.99**2).log())


def phase(theta):
    return torch.empty_like(theta).uniform_(1e-3, 2 * math.pi).log()


@lltm.cell(
    gates=("h", "i"),
    reads={"h": "x", "i": "x"},
    outputs=("h", "i"),
    parameters={"nu": ring, "theta": phase},
)
def lru(z, h, i, nu, theta):
    size, angle = torch.exp(-torch.exp(nu)), torch.exp(theta)
    a, b, gamma = size * torch.cos(angle), size * torch.sin(angle), torch.sqrt(1 - size**2)
    return a * h - b * i + gamma * z.h, a * i + b * h + gamma * z.i
