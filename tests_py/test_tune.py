"""LLTM_TUNE in the environment, which is read once: in processes of their own."""

from __future__ import annotations

import json

import pytest
import support
import torch

PROGRAM = """
import json, sys, torch, lltm

torch.set_num_threads(2)
torch.manual_seed(1)
layer, x = lltm.LLTM(24, 64), torch.randn(12, 20, 24)
results = []
for call in range(3):
    print("call", call, file=sys.stderr, flush=True)
    layer.zero_grad()
    output, _ = layer(x)
    output.sum().backward()
    results.append([output.tolist(), layer.weights_l0.grad.tolist()])
print(json.dumps(results))
"""


def run(tune: str) -> tuple[list[list[str]], list[list[torch.Tensor]]]:
    """The lines that each call of the layer prints, and its output and gradient."""
    process = support.run_python("-c", PROGRAM, LLTM_SCHEDULE="1", LLTM_TUNE=tune)
    assert process.returncode == 0, process.stderr
    _, *calls = process.stderr.split("call ")
    lines = [
        [line for line in call.splitlines() if line.startswith("lltm: N=240 ")] for call in calls
    ]
    results = [[torch.tensor(values) for values in call] for call in json.loads(process.stdout)]
    return lines, results


needs_blocked_engine = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="its one engine has no schedules"
)


@needs_blocked_engine
def test_the_first_call_measures_and_the_next_ones_do_not() -> None:
    (first, *others), results = run("1")
    assert [line.split(", ", 1)[1].split(" ")[0] for line in first] == [
        *("measured", "forward:"),
        *("measured", "backward:"),
    ]
    for line in first:
        assert line.startswith("lltm: N=240 B=20 I=24 H=64, ")
        assert line.endswith(", tuned") == (" measured " not in line)
    for lines in others:
        assert lines == [line for line in first if line.endswith(", tuned")]
    # One schedule for all three.
    for call in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(call, results[0], strict=True))


@needs_blocked_engine
def test_without_it_nothing_is_measured() -> None:
    calls, untuned = run("0")
    for lines in calls:
        assert len(lines) == 2
        assert not any("measured" in line or "tuned" in line for line in lines)
    _, tuned = run("1")
    for ours, expected in zip(tuned[0], untuned[0], strict=True):
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error <= 16 * torch.finfo(torch.float32).eps


@needs_blocked_engine
def test_explain_shows_what_was_chosen() -> None:
    options = ("--op", "sequence", "--batch", "8", "--only", "schedule")
    found = support.run_python("-m", "lltm.explain", *options, LLTM_TUNE="1").stdout
    assert found.count(", tuned\n") == 2
    assert "measured" in found
