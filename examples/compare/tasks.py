"""The tasks: inputs, targets, loss and score.

Symbols: T steps, B batch size, I input size, V characters in the vocabulary. Sequences are
time-first. A task has three sets: training, validation (to choose learning rates and checkpoints)
and test (for the reported results).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, (T, B, I) or (T, B) indices; targets


def generator(*seeds: int) -> torch.Generator:
    seed = 0
    for part in seeds:
        seed = seed * 1_000_003 + part + 1
    return torch.Generator().manual_seed(seed)


class Task:
    title: str
    metric: str  # with its unit
    higher_is_better: ClassVar[bool] = False
    log_scale: ClassVar[bool] = False
    per_step: ClassVar[bool] = False  # one prediction per step, or per sequence
    vocabulary: int | None = None  # number of indices, if inputs are indices
    levels: dict[str, float]  # values of the metric without a recurrent model

    lstm_size: ClassVar[int] = 64  # hidden size of nn.LSTM; the others are fitted to it
    updates: int
    input_size: int
    outputs: int
    steps: int
    batch_size: int = 32

    validation: Batch
    test: Batch

    def batch(self, seed: int, update: int) -> Batch:
        """The batch is the same for every model."""
        raise NotImplementedError

    def continues(self, update: int) -> bool:
        """True if the rows of this batch continue the rows of the previous batch."""
        return False

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """The metric is the loss by default."""
        return self.loss(outputs, targets).item()


class CharacterModel(Task):
    """Predict the next character of CPython's documentation.

    A batch continues the rows and the state of the previous batch, as in examples/char_lm.
    Validation and test text are read in rows from a zero state.
    """

    title = "Character model of CPython's documentation"
    metric = "bits per character"
    per_step = True
    lstm_size = 128
    updates = 1000
    input_size = 64  # of the embedding
    steps = 100

    def __init__(self) -> None:
        folder = str(Path(__file__).resolve().parents[1] / "char_lm")
        if folder not in sys.path:
            sys.path.append(folder)
        from char_lm import Corpus, read_text

        corpus = Corpus.from_text(read_text(None)[1])
        self.vocabulary = self.outputs = len(corpus.vocabulary)
        self._rows = self._cut(corpus.training)
        held_out = corpus.held_out
        middle = len(held_out) // 2
        self.validation = self._cut(held_out[:middle])
        self.test = self._cut(held_out[middle:])
        frequencies = torch.bincount(corpus.training, minlength=self.outputs) + 1.0
        log_odds = frequencies.log().expand(*self.test[1].shape, -1)
        self.levels = {"character frequencies": self.score(log_odds, self.test[1])}

    def _cut(self, text: Tensor) -> Batch:
        length = (len(text) - 1) // self.batch_size
        count = length * self.batch_size
        rows = text[:count].view(self.batch_size, length).t()
        return rows, text[1 : count + 1].view(self.batch_size, length).t()

    def _start(self, update: int) -> int:
        return update * self.steps % (len(self._rows[0]) // self.steps * self.steps)

    def batch(self, seed: int, update: int) -> Batch:
        start = self._start(update)
        characters, successors = self._rows
        return characters[start : start + self.steps], successors[start : start + self.steps]

    def continues(self, update: int) -> bool:
        return self._start(update) > 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return self.loss(outputs, targets).item() / math.log(2)


class Digits(Task):
    """scikit-learn's handwritten digits, 8 x 8, read pixel by pixel."""

    title = "Sequential digits"
    metric = "accuracy, %"
    higher_is_better = True
    updates = 1500
    input_size = 1
    outputs = 10
    steps = 64

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        pixels = torch.tensor(data.data, dtype=torch.float32).t().unsqueeze(2) / 16  # (64, N, 1)
        digits = torch.tensor(data.target)
        order = torch.randperm(len(digits), generator=generator(0))

        def part(rows: Tensor) -> Batch:
            return pixels[:, rows], digits[rows]

        self.levels = {"guessing": 10.0}
        # As many test images as in examples/lightning.
        self.test, self.validation, self._training = map(part, order.split([360, 300, 1137]))

    def batch(self, seed: int, update: int) -> Batch:
        pixels, digits = self._training
        batches = len(digits) // self.batch_size  # per epoch
        epoch, place = divmod(update, batches)
        order = torch.randperm(len(digits), generator=generator(seed, epoch))
        rows = order[place * self.batch_size : (place + 1) * self.batch_size]
        return pixels[:, rows], digits[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return 100 * (outputs.argmax(dim=1) == targets).float().mean().item()


class Adding(Task):
    """The adding problem: the sum of two marked random numbers, one in each half of a sequence.

    The inputs of a step are a number, uniform in [0, 1), and the mark.
    """

    metric = "mean squared error"
    log_scale = True
    input_size = 2
    outputs = 1

    def __init__(self, steps: int, updates: int) -> None:
        self.title = f"Adding problem, T = {steps}"
        self.steps = steps
        self.updates = updates
        # Variance of the sum of two uniform numbers.
        self.levels = {"always answering 1": 1 / 6}
        # Runs have no negative seeds.
        self.validation = self.draw(250, generator(-3, steps))
        self.test = self.draw(250, generator(-2, steps))

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        numbers = torch.rand(self.steps, rows, generator=random)
        half = self.steps // 2
        marked = torch.stack(
            [
                torch.randint(half, (rows,), generator=random),
                torch.randint(half, self.steps, (rows,), generator=random),
            ]
        )
        marks = torch.zeros_like(numbers).scatter_(0, marked, 1.0)
        return torch.stack([numbers, marks], dim=2), numbers.gather(0, marked).sum(dim=0)

    def batch(self, seed: int, update: int) -> Batch:
        return self.draw(self.batch_size, generator(seed, update))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.squeeze(1), targets)


class CarbonDioxide(Task):
    """Predict weekly carbon dioxide at Mauna Loa, 1958 to 2001, from statsmodels.

    Inputs are the changes of the last two years, the target is the next change. The naive
    forecast is a change of zero.
    """

    title = "Carbon dioxide, one week ahead"
    metric = "error relative to last value"
    updates = 1000
    input_size = 1
    outputs = 1
    steps = 104

    def __init__(self) -> None:
        from statsmodels.datasets import co2

        # A few weeks are missing, mostly in the first years.
        level = co2.load_pandas().data["co2"].interpolate()
        changes = torch.tensor(level.diff().to_numpy()[1:], dtype=torch.float32)
        windows = changes.unfold(0, self.steps + 1, 1)
        held_out = len(changes) // 5  # the last fifth; validation: the tenth before
        sizes = [len(windows) - held_out - held_out // 2, held_out // 2, held_out]
        training, validation, test = (windows / windows[: sizes[0]].std()).split(sizes)
        self._training = self._problem(training)
        self.validation = self._problem(validation)
        self.test = self._problem(test)
        self.levels = {"last value": 1.0, "linear regression": self._linear_regression()}

    @staticmethod
    def _problem(windows: Tensor) -> Batch:
        return windows[:, :-1].t().unsqueeze(2), windows[:, -1]

    def _linear_regression(self) -> float:
        """Predicts the target from the same two years."""

        def rows(inputs: Tensor) -> Tensor:
            return torch.cat([inputs.squeeze(2).t(), torch.ones(inputs.shape[1], 1)], dim=1)

        inputs, targets = self._training
        solution = torch.linalg.lstsq(rows(inputs), targets.unsqueeze(1)).solution
        return self.score(rows(self.test[0]) @ solution, self.test[1])

    def batch(self, seed: int, update: int) -> Batch:
        inputs, targets = self._training
        rows = torch.randint(len(targets), (self.batch_size,), generator=generator(seed, update))
        return inputs[:, rows], targets[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.squeeze(1), targets)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the root mean squared error relative to the naive forecast."""
        return (self.loss(outputs, targets) / targets.square().mean()).sqrt().item()


TASKS: dict[str, Callable[[], Task]] = {
    "characters": CharacterModel,
    "digits": Digits,
    "co2": CarbonDioxide,
    "adding-200": functools.partial(Adding, 200, 1000),
    "adding-750": functools.partial(Adding, 750, 800),
}


@functools.cache
def task(name: str) -> Task:
    """Loads a task once per process."""
    return TASKS[name]()
