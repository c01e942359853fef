"""The cell on one page: its gates, what forward saves for backward, and the arithmetic of both.

The counterpart of cpp/src/cell/cell.h in PyTorch's operations. H hidden units: the weights have
GATES * H rows, gate k of unit j is column k * H + j of the pre-activations
z = [h, input] weights^T + bias, and what is saved is laid out the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = 3  # input gate, output gate, candidate
SAVED = 4  # i, o, g, tanh(c')

Tensors = tuple[Tensor, ...]


def forward(z: Sequence[Tensor], c: Tensor) -> tuple[Tensor, Tensor, Tensors]:
    """Returns h', c' and what is saved, each (rows, H), as `c` and each gate of `z` are."""
    i = torch.sigmoid(z[0])
    o = torch.sigmoid(z[1])
    g = F.elu(z[2])
    c_next = c + i * g
    tanh_c = torch.tanh(c_next)
    return o * tanh_c, c_next, (i, o, g, tanh_c)


def backward(saved: Sequence[Tensor], dh: Tensor, dc_next: Tensor) -> tuple[Tensors, Tensor]:
    """Returns the gradients of `z` and of `c`; dh and dc_next are those of h' and c'."""
    i, o, g, tanh_c = saved
    dc = dc_next + dh * o * (1 - tanh_c * tanh_c)
    dz_i = dc * g * (i * (1 - i))
    dz_o = dh * tanh_c * (o * (1 - o))
    # A tensor of ones, since Core ATen selects between tensors only.
    dz_g = dc * i * torch.where(g > 0, torch.ones_like(g), g + 1)
    return (dz_i, dz_o, dz_g), dc
