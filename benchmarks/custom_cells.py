"""Compares training of custom cells (examples/cells) with a Python loop over
their functions and, with --compile, with torch.compile of that loop.

    python benchmarks/custom_cells.py --cell cifg slstm --dtype float32
    python benchmarks/custom_cells.py --compile --json custom_cells.json

The method is that of `python -m lltm.benchmark`. The loop has a GEMM for the
input of all steps and a GEMM per step for h, the best that PyTorch's operations
allow.
"""

from __future__ import annotations

import inspect
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import lltm
from lltm.benchmark.__main__ import begin, finish, parser
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.contenders import OURS, Make, compiled
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Settings, layer_timer, measure

GALLERY = Path(__file__).parents[1] / "examples" / "cells"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "train")
SHAPES: tuple[Shape, ...] = ((100, 16, 32, 128), (100, 64, 128, 256))
QUICK_SHAPES: tuple[Shape, ...] = ((20, 16, 32, 65),)
MOST_COMPILED_STEPS = 100  # compiling them takes minutes

LOOP = "Python loop"
COMPILED = "torch.compile, loop"


def cell_of(name: str) -> lltm.Cell:
    sys.path.insert(0, str(GALLERY))
    try:
        cell = getattr(import_module(name), name)
    finally:
        sys.path.pop(0)
    assert isinstance(cell, lltm.Cell)
    return cell


class Ours(nn.Module):
    """Starts from the cell's initial states."""

    def __init__(self, cell: lltm.Cell, inputs: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = cell.Layer(inputs, hidden, dtype=dtype)

    def forward(self, input: Tensor, hx: Any) -> tuple[Tensor, Any]:
        output, state = self.layer(input)
        return output, state


class Loop(Ours):
    def __init__(self, cell: lltm.Cell, inputs: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(cell, inputs, hidden, dtype)
        self.of_x, self.of_h = (
            next(line.split()[1:] for line in cell.text.splitlines() if line.startswith(weight))
            for weight in ("weight_ih", "weight_hh")
        )
        self.joined = self.of_x == self.of_h
        assert cell.function is not None
        self.function: Callable[..., Any] = cell.function
        _, *self.arguments = inspect.signature(cell.function).parameters
        make: Any = namedtuple  # noqa: PYI024
        self.gates = make("z", cell.gates)
        self.states = cell.states

    def forward(self, input: Tensor, hx: Any) -> tuple[Tensor, Any]:
        tensors: dict[str, Tensor] = {
            name.removesuffix("_l0"): tensor for name, tensor in self.layer.named_parameters()
        }
        h, *others = (state[0] for state in self._first(input))
        from_x = linear(input, tensors["weight_ih"], tensors["bias_ih"])
        outputs = []
        for x in from_x.unbind(0):
            z = self._gates(x, h, tensors)
            known = {"h": h, **dict(zip(self.states, others, strict=True)), **tensors}
            result = self.function(z, *(known[name] for name in self.arguments))
            h, *others = (result,) if isinstance(result, Tensor) else result
            outputs.append(h)
        return torch.stack(outputs), (h, *others)

    def _first(self, input: Tensor) -> tuple[Tensor, ...]:
        first = self.layer._first_states(input, input.shape[1])
        return (first,) if isinstance(first, Tensor) else tuple(first)

    def _gates(self, x: Tensor, h: Tensor, tensors: dict[str, Tensor]) -> Any:
        weight, bias = tensors["weight_hh"], tensors["bias_hh"]
        if self.joined:
            return self.gates(*(x + linear(h, weight, bias)).chunk(len(self.of_x), 1))
        z = dict(zip(self.of_x, x.chunk(len(self.of_x), 1), strict=True))
        if self.of_h:
            parts = linear(h, weight, bias).chunk(len(self.of_h), 1)
            for gate, part in zip(self.of_h, parts, strict=True):
                z[gate] = z[gate] + part if gate in z else part
        return self.gates(**z)


def compiled_loop(cell: lltm.Cell, case: Case) -> Make:
    if case.steps > MOST_COMPILED_STEPS:
        raise RuntimeError(f"compiling over {MOST_COMPILED_STEPS} steps takes too long")
    torch.compiler.reset()  # before the recompilation limit causes eager mode
    return compiled(partial(Loop, cell))


def compare(case: Case, settings: Settings) -> Row:
    cell = cell_of(case.cell)
    builds: dict[str, Callable[[], Any]] = {
        OURS: lambda: layer_timer(partial(Ours, cell), case),
        LOOP: lambda: layer_timer(partial(Loop, cell), case),
    }
    if settings.compile:
        builds[COMPILED] = lambda: layer_timer(compiled_loop(cell, case), case)
    return measure(str(case), builds, settings)


def main() -> None:
    options = parser("python benchmarks/custom_cells.py", __doc__, NAMES).parse_args()
    settings = begin(options)
    rows = []
    for cell in options.cell:
        for shape in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            for dtype in options.dtype:
                case = Case(shape, getattr(torch, dtype), training=True, cell=cell)
                rows.append(compare(case, settings))
                print("\n".join(rows[-1].lines()), flush=True)
    finish(options, {"settings": asdict(settings)}, rows, rows)


if __name__ == "__main__":
    main()
