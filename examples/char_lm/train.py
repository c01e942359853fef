"""Trains character-level language models, and plots their learning curves, for demo.py."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from char_lm import RATES, CharLM, Corpus, State
from torch import Tensor, nn
from tqdm import tqdm

BATCH = 32  # text rows in a batch
STEPS = 100  # characters per row and update
BITS = 1 / math.log(2)  # per nat


def rows(data: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts a text into BATCH rows: characters and their successors, each (length, BATCH)."""
    length = (len(data) - 1) // BATCH
    count = length * BATCH
    return data[:count].view(BATCH, length).t(), data[1 : count + 1].view(BATCH, length).t()


def batches(data: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields (characters, their successors, first) endlessly; the tensors are (STEPS, BATCH).

    Each batch continues the rows of the previous batch and can use its state, unless `first` is
    true: it marks the beginning of the rows.
    """
    characters, successors = rows(data)
    if len(characters) < STEPS:
        raise ValueError(f"the text is too short: {len(data)} characters to train with")
    while True:
        for start in range(0, len(characters) - STEPS + 1, STEPS):
            end = start + STEPS
            yield characters[start:end], successors[start:end], start == 0


@torch.no_grad()
def bits_per_character(model: CharLM, data: Tensor) -> float:
    """Evaluates a text once, in BATCH rows, each from a zero state."""
    characters, successors = rows(data)
    logits, _ = model(characters)
    return F.cross_entropy(logits.flatten(0, 1), successors.flatten()).item() * BITS


@dataclass
class History:
    """Measurements of a training run: losses in bits per character, times in seconds."""

    training: list[float] = field(default_factory=list)  # per update
    seconds: list[float] = field(default_factory=list)  # per update
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (updates so far, value)


class Trainer:
    """A model with its optimizer, its position in the text and its learning-rate schedule."""

    def __init__(self, name: str, model: CharLM, corpus: Corpus, updates: int) -> None:
        self.name = name
        self.model = model
        self.history = History()
        self._held_out = corpus.held_out
        self._batches = batches(corpus.training)
        self._state: State | None = None
        self._optimizer = torch.optim.Adam(model.parameters())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=RATES[model.rnn.mode], total_steps=updates, pct_start=0.1
        )

    def update(self) -> None:
        """Updates the parameters; records the time and the loss before the update."""
        start = time.perf_counter()
        characters, successors, first = next(self._batches)
        logits, state = self.model(characters, None if first else self._state)
        # Gradients stop here; the state continues.
        self._state = (
            state.detach() if isinstance(state, Tensor) else tuple(t.detach() for t in state)
        )
        loss = F.cross_entropy(logits.flatten(0, 1), successors.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.history.training.append(loss.item() * BITS)
        self.history.seconds.append(time.perf_counter() - start)

    def evaluate(self) -> None:
        """Evaluates the held-out text; the history does not include this time."""
        value = bits_per_character(self.model, self._held_out)
        self.history.held_out.append((len(self.history.training), value))


def train(trainers: Sequence[Trainer], updates: int) -> None:
    """Trains every model with the same updates, in turn, so that all run under the same load."""
    with tqdm(total=updates, unit="update", dynamic_ncols=True, disable=None) as bar:
        for update in range(1, updates + 1):
            for trainer in trainers:
                trainer.update()
            if update % 50 == 0 or update == updates:
                for trainer in trainers:
                    trainer.evaluate()
                held_out = (f"{t.name} {t.history.held_out[-1][1]:.3f}" for t in trainers)
                bar.set_postfix_str(f"bits/char held out: {', '.join(held_out)}", refresh=False)
            bar.update()


def plot(trainers: Sequence[Trainer], title: str, path: Path) -> None:
    """Plots held-out bits per character against updates and against training seconds."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    colors = {"LLTM": "tab:orange", "LSTM": "tab:blue", "GRU": "tab:green"}
    for trainer in trainers:
        history = trainer.history
        color = colors[trainer.model.rnn.mode]
        style = "o-" if trainer.name.startswith("lltm.") else "s:"
        updates, values = zip(*history.held_out, strict=True)
        seconds = [sum(history.seconds[:update]) for update in updates]
        label = f"{trainer.name}: {values[-1]:.2f} after {seconds[-1]:.0f} s"
        for axes, x in zip(panels, (updates, seconds), strict=True):
            axes.plot(x, values, style, color=color, markersize=4, label=label)
    panels[0].set(xlabel="updates", ylabel="bits per held-out character")
    panels[1].set(xlabel="seconds of training")
    panels[0].legend()
    for axes in panels:
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
