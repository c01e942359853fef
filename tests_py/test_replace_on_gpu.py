"""lltm.replace_ on a GPU, without a GPU."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest
import support
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import lltm
from lltm import _replace

# Two stored measurements of the same case differ by up to 43 % if launches take most of the time.
PARITY = 1.05
HALF = torch.float16


@pytest.mark.parametrize(("cell", "sizes"), _replace._FAST_ON_GPU.items())
def test_the_stored_results_confirm_the_rule(cell: str, sizes: range) -> None:
    """Times of lltm, with the engine that it chooses, in units of cuDNN's. The newest count."""
    cases: dict[str, dict[str, float]] = {}
    for file in sorted((support.ROOT / "benchmarks" / "results").glob("*/gpu.json")):
        cases |= json.loads(file.read_bytes())["microseconds per step"]
    ratios, measured = {}, set()
    for case, times in cases.items():
        match = re.fullmatch(rf"{cell} sequence, .* H=(\d+), (float16|bfloat16)", case)
        theirs = [t for name, t in times.items() if re.match(r"nn\.(?!.*graph)", name)]
        if match and theirs and int(match[1]) in sizes:
            ratios[case] = (times.get("lltm, persistent") or times["lltm"]) / min(theirs)
            measured |= {int(match[1]), match[2]}
    assert not {case: ratio for case, ratio in ratios.items() if ratio > PARITY}
    assert statistics.median(ratios.values()) < 1
    assert measured >= {"float16", "bfloat16", sizes[0], sizes[-1]}


AUTOCAST = {"is_autocast_enabled": lambda device: True, "get_autocast_dtype": lambda device: HALF}


@pytest.mark.parametrize(
    ("cls", "dtype", "options", "autocast", "reason"),
    [
        (nn.RNN, HALF, {}, {}, "RNN"),
        (nn.GRUCell, HALF, {}, {}, "GRUCell"),
        (nn.LSTM, HALF, {"proj_size": 8}, {}, "LSTM with proj_size"),
        (nn.GRU, HALF, {"num_layers": 2}, {}, "2 layers"),
        (nn.LSTM, HALF, {"bidirectional": True}, {}, "2 directions"),
        (nn.GRU, torch.float64, {}, AUTOCAST, "float64"),
        (nn.GRU, torch.float32, {}, {}, "float32; under torch.autocast, call replace_ inside it"),
        (nn.GRU, torch.float32, {}, AUTOCAST, None),
        (nn.LSTM, torch.bfloat16, {}, {}, None),
        (nn.LSTM, HALF, {"hidden_size": 248}, {}, "248 hidden units"),
        (nn.LSTM, HALF, {"hidden_size": 260}, {}, "260 hidden units"),
        (nn.LSTM, HALF, {"hidden_size": 776}, {}, "776 hidden units"),
        (nn.GRU, HALF, {"hidden_size": 1024}, {}, None),
    ],
)
def test_replace_applies_the_rule_to_modules_on_a_gpu(
    cls: Any, dtype: torch.dtype, options: Any, autocast: Any, reason: str | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "uniform_", lambda tensor, *bounds: tensor)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with FakeTensorMode(), torch.backends.cudnn.flags(enabled=False):
            sizes = {"input_size": 8, "hidden_size": 256}
            model = cls(**(sizes | options), device="cuda", dtype=dtype)
        for name, value in autocast.items():
            patch.setattr(torch, name, value)

        def expect(reason: str | None) -> None:
            left = {} if reason is None else {"": f"it is on cuda:0; {reason}"}
            assert lltm.replace_(model) == lltm.Replaced([] if left else [""], left)

        expect("this lltm has no kernels for it")
        patch.setattr(_replace, "_gpu", lambda device: ((7, 5), True))
        expect("its compute capability is below 8.0")
        patch.setattr(_replace, "_gpu", lambda device: ((9, 0), True))
        expect(reason and f"lltm has not been measured to be as fast as cuDNN for {reason}")
