"""Models with equal parameter counts, and a training run."""

from __future__ import annotations

import functools
import math
import statistics
import time

import torch
from results import REPLACED, Evaluation, Run, Spec
from tasks import Task, task
from torch import Tensor, nn

import lltm

State = Tensor | tuple[Tensor, Tensor]

LAYERS: dict[str, type[lltm.LLTM | nn.LSTM | nn.GRU]] = {
    "lltm.LLTM": lltm.LLTM,
    "nn.LSTM": nn.LSTM,
    "nn.GRU": nn.GRU,
}
LONG_MEMORY = ", long memory"  # suffix of models that `long_memory` initializes
MODELS = (*LAYERS, "lltm.LLTM" + LONG_MEMORY, "nn.LSTM" + LONG_MEMORY)
EVALUATIONS = 20  # per run, evenly spaced, after the untrained model's


def long_memory(layer: lltm.LLTM | nn.LSTM, steps: int) -> None:
    """Initializes the gate biases of a layer for memories of up to T steps.

    Forget biases are log(u), u uniform in [1, T-1], and input biases their negatives: Tallec and
    Ollivier, "Can recurrent neural networks warp time?", 2018. The LLTM has no forget gate; its
    nearly closed input gates prevent T steps from saturating tanh(c).
    """
    size = layer.hidden_size
    bias = torch.empty(size).uniform_(1, steps - 1).log()
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        if isinstance(layer, nn.LSTM):  # gates: input, forget, candidate, output; two biases
            parameters["bias_hh_l0"][: 2 * size] = 0
            parameters["bias_ih_l0"][:size] = -bias
            parameters["bias_ih_l0"][size : 2 * size] = bias
        else:
            parameters["bias_l0"][:size] = -bias  # gates: input, output, candidate


class Model(nn.Module):
    """An embedding if the inputs are indices, a recurrent layer and a linear layer."""

    def __init__(self, problem: Task, name: str, hidden_size: int) -> None:
        super().__init__()
        self.per_step = problem.per_step
        self.encoder: nn.Module = nn.Identity()
        if problem.vocabulary is not None:
            self.encoder = nn.Embedding(problem.vocabulary, problem.input_size)
        self.rnn = LAYERS[name.removesuffix(LONG_MEMORY)](problem.input_size, hidden_size)
        if name.endswith(LONG_MEMORY):
            assert isinstance(self.rnn, lltm.LLTM | nn.LSTM)
            long_memory(self.rnn, problem.steps)
        self.head = nn.Linear(hidden_size, problem.outputs)

    def forward(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.rnn(self.encoder(inputs), state)
        return self.head(hidden if self.per_step else hidden[-1]), state

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


@functools.cache
def hidden_size(task_name: str, model_name: str) -> int:
    """Returns the LSTM's given size, or the size with the closest parameter count."""
    problem = task(task_name)
    with torch.device("meta"):
        target = Model(problem, "nn.LSTM", problem.lstm_size).parameter_count()
        return min(
            range(problem.lstm_size, 3 * problem.lstm_size // 2),
            key=lambda size: abs(Model(problem, model_name, size).parameter_count() - target),
        )


def detach(state: State) -> State:
    if isinstance(state, Tensor):
        return state.detach()
    h, c = state
    return h.detach(), c.detach()


class Trainer:
    """A model with its optimizer and the state between batches."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.task = task(spec.task)
        torch.manual_seed(spec.seed)
        self.model = Model(self.task, spec.model, hidden_size(spec.task, spec.model))
        # With a constant rate, every point of a curve is the result of a run that ends there.
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=spec.learning_rate)
        self._updates = 0
        self._state: State | None = None

    def update(self) -> float:
        """Returns the loss before the update."""
        inputs, targets = self.task.batch(self.spec.seed, self._updates)
        state = self._state if self.task.continues(self._updates) else None
        outputs, state = self.model(inputs, state)
        # Gradients stop here; the state continues.
        self._state = detach(state)
        loss = self.task.loss(outputs, targets)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._updates += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        # Rounded, so that stored and compared values are equal.
        validation, test = (
            float(f"{self.task.score(self.model(inputs)[0], targets):.5g}")
            for inputs, targets in (self.task.validation, self.task.test)
        )
        return Evaluation(self._updates, validation, test)


def run(spec: Spec) -> Run:
    trainer = Trainer(spec)
    evaluations = [trainer.evaluate()]
    every = max(1, spec.updates // EVALUATIONS)
    for update in range(1, spec.updates + 1):
        if not math.isfinite(trainer.update()):
            break
        if update % every == 0 or update == spec.updates:
            evaluation = trainer.evaluate()
            if not math.isfinite(evaluation.validation + evaluation.test):
                break
            evaluations.append(evaluation)
    parameters = trainer.model.parameter_count()
    return Run(spec, hidden_size(spec.task, spec.model), parameters, tuple(evaluations))


def seconds_per_update(task_name: str, rounds: int) -> dict[str, float]:
    """Median times over rounds; a round updates each layer once, in turn.

    Both initializations of a layer need the same time.
    """
    trainers = {layer: Trainer(Spec(task_name, layer, 0, 1e-3, 0)) for layer in LAYERS}
    for layer, theirs in REPLACED.items():
        trainers[layer] = Trainer(Spec(task_name, theirs, 0, 1e-3, 0))
        lltm.replace_(trainers[layer].model)
    seconds: dict[str, list[float]] = {layer: [] for layer in trainers}
    warm_up = 3
    for number in range(warm_up + rounds):
        for layer, trainer in trainers.items():
            start = time.perf_counter()
            trainer.update()
            if number >= warm_up:
                seconds[layer].append(time.perf_counter() - start)
    return {
        model: statistics.median(seconds[model.removesuffix(LONG_MEMORY)])
        for model in (*MODELS, *REPLACED)
    }
