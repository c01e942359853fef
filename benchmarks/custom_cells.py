"""Compares training of the cells in lltm.cells with a Python loop over their
functions and, with --compile, with torch.compile of that loop.

    python benchmarks/custom_cells.py --cell cifg slstm --dtype float32
    python benchmarks/custom_cells.py --compile --json custom_cells.json

The method is that of `python -m lltm.benchmark`. The loop has a GEMM for the
input of all steps, and a GEMM per step for h and for each product's operand:
the best that PyTorch's operations allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
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

NAMES = lltm.cells._NAMES
SHAPES: tuple[Shape, ...] = ((100, 16, 32, 128), (100, 64, 128, 256))
QUICK_SHAPES: tuple[Shape, ...] = ((20, 16, 32, 65),)
MOST_COMPILED_STEPS = 100  # compiling them takes minutes

LOOP = "Python loop"
COMPILED = "torch.compile, loop"


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
        self.cell, self.header = cell, cell.Layer._HEADER
        operands = dict(re.findall(r"^z\.(\w+) = product (\S+)$", cell.text, re.MULTILINE))
        self.groups: dict[str, list[str]] = {}  # the gates of a GEMM, by its operand
        for gate in self.header.gates_h:
            self.groups.setdefault(operands.get(gate, "h"), []).append(gate)
        self.joined = self.groups == {"h": [*self.header.gates_x]}

    def forward(self, input: Tensor, hx: Any) -> tuple[Tensor, Any]:
        tensors: dict[str, Tensor] = {
            name.removesuffix("_l0"): tensor for name, tensor in self.layer.named_parameters()
        }
        first = self.layer._first_states(input, input.shape[1])
        h, *others = (state[0] for state in ([first] if isinstance(first, Tensor) else first))
        columns, gates_h = tensors["weight_ih"].shape[1], self.header.gates_h
        from_x = linear(input[..., :columns], tensors["weight_ih"], tensors["bias_ih"])
        parts = [tensors[name].split(h.shape[1]) for name in ("weight_hh", "bias_hh")]
        weights = {
            operand: [torch.cat([part[gates_h.index(gate)] for gate in gates]) for part in parts]
            for operand, gates in self.groups.items()
        }
        outputs = []
        for x, given in zip(from_x.unbind(0), input[..., columns:].unbind(0), strict=True):
            z = self._gates(x, given, h, weights)
            known = {**dict(zip(("h", *self.cell.states), (h, *others), strict=True)), **tensors}
            h, *others = self.cell._called(z, known)
            outputs.append(h)
        return torch.stack(outputs), (h, *others)

    def _gates(self, x: Tensor, given: Tensor, h: Tensor, weights: dict[str, Any]) -> Any:
        size = h.shape[1]
        if self.joined:
            x = x + linear(h, *weights["h"])
        z: dict[str, Any] = dict(zip(self.header.gates_x, x.split(size, 1), strict=True))
        z |= zip(self.header.gates_input, given.split(size, 1), strict=False)
        if self.joined:
            return z
        from_x = {**z}

        @cache
        def parts(operand: str, v: Tensor) -> dict[str, Tensor]:
            values = linear(v, *weights[operand]).split(size, 1)
            gates = zip(self.groups[operand], values, strict=True)
            return {gate: from_x[gate] + part if gate in from_x else part for gate, part in gates}

        for operand, gates in self.groups.items():
            z |= {gate: lambda v, key=(gate, operand): parts(key[1], v)[key[0]] for gate in gates}
        return z | (parts("h", h) if "h" in self.groups else {})


def compiled_loop(cell: lltm.Cell, case: Case) -> Make:
    if case.steps > MOST_COMPILED_STEPS:
        raise RuntimeError(f"compiling over {MOST_COMPILED_STEPS} steps takes too long")
    torch.compiler.reset()  # before the recompilation limit causes eager mode
    return compiled(partial(Loop, cell))


def compare(case: Case, settings: Settings) -> Row:
    cell = getattr(lltm.cells, case.cell)
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
        given = len(getattr(lltm.cells, cell).Layer._HEADER.gates_input)
        for t, b, i, h in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            shape = (t, b, i + given * h, h)
            for dtype in options.dtype:
                case = Case(shape, getattr(torch, dtype), training=True, cell=cell)
                rows.append(compare(case, settings))
                print("\n".join(rows[-1].lines()), flush=True)
    finish(options, {"settings": asdict(settings)}, rows, rows)


if __name__ == "__main__":
    main()
