"""Measures inference of layers with weights in int8.

python benchmarks/int8.py              times, compared with float32 and torch.nn.LSTM in int8
python benchmarks/int8.py --accuracy   errors relative to float32, by sequence length
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from functools import partial

import torch
from torch import Tensor, nn

import lltm
from lltm.benchmark.timing import Settings, measure, timed

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
SETTINGS = Settings(rounds=15, seconds=0.03, compile=False)


def quantized_lstm(inputs: int, hidden: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, but still part of PyTorch
        model = nn.Sequential(nn.LSTM(inputs, hidden)).eval()
        module = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)[0]
    assert isinstance(module, nn.Module)
    return module


def print_times() -> None:
    torch.manual_seed(0)
    for steps, batch, inputs, hidden in SHAPES:
        x, state = torch.randn(steps, batch, inputs), torch.zeros(2, 1, batch, hidden).unbind()
        layer = lltm.LLTM(inputs, hidden).eval()
        modules: dict[str, nn.Module] = {
            "int8": layer.prepack(torch.qint8),
            "float32": layer.prepack(),
            "nn.LSTM int8": quantized_lstm(inputs, hidden),
            "nn.LSTM": nn.LSTM(inputs, hidden).eval(),
        }
        calls = {name: partial(module, x, state) for name, module in modules.items()}
        builds = {name: partial(timed, call) for name, call in calls.items()}
        title = f"T={steps} B={batch} I={inputs} H={hidden}, prepacked"
        print("\n".join(measure(title, builds, SETTINGS).lines()), flush=True)


STEPS, LAYERS = (50, 200, 1000), 10
BATCH, INPUTS, HIDDEN = 8, 64, 256


def error(y: Tensor, expected: Tensor) -> float:
    """Mean squared difference, relative to the mean square."""
    difference = y.double() - expected.double()
    return float(difference.square().mean() / expected.double().square().mean())


def errors(seed: int) -> list[tuple[float, float]]:
    """Errors of int8 and bfloat16 for each number of steps."""
    torch.manual_seed(seed)
    layer = lltm.LLTM(INPUTS, HIDDEN).eval()
    x = torch.randn(max(STEPS), BATCH, INPUTS)
    with torch.inference_mode():
        expected, int8 = layer(x)[0], layer.prepack(torch.qint8)(x)[0]
        bfloat16 = layer.bfloat16()(x.bfloat16())[0]
        return [(error(int8[:t], expected[:t]), error(bfloat16[:t], expected[:t])) for t in STEPS]


def print_errors() -> None:
    print(f"Relative mean squared error of the output; median of {LAYERS} layers, and the largest.")
    print(f"B, I, H = {BATCH}, {INPUTS}, {HIDDEN}\n{'T':>6}{'int8':>20}{'bfloat16':>20}")
    by_layer = [errors(seed) for seed in range(LAYERS)]
    for k, steps in enumerate(STEPS):
        row = f"{steps:6}"
        for form in (0, 1):
            found = [layer[k][form] for layer in by_layer]
            row += f"{statistics.median(found):12.1e}{max(found):8.1e}"
        print(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--accuracy", action="store_true", help="errors, not times")
    print_errors() if parser.parse_args().accuracy else print_times()
