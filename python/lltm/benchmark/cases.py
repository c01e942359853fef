"""What is measured: shapes, and a case of a shape, a dtype and a direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..modules import GATES

Shape = tuple[int, ...]  # (B, I, H) or (T, B, I, H)

TUTORIAL_SHAPE: Shape = (16, 32, 128)
LOOP_SHAPE: Shape = (100, 16, 32, 128)  # the one whose plain loop is compiled
SHAPES: tuple[Shape, ...] = (
    TUTORIAL_SHAPE,
    (1, 32, 128),
    (128, 512, 512),
    LOOP_SHAPE,
    (100, 64, 128, 256),
    (100, 1, 128, 256),
    (50, 128, 512, 512),
    (100, 3, 50, 75),
    (40, 256, 96, 200),
    (200, 1, 16, 65),
)
QUICK_SHAPES: tuple[Shape, ...] = (TUTORIAL_SHAPE, (20, 16, 32, 65))


@dataclass(frozen=True)
class Case:
    """A shape, a dtype and a direction; what one row of results is about."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    training: bool = False
    device: str = "cpu"

    @property
    def is_step(self) -> bool:
        return len(self.shape) == 3

    @property
    def steps(self) -> int:
        return 1 if self.is_step else self.shape[0]

    @property
    def weights(self) -> int:
        """The number of elements of an LLTM's weights."""
        input_size, hidden = self.shape[-2:]
        return GATES * hidden * (input_size + hidden)

    @property
    def flops(self) -> float:
        """FLOP of the matrix products of an LLTM.

        The backward pass has as many for the gradient of the weights as the forward pass, and in a
        sequence as many again for those of h and input.
        """
        passes = 1 if not self.training else 2 if self.is_step else 3
        return passes * 2 * self.steps * self.shape[-3] * self.weights

    def __str__(self) -> str:
        work = "one step" if self.is_step else "sequence"
        direction = "training" if self.training else "inference"
        sizes = zip("BIH" if self.is_step else "TBIH", self.shape, strict=True)
        shape = " ".join(f"{letter}={size}" for letter, size in sizes)
        return f"{work}, {direction}, {shape}, {str(self.dtype).removeprefix('torch.')}"
