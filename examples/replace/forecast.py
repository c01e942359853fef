"""Trains a forecast model with torch.nn.GRU, and a copy after lltm.replace_(model).

    python examples/replace/forecast.py

One line replaces the copy's layer by lltm's, in place. Both models are trained on the same batches,
in alternating epochs. Prints the loss on held-out weeks, which is the same, and the times.

The data are generated: the hourly demand of sites, with daily and weekly patterns, the influence of
temperature, and noise that lasts for hours. The model predicts the next hour.
"""

from __future__ import annotations

import argparse
import copy
import math
import time

import torch
from torch import Tensor, nn

import lltm

WEEK = 168  # hours: the length of a sequence
BATCH = 64


class Forecaster(nn.Module):
    """Predicts the demand of the next hour, at every hour."""

    def __init__(self, features: int, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden_size, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.gru(x)
        return self.head(output).squeeze(-1)


def lasting_noise(sites: int, hours: int, memory: float) -> Tensor:
    """Noise (sites, hours), variance 1: each value is `memory` times the last + noise."""
    values = [torch.randn(sites)]
    for _ in range(hours - 1):
        values.append(memory * values[-1] + math.sqrt(1 - memory**2) * torch.randn(sites))
    return torch.stack(values, dim=1)


def generate(sites: int, weeks: int) -> tuple[Tensor, Tensor]:
    """Inputs (weeks, sites, WEEK, 6) and the demand an hour later (weeks, sites, WEEK)."""
    hours = weeks * WEEK + 1
    day, week = (2 * math.pi * torch.arange(hours) / period for period in (24, WEEK))
    phase, habit = torch.rand(2, sites, 1)
    temperature = torch.sin(day - 2) + lasting_noise(sites, hours, 0.98)
    weekend = torch.arange(hours) % WEEK >= 5 * 24
    usual = torch.sin(day + phase).clamp_min(-0.5) * (1 - 0.7 * habit * weekend)
    demand = usual + 0.4 * temperature.clamp_min(0) ** 2 + 0.3 * lasting_noise(sites, hours, 0.8)
    clocks = [clock.expand(sites, -1) for t in (day, week) for clock in (t.sin(), t.cos())]
    inputs = torch.stack([demand, temperature, *clocks], dim=2)[:, :-1]
    by_week = inputs.unflatten(1, (weeks, WEEK)).transpose(0, 1)
    return by_week, demand[:, 1:].unflatten(1, (weeks, WEEK)).transpose(0, 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Returns an epoch's time in seconds."""
    start = time.perf_counter()
    for rows in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--sites", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs, targets = generate(options.sites, weeks=26)
    x, y = inputs[:-4].flatten(0, 1), targets[:-4].flatten(0, 1)
    held_out, expected = inputs[-4:].flatten(0, 1), targets[-4:].flatten(0, 1)

    theirs = Forecaster(inputs.shape[-1], options.hidden_size)
    ours = copy.deepcopy(theirs)
    print(lltm.replace_(ours))  # the only change

    models = {"torch.nn.GRU": theirs, "lltm.replace_": ours}
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-3) for model in models.values()]
    seconds = [0.0, 0.0]
    unchanged = nn.functional.mse_loss(held_out[..., 0], expected)
    print(f"error if nothing changed in an hour: {unchanged:.4f}; after each epoch of")
    print(f"{'':5}" + "".join(f"{name:>25}" for name in models))
    for epoch in range(1, options.epochs + 1):
        line = f"{epoch:5}"
        for k, model in enumerate(models.values()):
            torch.manual_seed(epoch)  # the same batches for both
            seconds[k] += train(model, optimizers[k], x, y)
            with torch.no_grad():
                loss = nn.functional.mse_loss(model(held_out), expected)
            line += f"{loss:14.4f}{seconds[k]:9.1f} s"
        print(line, flush=True)
    print(f"lltm.replace_ took {seconds[1] / seconds[0]:.2f} of the time")


if __name__ == "__main__":
    main()
