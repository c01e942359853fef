"""Compares training of the cells in lltm.cells with torch.nn.LSTM of the same
size, with a Python loop over their functions and, with --compile, with
torch.compile of that loop. Ends with the column of times in docs/cells.md.

    python benchmarks/custom_cells.py --threads 2 --dtype float32
    python benchmarks/custom_cells.py --cell cifg --compile --json cells.json
    python benchmarks/custom_cells.py --errors

With --errors, it prints instead the errors against the modules of other libraries
(the extra `examples`) or, if a cell has none, against the loop, in float64.

The method is that of `python -m lltm.benchmark`. The loop is lltm.testing.loop.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lltm
from lltm.benchmark.cases import Case, Shape
from lltm.benchmark.implementations import OURS, Make, compiled
from lltm.benchmark.options import begin, finish, parser, verdict
from lltm.benchmark.report import Row
from lltm.benchmark.timing import Settings, layer_timer, measure

NAMES = lltm.cells._NAMES
SHAPES: tuple[Shape, ...] = ((64, 16, 32, 128), (100, 64, 128, 256))
QUICK_SHAPES: tuple[Shape, ...] = ((20, 16, 32, 65),)
MOST_COMPILED_STEPS = 100  # compiling them takes minutes

LSTM = "nn.LSTM"
LOOP = "Python loop"
COMPILED = "torch.compile, loop"


class Ours(nn.Module):
    """Starts from the cell's initial states. Returns only the first output of a cell."""

    def __init__(self, cell: lltm.Cell, inputs: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell, self.layer = cell, cell.Layer(inputs, hidden, dtype=dtype)

    def forward(self, input: Tensor, hx: Any) -> tuple[Tensor, Any]:
        output, state = self.layer(input)
        return output if isinstance(output, Tensor) else output[0], state


class Loop(Ours):
    """Calls the cell's function in a Python loop."""

    def forward(self, input: Tensor, hx: Any) -> tuple[Tensor, Any]:
        output, state = lltm.testing.loop(self.cell, self.layer, input)
        return output if isinstance(output, Tensor) else output[0], state


def compiled_loop(cell: lltm.Cell, case: Case) -> Make:
    if case.steps > MOST_COMPILED_STEPS:
        raise RuntimeError(f"compiling over {MOST_COMPILED_STEPS} steps takes too long")
    torch.compiler.reset()  # before the recompilation limit causes eager mode
    return compiled(partial(Loop, cell))


def _layers(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda library: getattr(library, name)(4, 6, 2, **options)


def _slstm(library: Any) -> Any:
    layout = {"input_shape": "SBGNH", "output_shape": "SBH"}
    config = library.sLSTMCellConfig(hidden_size=6, num_heads=2, backend="vanilla", **layout)
    return library.sLSTMCell(config)


class Steps(nn.Sequential):
    """Runs a linear layer and a neuron of snnTorch over a sequence. Returns the spikes."""

    def forward(self, input: Tensor) -> tuple[Tensor]:
        linear, neuron = self
        recurrent = hasattr(neuron, "recurrent")
        count = len(getattr(lltm.cells, type(neuron).__name__.lower()).outputs)
        steps = [[torch.zeros_like(linear(input[0]))] * count]
        for z in linear(input):
            steps.append([y.to(z) for y in neuron(z, *steps[-1][not recurrent :])])
        return (torch.stack([spikes for spikes, *_ in steps[1:]]),)


def _neuron(name: str, **options: Any) -> Callable[[Any], Any]:
    def make(library: Any) -> Any:
        return Steps(nn.Linear(4, 6), getattr(library, name)(**options))

    return make


def _norse(name: str, parameters: str) -> Callable[[Any], Any]:
    def make(library: Any) -> Any:
        given = getattr(library, parameters)(tau_mem_inv=torch.tensor(900.0))  # more spikes
        exact = [x.double() if isinstance(x, Tensor) else x for x in given]
        return getattr(library, name)(4, 6, p=type(given)(*exact))

    return make


# The module of another library, by cell: where it is imported from, and how it is made.
OTHERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        cell: ("torchrecurrent", _layers(name))
        for name, (cell, _) in lltm.cells._convert._TORCHRECURRENT.items()
    },
    "indrnn": ("torchrecurrent", _layers("IndRNN", nonlinearity="relu")),
    "cfc": ("ncps.torch", lambda library: library.CfC(4, 6, backbone_units=6)),
    "keras_gru": (
        "keras.layers",
        lambda library: library.GRU(6, reset_after=False, return_sequences=True, dtype="float64"),
    ),
    "slstm": ("xlstm.blocks.slstm.cell", _slstm),
    "leaky": ("snntorch", _neuron("Leaky", beta=0.7)),
    "synaptic": ("snntorch", _neuron("Synaptic", alpha=0.6, beta=0.7)),
    "alpha": ("snntorch", _neuron("Alpha", alpha=0.9, beta=0.5, threshold=0.1)),
    "rsynaptic": (
        "snntorch",
        _neuron("RSynaptic", alpha=0.6, beta=0.7, all_to_all=True, linear_features=6),
    ),
    "norse_lif": ("norse.torch", _norse("LIFRecurrent", "LIFParameters")),
    "alif": ("norse.torch", _norse("LSNNRecurrent", "LSNNParameters")),
}


def error(name: str, loop: bool = False) -> tuple[float, str]:
    """Returns the largest error of output and input gradient in float64, relative to the largest
    element, and the source: the library of the module, or the loop."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 24, dtype=torch.float64, requires_grad=True)
    layer: Any
    if loop or name not in OTHERS:
        x, source, sizes = x[..., :9], LOOP, (getattr(lltm.cells, name), 9, 4, x.dtype)
        layer, module = Ours(*sizes), Loop(*sizes)
        module.load_state_dict(layer.state_dict())
        results = [run(x, None)[0] for run in (layer, module)]
    else:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        file, make = OTHERS[name]
        x, source = x[..., : 24 if name == "slstm" else 4], file.partition(".")[0]
        module = make(importlib.import_module(file)).double()
        module(x)  # creates the parameters in Keras
        for parameter in filter(torch.is_floating_point, module.parameters()):
            nn.init.normal_(parameter, std=0.5)
        converted = nn.Sequential(*module) if source == "snntorch" else module
        layer = getattr(lltm.cells, f"from_{source}")(converted)
        ones = x.new_ones(5, 3, layer.input_size - x.shape[2])
        output, *_ = (module(x),) if source == "keras" else module(x)
        ours = layer(torch.cat([x, ones], -1))[0]
        results = [ours if isinstance(ours, Tensor) else ours[0], output]
    pairs = zip(*((y, *torch.autograd.grad(y.square().sum(), x)) for y in results), strict=True)
    return max(((y - z).abs().max() / z.abs().max()).item() for y, z in pairs), source


def compare(case: Case, plain: Shape, settings: Settings) -> Row:
    """Measures a cell. `plain` is the shape of the LSTM, without the columns of given gates."""
    cell = getattr(lltm.cells, case.cell)
    builds: dict[str, Callable[[], Any]] = {
        OURS: lambda: layer_timer(partial(Ours, cell), case),
        LSTM: lambda: layer_timer(nn.LSTM, replace(case, shape=plain)),
        LOOP: lambda: layer_timer(partial(Loop, cell), case),
    }
    if settings.compile:
        builds[COMPILED] = lambda: layer_timer(compiled_loop(cell, case), case)
    return measure(str(case), builds, settings)


def main() -> None:
    made = parser("python benchmarks/custom_cells.py", __doc__, NAMES)
    made.add_argument("--errors", action="store_true", help="errors in float64 instead of times")
    options = made.parse_args()
    if options.errors:
        for cell in options.cell:
            print(f"{cell:20} {'{:.0e}, {}'.format(*error(cell))}", flush=True)
        return
    settings = begin(options)
    finish(options, settings, measured(options, settings))


def measured(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    """Prints and yields the rows, then prints the times."""
    times = defaultdict(list)
    for cell in options.cell:
        given = len(getattr(lltm.cells, cell).Layer._HEADER.gates_input)
        for t, b, i, h in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            shape = (t, b, i + given * h, h)
            for dtype in options.dtype:
                case = Case(shape, getattr(torch, dtype), True, options.device, cell)
                row = compare(case, (t, b, i, h), settings)
                print("\n".join(row.lines()), flush=True)
                times[cell, dtype].append(f"{row.ratio(LSTM):.2f}")
                yield row
    if not verdict(settings):
        return
    print(f"\nTime of training / {LSTM}, by shape")
    for (cell, dtype), column in times.items():
        print(f"{cell:20} {dtype:10} {', '.join(column)}")


if __name__ == "__main__":
    main()
