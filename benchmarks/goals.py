"""What this project aims at on a CPU: `python -m lltm.benchmark --goals benchmarks/goals.py`.

Those on a GPU are in bench_cuda.py.
"""

from __future__ import annotations

import torch

from lltm.benchmark.cases import LOOP_SHAPE, TUTORIAL_SHAPE, Case
from lltm.benchmark.contenders import ADDMM, COMPILED, ONNX_RUNTIME, PEAK, PLAIN, READ
from lltm.benchmark.memory import PEAK_MEMORY, SAVED


def goal(case: Case, against: str) -> float | None:
    """Returns the largest ratio of times, lltm to `against`, that this project wants to see.

    Against PEAK and READ it is the smallest share of their rate.
    """
    if against in (SAVED, PEAK_MEMORY):
        return 5.0 if against == SAVED else 0.5
    single = case.dtype == torch.float32
    if case.is_step:
        wanted = {(ADDMM, False): 1.0, (PLAIN, True): 0.40}
        at_goal = case.shape == TUTORIAL_SHAPE and single
        return wanted.get((against, case.training)) if at_goal else None
    batch, hidden = case.shape[1], case.shape[3]
    if case.prepacked:
        at_goal = case.steps <= 10 and batch <= 4
        if against == READ:
            return 0.80 if case.steps == batch == 1 else None
        return 0.75 if against == ONNX_RUNTIME and at_goal else None
    if against == ONNX_RUNTIME:
        return 0.72 if hidden >= 512 else 0.60
    if against == "nn.LSTM" and case.dtype in (torch.float32, torch.bfloat16):
        if case.training:
            return 0.60 if hidden >= 512 else 0.50
        return 0.70 if hidden >= 512 else 0.65
    if against == PEAK:
        return 0.90 if batch >= 64 else 0.75 if batch >= 16 else None
    if case.shape == LOOP_SHAPE and case.training and single:
        return {PLAIN: 0.12, COMPILED: 0.30}.get(against)
    return None
