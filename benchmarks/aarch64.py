"""Counts instructions of layers on ARM under qemu-user, relative to torch.nn: `make bench-aarch64`.

Instructions are not time: an emulator has no caches, and instructions differ in their cost.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

import lltm

SHAPES = ((100, 16, 32, 128), (100, 1, 128, 256), (50, 32, 64, 64), (20, 8, 256, 512))
OUT = Path(os.environ["COUNT_OUT"])  # of count_plugin.c


def count(call: Any) -> int:
    """Instructions of the second call."""
    for _ in range(2):
        ctypes.CDLL(None).syscall(5000)
        call()
    ctypes.CDLL(None).syscall(5000)
    return int(OUT.read_text(encoding="utf-8"))


def ratios(name: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> list[float]:
    """Inference and training."""
    steps, batch, inputs, hidden = shape
    x = torch.randn(steps, batch, inputs, dtype=dtype)
    counts = []
    for module in (getattr(lltm, name), getattr(torch.nn, name)):
        layer = module(inputs, hidden, dtype=dtype)

        def train(layer: torch.nn.Module = layer) -> None:
            layer.zero_grad(set_to_none=True)
            layer(x)[0].sum().backward()

        with torch.inference_mode():
            counts.append(count(lambda layer=layer: layer(x)))
        counts.append(count(train))
    return [counts[k] / counts[k + 2] for k in range(2)]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| dtype | T×B×I×H | LSTM inference | LSTM training | GRU inference | GRU training |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            row = [str(dtype)[6:], "×".join(map(str, shape))]
            row += [f"{r:.2f}" for name in ("LSTM", "GRU") for r in ratios(name, dtype, shape)]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
