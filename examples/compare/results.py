"""Stored results of a comparison, and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SWEEP_SEED = 100  # of the learning-rate sweep; reported runs have other seeds
# After lltm.replace_, a torch.nn model computes the same up to rounding: it shares the runs, but
# has a separate time.
REPLACED = {"lltm.LSTM": "nn.LSTM", "lltm.GRU": "nn.GRU"}


@dataclass(frozen=True)
class Spec:
    task: str
    model: str
    seed: int
    learning_rate: float
    updates: int


@dataclass(frozen=True)
class Evaluation:
    update: int
    validation: float
    test: float


@dataclass(frozen=True)
class Run:
    spec: Spec
    hidden_size: int
    parameters: int
    evaluations: tuple[Evaluation, ...]  # fewer if the loss became NaN

    def selected(self, higher_is_better: bool, updates: float | None = None) -> Evaluation:
        """Returns the best evaluation by the validation set, after at most `updates` updates."""
        known = [e for e in self.evaluations if updates is None or e.update <= updates]
        choose = max if higher_is_better else min
        return choose(known, key=lambda evaluation: evaluation.validation)


@dataclass(frozen=True)
class Description:
    title: str
    updates: int  # per reported run
    metric: str
    higher_is_better: bool
    log_scale: bool
    levels: dict[str, float]


@dataclass
class Results:
    """All measurements; saved as JSON, a line per run, task or entry."""

    tasks: dict[str, Description] = field(default_factory=dict)
    runs: dict[Spec, Run] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)  # where the times were measured
    seconds_per_update: dict[str, dict[str, float]] = field(default_factory=dict)

    def reported(self, task: str, model: str) -> list[Run]:
        """A run per seed, without runs of another length than the task's."""
        model = REPLACED.get(model, model)
        return [
            run
            for spec, run in self.runs.items()
            if (spec.task, spec.model, spec.updates) == (task, model, self.tasks[task].updates)
            and spec.seed != SWEEP_SEED
        ]

    def models(self, task: str) -> list[str]:
        """Models in the order of timing."""
        return [model for model in self.seconds_per_update[task] if self.reported(task, model)]

    def test_values(self, task: str, model: str, updates: float | None = None) -> list[float]:
        """A value per seed, of the checkpoint that the validation set selects."""
        higher = self.tasks[task].higher_is_better
        return [run.selected(higher, updates).test for run in self.reported(task, model)]

    def equal_seconds(self, task: str) -> float:
        """The time that the fastest model needs for all its updates."""
        seconds = self.seconds_per_update[task]
        return min(seconds[model] for model in self.models(task)) * self.tasks[task].updates

    def save(self, path: Path) -> None:
        """Writes another file first, so that an interruption does not damage the old file."""
        parts = {
            "tasks": {name: asdict(task) for name, task in self.tasks.items()},
            "machine": self.machine,
            "seconds_per_update": self.seconds_per_update,
        }
        text = "{\n"
        for name, entries in parts.items():
            lines = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
            text += f' "{name}": {{\n  {lines}\n }},\n'
        text += ' "runs": [\n  ' + ",\n  ".join(self._run_lines()) + "\n ]\n}\n"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text)
        os.replace(unfinished, path)

    def _run_lines(self) -> Iterator[str]:
        for run in sorted(self.runs.values(), key=lambda run: tuple(asdict(run.spec).values())):
            values: dict[str, Any] = asdict(run.spec)
            values |= {"hidden_size": run.hidden_size, "parameters": run.parameters}
            values["evaluations"] = [(e.update, e.validation, e.test) for e in run.evaluations]
            yield json.dumps(values)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Without a file, the results are empty."""
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text())
        runs = [
            Run(
                Spec(*(run[name] for name in Spec.__dataclass_fields__)),
                run["hidden_size"],
                run["parameters"],
                tuple(Evaluation(*values) for values in run["evaluations"]),
            )
            for run in stored["runs"]
        ]
        return cls(
            {name: Description(**task) for name, task in stored["tasks"].items()},
            {run.spec: run for run in runs},
            stored["machine"],
            stored["seconds_per_update"],
        )
