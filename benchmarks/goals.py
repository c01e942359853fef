"""What this project aims at on a CPU; the goals on a GPU are in bench_cuda.py.

Each function returns the largest ratio of times, lltm to `against`, that this project wants to see;
against PEAK and READ, the smallest share of their rate; None without a goal.
"""

from __future__ import annotations

import torch
from machine import ADDMM, PEAK, READ
from runtimes import ONNX_RUNTIME

from lltm.benchmark.cases import LOOP_SHAPE, TUTORIAL_SHAPE, Case, Shape
from lltm.benchmark.contenders import COMPILED, PLAIN

# lltm.GRU to nn.GRU in float32 and in bfloat16, each in inference and in training, and to ONNX
# Runtime's GRU.
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
    """Of a chunk of a stream, with prepacked weights."""
    steps, batch = case.shape[:2]
    if against == READ and steps == batch == 1:
        return 0.80
    if against.startswith(ONNX_RUNTIME) and steps <= 10 and batch <= 4:
        return 0.75
    return None
