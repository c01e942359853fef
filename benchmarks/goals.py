"""The goals of this project on a CPU. A missed goal is reported, but does not fail.

A goal is the largest accepted ratio of times, lltm to `against`. For PEAK and READ it is the
smallest accepted share of their rate. None means no goal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lltm.benchmark.cases import LOOP_SHAPE, TUTORIAL_SHAPE, Case, Shape
from lltm.benchmark.contenders import COMPILED, PLAIN
from lltm.benchmark.report import Row, time_text

# Names of measurements that `python -m lltm.benchmark` does not have.
ADDMM = "addmm"
PEAK = "oneDNN product"
READ = "reading the weights"
ONNX_RUNTIME = "ONNX Runtime"


@dataclass
class Check:
    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met   " if self.met else "missed"
        return f"{verdict} {self.value:.3g} (goal {sign} {self.limit:g})  {self.what}"


@dataclass
class Bound:
    """A lower bound of a case's time, by the slower of GEMMs and reading the weights."""

    by: str
    seconds: float
    share: float  # of this bound in the first implementation's time


@dataclass
class CheckedRow(Row):
    checks: list[Check] = field(default_factory=list)
    bound: Bound | None = None

    def lines(self) -> Iterator[str]:
        yield from super().lines()
        if self.bound is not None:
            first, least = next(iter(self.seconds)), time_text(self.bound.seconds)
            share = f"share of it in {first}: {self.bound.share:.2f}"
            yield f"  bound: {least} by {self.bound.by}; {share}"
        for check in self.checks:
            yield f"  {check}"


def checked(row: Row) -> CheckedRow:
    return CheckedRow(**vars(row))


Checks = Sequence[tuple[str, Check]]  # each with the title of its case


def check_lines(checks: Checks) -> Iterator[str]:
    met = sum(check.met for _, check in checks)
    yield f"\nGoals: {met} of {len(checks)} met"
    for title, check in checks:
        yield f"  {check}; {title}"


def checks_as_json(checks: Checks) -> list[dict[str, Any]]:
    return [{"title": title, "met": check.met, **asdict(check)} for title, check in checks]


# lltm.GRU over nn.GRU in float32 (inference, training) and bfloat16 (inference, training), and over
# ONNX Runtime's GRU.
GRU_GOALS: dict[Shape, tuple[float, float, float, float, float]] = {
    (100, 16, 32, 128): (0.18, 0.15, 0.12, 0.09, 0.22),
    (100, 64, 128, 256): (0.34, 0.33, 0.36, 0.35, 0.54),
    (100, 1, 128, 256): (0.25, 0.09, 0.08, 0.06, 0.41),
    (60, 33, 100, 200): (0.31, 0.30, 0.39, 0.29, 0.42),
    (50, 128, 512, 512): (0.39, 0.43, 0.72, 0.76, 0.77),
    (10, 4, 128, 256): (0.20, 0.20, 0.14, 0.19, 0.54),
    (1, 1, 128, 256): (0.23, 1.43, 0.31, 0.89, 0.65),
}


def step_goal(case: Case, against: str) -> float | None:
    if case.cell != "lltm":
        return 0.50 if against == f"nn.{case.yardstick}" else None
    if case.shape != TUTORIAL_SHAPE or case.dtype != torch.float32:
        return None
    return {(ADDMM, False): 1.0, (PLAIN, True): 0.40}.get((against, case.training))


def sequence_goal(case: Case, against: str) -> float | None:
    _, batch, _, hidden = case.shape
    if case.cell == "gru":
        return gru_goal(case, against)
    if case.cell == "lstm":
        limit = 0.75 if case.training else 1.0
        return limit if against == "nn.LSTM" else None
    if against.startswith(ONNX_RUNTIME):
        return 0.72 if hidden >= 512 else 0.60
    if against == "nn.LSTM" and case.dtype in (torch.float32, torch.bfloat16):
        if case.training:
            return 0.60 if hidden >= 512 else 0.50
        return 0.70 if hidden >= 512 else 0.65
    if against == PEAK:
        return 0.90 if batch >= 64 else 0.75 if batch >= 16 else None
    if case.shape == LOOP_SHAPE and case.training and case.dtype == torch.float32:
        return {PLAIN: 0.12, COMPILED: 0.30}.get(against)
    return None


def gru_goal(case: Case, against: str) -> float | None:
    steps, batch = case.shape[:2]
    limits = []
    if against == "nn.GRU" and case.training:
        limits.append(0.45 if batch > 1 else 0.80 if steps == 1 else 0.15)
    if case.shape in GRU_GOALS and case.is_plain:
        *of_nn, of_onnx = GRU_GOALS[case.shape]
        if against == "nn.GRU" and case.dtype in (torch.float32, torch.bfloat16):
            limits.append(of_nn[2 * (case.dtype == torch.bfloat16) + case.training])
        elif against.startswith(ONNX_RUNTIME) and case.dtype == torch.float32:
            limits.append(of_onnx)
    return min(limits, default=None)


def chunk_goal(case: Case, against: str) -> float | None:
    """The goal for a chunk of a stream with prepacked weights."""
    steps, batch = case.shape[:2]
    if against == READ and steps == batch == 1:
        return 0.80
    if against.startswith(ONNX_RUNTIME) and steps <= 10 and batch <= 4:
        return 0.75
    return None
