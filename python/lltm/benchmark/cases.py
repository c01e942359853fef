from __future__ import annotations

from dataclasses import dataclass

import torch

Shape = tuple[int, ...]  # (B, I, H) or (T, B, I, H)

GATES = {"gru": 3, "lstm": 4, "lltm": 3}  # number of gates with rows in the weights

TUTORIAL_SHAPE: Shape = (16, 32, 128)
LOOP_SHAPE: Shape = (100, 16, 32, 128)  # --compile compiles the Python loop of only this sequence
SHAPES: tuple[Shape, ...] = (
    *(TUTORIAL_SHAPE, (1, 32, 128), (128, 512, 512), LOOP_SHAPE, (100, 64, 128, 256)),
    *((100, 1, 128, 256), (50, 128, 512, 512), (100, 3, 50, 75), (40, 256, 96, 200)),
    (200, 1, 16, 65),
)
QUICK_SHAPES: tuple[Shape, ...] = (TUTORIAL_SHAPE, (20, 16, 32, 65))


@dataclass(frozen=True)
class Case:
    """A measured case: a cell, a shape, a dtype, and training or inference.

    The sequences of a packed batch have lengths from T down to T / 4.
    """

    shape: Shape
    dtype: torch.dtype = torch.float32
    training: bool = False
    device: str = "cpu"
    cell: str = "lltm"
    layers: int = 1
    directions: int = 1
    packed: bool = False

    @property
    def is_step(self) -> bool:
        return len(self.shape) == 3

    @property
    def steps(self) -> int:
        return 1 if self.is_step else self.shape[0]

    @property
    def lengths(self) -> list[int]:
        spread = 3 * self.steps // 4 if self.packed else 0
        batch = self.shape[-3]
        return [self.steps - spread * k // max(1, batch - 1) for k in range(batch)]

    @property
    def module(self) -> str:
        return self.cell.upper() + ("Cell" if self.is_step else "")

    @property
    def baseline(self) -> str:
        """The torch.nn baseline; for the LLTM, the LSTM."""
        return self.module.replace("LLTM", "LSTM")

    @property
    def weights(self) -> int:
        """Number of weight elements."""
        input_size, hidden = self.shape[-2:]
        inputs = input_size + (self.layers - 1) * self.directions * hidden
        return self.directions * GATES[self.cell] * hidden * (inputs + self.layers * hidden)

    @property
    def flops(self) -> float:
        """FLOP of the GEMMs.

        The weight gradients need as many FLOP as the forward pass. In a sequence, the gradients of
        h and the input need as many again.
        """
        passes = 1 if not self.training else 2 if self.is_step else 3
        return passes * 2 * sum(self.lengths) * self.weights

    def __str__(self) -> str:
        work = f"{self.cell.upper()} {'one step' if self.is_step else 'sequence'}"
        direction = "training" if self.training else "inference"
        sizes = zip("BIH" if self.is_step else "TBIH", self.shape, strict=True)
        shape = " ".join(f"{letter}={size}" for letter, size in sizes)
        form = ", packed" * self.packed + ", bidirectional" * (self.directions == 2)
        form += f", {self.layers} layers" * (self.layers > 1)
        return f"{work}, {direction}, {shape}, {str(self.dtype).removeprefix('torch.')}{form}"
