"""lltm.replace_ on a GPU, without a GPU."""

from __future__ import annotations

import itertools
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

H100 = ((9, 0), True)
# Two stored measurements of the same case differ by up to 43 % if launches take most of the time.
PARITY = 1.05
UNMEASURED = "lltm has not been measured to be as fast as cuDNN for "
HALF = torch.float16


def stored_ratios() -> dict[_replace._Kind, list[float]]:
    """Times of lltm, with the engine that it chooses, in units of cuDNN's. The newest count."""
    cases: dict[str, dict[str, float]] = {}
    for file in sorted((support.ROOT / "benchmarks" / "results").glob("*/gpu.json")):
        cases |= json.loads(file.read_text())["microseconds per step"]
    ratios: dict[_replace._Kind, list[float]] = {}
    for case, times in cases.items():
        match = re.match(r"(LSTM|GRU) sequence, .* H=(\d+), (\w+)(.*)", case)
        theirs = [t for name, t in times.items() if re.match(r"nn\.(?!.*graph)", name)]
        if match and theirs:
            cell, hidden, dtype, rest = match.groups()
            several = re.search(r"(\d+) layers", rest)
            layers = int(several[1]) if several else 1
            kind = (cell, getattr(torch, dtype), layers, 1 + ("bidirectional" in rest), int(hidden))
            ours = times.get("lltm, persistent") or times["lltm"]
            ratios.setdefault(kind, []).append(ours / min(theirs))
    return ratios


def test_the_stored_results_confirm_the_table() -> None:
    stored = stored_ratios()
    for cells, dtypes, layers, directions, sizes in _replace._FAST_ON_GPU:
        for cell, *dims in itertools.product(cells, layers, directions):
            found = {
                kind: ratios
                for kind, ratios in stored.items()
                if (kind[0], *kind[2:4]) == (cell, *dims) and kind[1] in dtypes and kind[4] in sizes
            }
            slow = {kind: max(ratios) for kind, ratios in found.items() if max(ratios) > PARITY}
            assert not slow, "slower than cuDNN"
            assert statistics.median(itertools.chain(*found.values())) < 1
            assert {kind[1] for kind in found} == set(dtypes), "a dtype was not measured"
            measured = {kind[4] for kind in found}
            assert {sizes[0], sizes[-1]} <= measured, "the smallest or largest H was not measured"


def test_the_rule_follows_the_table() -> None:
    rule = _replace._slow_on_gpu
    for row in _replace._FAST_ON_GPU:
        for cell, dtype, layers, directions, hidden in itertools.product(*row):
            kind = (cell, dtype, layers, directions, hidden)
            assert rule(kind, *H100) is None
            assert rule(kind, (7, 5), True) == "its compute capability is below 8.0"
            assert rule(kind, (9, 0), False) == "this lltm has no kernels for it"
            for other in {row[4][0] - 8, hidden + 4, row[4][-1] + 8}:
                reason = f"{UNMEASURED}{other} hidden units"
                assert rule((*kind[:4], other), *H100) == reason


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
    ],
)
def test_replace_applies_the_rule_to_modules_on_a_gpu(
    cls: Any, dtype: torch.dtype, options: Any, autocast: Any, reason: str | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "uniform_", lambda tensor, *bounds: tensor)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with FakeTensorMode(), torch.backends.cudnn.flags(enabled=False):
            model = cls(8, 256, device="cuda", dtype=dtype, **options)
        left = {"": "it is on cuda:0; this lltm has no kernels for it"}
        assert lltm.replace_(model) == lltm.Replaced([], left)
        patch.setattr(_replace, "_gpu", lambda device: H100)
        for name, value in autocast.items():
            patch.setattr(torch, name, value)
        left = {} if reason is None else {"": f"it is on cuda:0; {UNMEASURED}{reason}"}
        assert lltm.replace_(model) == lltm.Replaced([] if left else [""], left)
