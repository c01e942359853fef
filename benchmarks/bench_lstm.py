"""The engine with the cell of the LSTM, beside torch.nn.LSTM: the same arithmetic.

python benchmarks/bench_lstm.py build/tests_cpp/liblltm_lstm.so

The library is the one of the tests (tests_cpp/lstm/cell.h). Its operators are lltm's, so this
program must not import lltm. Times are medians of rounds in which both take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = [(100, 16, 32, 128), (100, 64, 128, 256), (100, 1, 128, 256), (50, 128, 512, 512)]
ROUNDS = 15


def seconds(step: Callable[[], object], repeat: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - begin) / repeat


def compare(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float, float]:
    """Returns the medians in seconds and that of the ratios."""
    for step in (ours, theirs):
        seconds(step, 3)
    repeat = max(1, int(0.05 / seconds(theirs, 2)))
    rounds = [(seconds(ours, repeat), seconds(theirs, repeat)) for _ in range(ROUNDS)]
    mine, torchs = zip(*rounds, strict=True)
    ratios = [a / b for a, b in rounds]
    return statistics.median(mine), statistics.median(torchs), statistics.median(ratios)


def row(shape: tuple[int, int, int, int], dtype: torch.dtype, training: bool) -> str:
    steps, batch, inputs, hidden = shape
    lstm = torch.nn.LSTM(inputs, hidden, dtype=dtype)
    state = lstm.state_dict()
    weights = torch.cat([state["weight_hh_l0"], state["weight_ih_l0"]], dim=1)
    bias = state["bias_hh_l0"] + state["bias_ih_l0"]
    weights.requires_grad_(training)
    bias.requires_grad_(training)
    x = torch.randn(steps, batch, inputs, dtype=dtype)
    zeros = torch.zeros(batch, hidden, dtype=dtype)

    def run(output: Tensor) -> None:
        if training:
            output.sum().backward()

    def ours() -> None:
        run(torch.ops.lltm.sequence(x, zeros, zeros, weights, bias)[0])

    def theirs() -> None:
        run(lstm(x)[0])

    with torch.set_grad_enabled(training):
        torch.testing.assert_close(
            torch.ops.lltm.sequence(x, zeros, zeros, weights, bias)[0],
            lstm(x)[0],
            atol=1e-4 if dtype == torch.float32 else 5e-2,
            rtol=0,
        )
        mine, torchs, ratio = compare(ours, theirs)
    name = f"{', '.join(map(str, shape)):18} {str(dtype).removeprefix('torch.'):9}"
    kind = "training" if training else "inference"
    return f"{name} {kind:10} {mine * 1e3:9.2f} {torchs * 1e3:9.2f} {ratio:6.2f}"


def main() -> None:
    torch.ops.load_library(sys.argv[1])
    torch.manual_seed(0)
    print("LSTM: T, B, I, H   dtype     pass        ours, ms  torch, ms  ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for training in (False, True):
                print(row(shape, dtype, training), flush=True)


if __name__ == "__main__":
    main()
