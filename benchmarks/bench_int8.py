"""Layers with weights in int8: lltm's, and torch.nn.LSTM quantised dynamically, for inference.

python benchmarks/bench_int8.py
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import lltm
from lltm.benchmark.timing import Sampler, Settings, measure, timed

SHAPES = [
    (100, 16, 32, 128),
    (100, 64, 128, 256),
    (100, 1, 128, 256),
    (60, 33, 100, 200),
    (50, 128, 512, 512),
    (1, 1, 128, 256),
    (1, 4, 512, 512),
    (10, 4, 128, 256),
]
OURS, FLOAT32, QUANTISED, LSTM = "int8", "float32", "nn.LSTM int8", "nn.LSTM"
SETTINGS = Settings(rounds=15, seconds=0.03, compile=False)


def quantised_lstm(inputs: int, hidden: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and still what ships with PyTorch
        model = nn.Sequential(nn.LSTM(inputs, hidden)).eval()
        module = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)[0]
    assert isinstance(module, nn.Module)
    return module


def row(shape: tuple[int, int, int, int]) -> str:
    steps, batch, inputs, hidden = shape
    x = torch.randn(steps, batch, inputs)
    state = (torch.zeros(1, batch, hidden), torch.zeros(1, batch, hidden))
    layer = lltm.LLTM(inputs, hidden).eval()
    modules: dict[str, nn.Module] = {
        OURS: layer.prepack(torch.qint8),
        FLOAT32: layer.prepack(),
        QUANTISED: quantised_lstm(inputs, hidden),
        LSTM: nn.LSTM(inputs, hidden).eval(),
    }
    builds: dict[str, Callable[[], Sampler]] = {
        name: partial(timed, partial(module, x, state)) for name, module in modules.items()
    }
    samples = measure(str(shape), builds, SETTINGS).seconds
    median = {name: statistics.median(seconds) for name, seconds in samples.items()}
    times = "".join(f"{median[name] * 1e6:14.0f}" for name in modules)
    ratios = "".join(f"{median[OURS] / median[name]:14.2f}" for name in (FLOAT32, QUANTISED, LSTM))
    return f"{', '.join(map(str, shape)):18}{times}{ratios}"


def main() -> None:
    torch.manual_seed(0)
    print(f"Medians in us; then the ratio of {OURS} to the others. Both layers prepacked.")
    columns = [OURS, FLOAT32, QUANTISED, LSTM, FLOAT32, QUANTISED, LSTM]
    print("T, B, I, H        " + "".join(f"{name:>14}" for name in columns))
    for shape in SHAPES:
        print(row(shape), flush=True)


if __name__ == "__main__":
    main()
