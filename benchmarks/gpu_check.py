"""What a machine with a GPU has: tools, versions, clocks, copy bandwidth, rate of products.

    python benchmarks/gpu_check.py --json machine.json
    python benchmarks/gpu_check.py --quick              without rates

Needs PyTorch and nothing of lltm, so that it says what is missing before anything is built. Rates
are of a copy within the card's memory (bytes read and written) and of products of 8192 by 8192, on
random numbers. No setting of the card is changed. The exit status says whether anything is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results_file import write_json

TOOLS = ("make", "g++", "nvcc", "compute-sanitizer", "ncu", "cmake", "ninja")
# What nvidia-smi is asked for: before the products and just after them.
SMI = (
    *("name", "driver_version", "compute_cap", "memory.total", "temperature.gpu", "power.draw"),
    *("power.limit", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
)
ROUNDS = 11


def output_of(*command: str) -> str:
    """What a command prints, or why it does not run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return run.stdout + run.stderr


def version_of(tool: str) -> str | None:
    """The line that has a version number; None where there is no such tool."""
    if shutil.which(tool) is None:
        return None
    lines = output_of(tool, "--version").splitlines()
    numbered = [line.strip() for line in lines if re.search(r"\d+\.\d+", line)]
    # nvcc, ncu and compute-sanitizer begin with years of copyright.
    named = [line for line in numbered if re.search(r"[Vv]ersion|release", line)]
    return next(iter([*named, *numbered, *lines]), "no version")


def smi() -> dict[str, str]:
    text = output_of("nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader")
    values = text.strip().split(", ")
    return dict(zip(SMI, values, strict=True)) if len(values) == len(SMI) else {"error": text}


def rate(run: Callable[[], object], amount: float) -> dict[str, Any]:
    """Of what `run` does `amount` of: the median of rounds, after three to warm up."""
    seconds = []
    for number in range(3 + ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            seconds.append(start.elapsed_time(end) * 1e-3)
    return {"per_second": amount / statistics.median(seconds), "seconds": seconds}


def card() -> dict[str, Any]:
    """What the card can do."""
    size, n = 1 << 30, 8192
    # Of random bytes: zeros are stored compressed.
    source = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    measured = {"copy, B": rate(lambda: target.copy_(source), 2.0 * size)}
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        name = f"product, {str(dtype).removeprefix('torch.')}, FLOP"
        measured[name] = rate(partial(torch.mm, a, b, out=torch.empty_like(a)), 2.0 * n**3)
    return measured


def check(save: Callable[[Mapping[str, Any]], None], quick: bool) -> list[str]:
    """Returns what is missing; calls `save` with all that is known, as often as there is more."""
    known: dict[str, Any] = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda),
        "tools": {tool: version_of(tool) for tool in TOOLS},
    }
    missing = [f"no {tool} here" for tool, version in known["tools"].items() if version is None]
    save(known)
    if not torch.cuda.is_available():
        return [*missing, "no GPU here"]
    properties = torch.cuda.get_device_properties(0)
    known["GPU"] = {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "L2": properties.L2_cache_size,
        "idle": smi(),
    }
    save(known)
    if quick:
        return missing
    known["GPU"]["rates"] = card()
    known["GPU"]["busy"] = smi()
    save(known)
    return missing


def lines(known: Mapping[str, Any], indent: str = "") -> list[str]:
    """As text, without the samples."""
    text = []
    for name, value in known.items():
        if isinstance(value, Mapping) and "per_second" in value:
            text.append(f"{indent}{name}: {value['per_second']:.4g} per second")
        elif isinstance(value, Mapping):
            text += [f"{indent}{name}:", *lines(value, indent + "  ")]
        else:
            text.append(f"{indent}{name}: {'missing' if value is None else value}")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found")
    parser.add_argument("--quick", action="store_true", help="without rates")
    options = parser.parse_args(arguments)
    known: dict[str, Any] = {}

    def save(more: Mapping[str, Any]) -> None:
        known.update(more)
        if options.json is not None:
            write_json(options.json, known)

    missing = check(save, options.quick)
    print("\n".join(lines(known)))
    if missing:
        raise SystemExit("; ".join(missing))


if __name__ == "__main__":
    main()
