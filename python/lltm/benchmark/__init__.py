"""lltm beside other implementations, measured on this machine: `python -m lltm.benchmark --help`.

cases        what is measured
contenders   what is compared
runtimes     nn.LSTM in ONNX Runtime and OpenVINO
timing       measuring in interleaved rounds
memory       what training takes of memory
report       rows of figures, goals, a picture
"""

from __future__ import annotations

from .cases import TUTORIAL_SHAPE, Case
from .contenders import OURS, PLAIN, STEPS, TUTORIAL, Layer, Make, tutorial_modules
from .report import Check, Row, environment, quartiles
from .timing import Sampler, Settings, measure, parts_timer, reason

__all__ = [
    "OURS",
    "PLAIN",
    "STEPS",
    "TUTORIAL",
    "TUTORIAL_SHAPE",
    "Case",
    "Check",
    "Layer",
    "Make",
    "Row",
    "Sampler",
    "Settings",
    "environment",
    "measure",
    "parts_timer",
    "quartiles",
    "reason",
    "tutorial_modules",
]
