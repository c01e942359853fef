"""Trains a character-level language model with lltm.LLTM.

    python examples/char_lm/train.py --text FILE --out FOLDER

writes FOLDER/char_lm.safetensors, a checkpoint for Python and C++, and FOLDER/loss.png.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from char_lm import CharLM, Corpus, State, read_text
from torch import Tensor, nn
from tqdm import tqdm

BATCH = 32  # rows read side by side
STEPS = 100  # characters between two updates
UPDATES = 800  # of the parameters, unless told otherwise
RATE = 5e-3  # largest learning rate
BITS = 1 / math.log(2)  # of one nat


def batches(data: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields (characters, their successors, first), the tensors (STEPS, BATCH), without end.

    The text is cut into BATCH rows, and each batch continues the rows of the one before, so the
    state can be carried over; `first` marks the beginning of the rows, where it can't.
    """
    length = (len(data) - 1) // BATCH
    if length < STEPS:
        raise ValueError(f"the text is too short: {len(data)} characters to train with")
    rows = data[: length * BATCH].view(BATCH, length).t()
    successors = data[1 : length * BATCH + 1].view(BATCH, length).t()
    while True:
        for start in range(0, length - STEPS + 1, STEPS):
            end = start + STEPS
            yield rows[start:end], successors[start:end], start == 0


class Trainer:
    """A model with its optimiser, its place in the text and its learning-rate schedule."""

    def __init__(self, model: CharLM, corpus: Corpus, updates: int) -> None:
        self.model = model
        self._batches = batches(corpus.training)
        self._state: State | None = None
        self._optimizer = torch.optim.Adam(model.parameters())
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, max_lr=RATE, total_steps=updates, pct_start=0.1
        )

    def step(self) -> float:
        """Makes one update; returns the loss before it, in bits per character."""
        characters, successors, first = next(self._batches)
        logits, (h, c) = self.model(characters, None if first else self._state)
        # Gradients stop here, the values go on.
        self._state = h.detach(), c.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), successors.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.item() * BITS


@torch.no_grad()
def bits_per_character(model: CharLM, data: Tensor) -> float:
    """Reads a text once, in one row from its first character to its last."""
    logits, _ = model(data[:-1].unsqueeze(1))
    return F.cross_entropy(logits.flatten(0, 1), data[1:]).item() * BITS


@dataclass
class History:
    """What a training run measured, in bits per character."""

    training: list[float] = field(default_factory=list)  # one for each update
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (updates so far, value)
    seconds: float = 0.0


def train(model: CharLM, corpus: Corpus, updates: int) -> History:
    history = History()
    trainer = Trainer(model, corpus, updates)
    start = time.perf_counter()
    with tqdm(total=updates, unit="update", dynamic_ncols=True) as bar:
        for update in range(1, updates + 1):
            history.training.append(trainer.step())
            if update % 100 == 0 or update == updates:
                history.held_out.append((update, bits_per_character(model, corpus.held_out)))
            held_out = f"{history.held_out[-1][1]:.3f}" if history.held_out else "-"
            bar.set_postfix_str(
                f"bits/char {history.training[-1]:.3f}, held out {held_out}", refresh=False
            )
            bar.update()
    history.seconds = time.perf_counter() - start
    return history


def plot(history: History, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(
        range(1, len(history.training) + 1),
        history.training,
        color="tab:blue",
        alpha=0.6,
        linewidth=1,
        label="training batch",
    )
    axes.plot(*zip(*history.held_out, strict=True), "o-", color="tab:orange", label="held out")
    update, value = history.held_out[-1]
    axes.annotate(
        f"{value:.3f}", (update, value), (0, -18), textcoords="offset points", ha="center"
    )
    axes.set(title=title, xlabel="updates", ylabel="bits per character")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save_checkpoint(model: CharLM, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(model.state_dict(), path)


def arguments(description: str, out: Path) -> argparse.Namespace:
    """The command line, shared with demo.py."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", type=Path, help="a UTF-8 file instead of Python's documentation")
    parser.add_argument("--out", type=Path, default=out, help="folder for what is written")
    parser.add_argument("--updates", type=int, help="of the parameters")
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters")
    return parser.parse_args()


def main() -> None:
    options = arguments("Trains a character-level language model.", Path("build/char_lm"))
    name, text = read_text(options.text)
    corpus = Corpus.from_text(text)
    torch.manual_seed(options.seed)
    model = CharLM(corpus.vocabulary, hidden_size=options.hidden_size)
    history = train(model, corpus, options.updates or UPDATES)
    options.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, options.out / "char_lm.safetensors")
    plot(history, f"lltm.LLTM on {name}", options.out / "loss.png")
    print(f"{history.held_out[-1][1]:.3f} bits per held-out character; written to {options.out}")


if __name__ == "__main__":
    main()
