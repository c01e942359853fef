"""What this project aims at on a CPU; the goals on a GPU are in bench_cuda.py.

Each function returns the largest ratio of times, lltm to `against`, that this project wants to see;
against PEAK and READ, the smallest share of their rate; None without a goal.
"""

from __future__ import annotations

import torch
from machine import ADDMM, PEAK, READ
from runtimes import ONNX_RUNTIME

from lltm.benchmark.cases import LOOP_SHAPE, TUTORIAL_SHAPE, Case
from lltm.benchmark.contenders import COMPILED, PLAIN


def step_goal(case: Case, against: str) -> float | None:
    if case.shape != TUTORIAL_SHAPE or case.dtype != torch.float32:
        return None
    return {(ADDMM, False): 1.0, (PLAIN, True): 0.40}.get((against, case.training))


def sequence_goal(case: Case, against: str) -> float | None:
    batch, hidden = case.shape[1], case.shape[3]
    if against == ONNX_RUNTIME:
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


def chunk_goal(case: Case, against: str) -> float | None:
    """Of a chunk of a stream, with prepacked weights."""
    steps, batch = case.shape[:2]
    if against == READ and steps == batch == 1:
        return 0.80
    if against == ONNX_RUNTIME and steps <= 10 and batch <= 4:
        return 0.75
    return None
