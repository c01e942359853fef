"""Trains the sLSTM and lltm.LSTM on the adding problem.

    python examples/cells/train.py

Each step of a sequence has a random number and a mark. Two marks are 1, and the target of the last
output is the sum of their numbers. The constant answer 1 has a mean squared error of 0.167. Prints
errors on new sequences during training, which are reproducible on the same kind of CPU.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import lltm

BATCH, HIDDEN = 64, 32


class Adder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        return self.head(output[-1]).squeeze(1)


def sequences(steps: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (steps, batch, 2), numbers and marks, and the sums (batch)."""
    numbers = torch.rand(steps, batch, generator=generator)
    half = steps // 2
    first = torch.randint(half, (1, batch), generator=generator)
    second = torch.randint(half, steps, (1, batch), generator=generator)
    marks = torch.zeros(steps, batch).scatter_(0, first, 1).scatter_(0, second, 1)
    return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(0)


def train(model: Adder, steps: int, updates: int, reports: int) -> tuple[list[float], float]:
    """Errors on new sequences, and the training time in seconds."""
    generator = torch.Generator().manual_seed(1)
    held_out = sequences(steps, 1000, torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    errors, seconds = [], 0.0
    for update in range(1, updates + 1):
        x, y = sequences(steps, BATCH, generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds += time.perf_counter() - start
        if update % (updates // reports) == 0:
            with torch.no_grad():
                errors.append(nn.functional.mse_loss(model(held_out[0]), held_out[1]).item())
    return errors, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="length of the sequences")
    parser.add_argument("--updates", type=int, default=1500, help="of the parameters")
    options = parser.parse_args()
    reports = min(5, options.updates)

    columns = {}
    for name, layer in (("sLSTM", lltm.cells.slstm.Layer), ("LSTM", lltm.LSTM)):
        torch.manual_seed(0)
        columns[name] = train(Adder(layer(2, HIDDEN)), options.steps, options.updates, reports)
    print("updates" + "".join(f"{name:>10}" for name in columns))
    for k in range(reports):
        errors = "".join(f"{errors[k]:10.4f}" for errors, _ in columns.values())
        print(f"{(k + 1) * (options.updates // reports):7}{errors}")
    print("seconds" + "".join(f"{seconds:10.1f}" for _, seconds in columns.values()))


if __name__ == "__main__":
    main()
