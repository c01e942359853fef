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
    if case.cell != "lltm":
        return 0.50 if against == f"nn.{case.yardstick}" else None
    if case.shape != TUTORIAL_SHAPE or case.dtype != torch.float32:
        return None
    return {(ADDMM, False): 1.0, (PLAIN, True): 0.40}.get((against, case.training))


def sequence_goal(case: Case, against: str) -> float | None:
    steps, batch, _, hidden = case.shape
    if case.cell != "lltm":
        if against != f"nn.{case.yardstick}":
            return None
        if case.cell == "lstm":
            return 0.75 if case.training else 1.0
        if not case.training:
            return None
        if batch == 1:
            return 0.80 if steps == 1 else 0.15
        return 0.15 if case.shape == LOOP_SHAPE else 0.45
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


def chunk_goal(case: Case, against: str) -> float | None:
    """Of a chunk of a stream, with prepacked weights."""
    steps, batch = case.shape[:2]
    if against == READ and steps == batch == 1:
        return 0.80
    if against.startswith(ONNX_RUNTIME) and steps <= 10 and batch <= 4:
        return 0.75
    return None
