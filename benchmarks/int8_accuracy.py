"""How far weights in int8, and bfloat16 beside them, lead a sequence from float32, by its length.

python benchmarks/int8_accuracy.py
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

import lltm

STEPS = (50, 200, 1000)
BATCH, INPUTS, HIDDEN = 8, 64, 256
LAYERS = 10


def error(y: Tensor, expected: Tensor) -> float:
    """Of all outputs: the mean squared difference, relative to the mean square."""
    difference = y.double() - expected.double()
    return float(difference.square().mean() / expected.double().square().mean())


def errors(seed: int) -> list[tuple[float, float]]:
    """Of int8 and bfloat16, for each number of steps, with weights and input of this seed."""
    torch.manual_seed(seed)
    layer = lltm.LLTM(INPUTS, HIDDEN).eval()
    x = torch.randn(max(STEPS), BATCH, INPUTS)
    with torch.inference_mode():
        expected, int8 = layer(x)[0], layer.prepack(torch.qint8)(x)[0]
        bfloat16 = layer.bfloat16()(x.bfloat16())[0]
        return [(error(int8[:t], expected[:t]), error(bfloat16[:t], expected[:t])) for t in STEPS]


def main() -> None:
    print(f"Relative mean squared error of the output; median of {LAYERS} layers, and the largest.")
    print(f"B, I, H = {BATCH}, {INPUTS}, {HIDDEN}\n{'T':>6}{'int8':>20}{'bfloat16':>20}")
    by_layer = [errors(seed) for seed in range(LAYERS)]
    for k, steps in enumerate(STEPS):
        row = f"{steps:6}"
        for form in (0, 1):
            found = [layer[k][form] for layer in by_layer]
            row += f"{statistics.median(found):12.1e}{max(found):8.1e}"
        print(row)


if __name__ == "__main__":
    main()
