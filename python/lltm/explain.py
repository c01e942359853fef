"""Shows how PyTorch processes a call, from the dispatcher to generated code.

python -m lltm.explain                          one step of the LLTM, short stages
python -m lltm.explain --op sequence --steps 2  a sequence of 2 steps
python -m lltm.explain --cell gru --all         the GRU, every stage
python -m lltm.explain --cell cifg              a cell of lltm.cells
python -m lltm.explain --cell my_cell           a file that Cell.save wrote
python -m lltm.explain --op sequence --dynamic  with dynamic batch size and length
python -m lltm.explain --only joint core-aten   only these stages
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import cells, modules
from ._C import ArgumentError
from .custom import explanation
from .custom.cell import Cell
from .custom.explanation import sections, wrapped
from .integrations.decompositions import decompositions
from .integrations.inductor import inductor_decomposed

BUILT_IN = ("lltm", "lstm", "gru", "rnn")


def custom_cell(name: str) -> Cell | None:
    """Returns the cell of lltm.cells or of a file, or None for a built-in cell."""
    if name in BUILT_IN:
        return None
    return getattr(cells, name) if name in cells._NAMES else Cell.load(Path(name))


@dataclass(frozen=True)
class Call:
    op: str  # "step" or "sequence"
    steps: int
    batch: int
    input_size: int
    hidden_size: int
    dynamic: bool  # True if batch size and steps are symbols
    device: str = "cpu"
    cell: str = "lltm"  # of BUILT_IN or lltm.cells, or a file

    def module(self) -> Any:
        custom, is_step = custom_cell(self.cell), self.op == "step"
        if custom is not None:
            make: Any = custom.Cell if is_step else custom.Layer
            given = len(custom.Layer._HEADER.gates_input)  # gates whose values the input has
        else:
            make = getattr(modules, self.cell.upper() + "Cell" * is_step)
            given = 0
        input_size = self.input_size + given * self.hidden_size
        return make(input_size, self.hidden_size, device=self.device)

    def arguments(self) -> tuple[Tensor, Any]:
        module = self.module()
        steps, layers = ((), ()) if self.op == "step" else ((self.steps,), (1,))
        count, sizes = len(module._STATES), (self.batch, self.hidden_size)
        states = torch.zeros(count, *layers, *sizes, device=self.device)
        input = torch.zeros(*steps, self.batch, module.input_size, device=self.device)
        return input, tuple(states) if count > 1 else states[0]

    def dynamic_shapes(self) -> Any:
        if not self.dynamic:
            return None
        batch, steps = torch.export.Dim("batch"), torch.export.Dim("steps")
        input, state = (
            ({0: batch},) * 2 if self.op == "step" else ({0: steps, 1: batch}, {1: batch})
        )
        _, hx = self.arguments()
        return input, (state,) * len(hx) if isinstance(hx, tuple) else state

    def __str__(self) -> str:
        steps = "" if self.op == "step" else f"T={self.steps} "
        sizes = f"{steps}B={self.batch} I={self.input_size} H={self.hidden_size}"
        return f"{self.cell}, {self.op}, {sizes}{', dynamic' if self.dynamic else ''}"


def dispatcher(call: Call) -> str:
    """Dispatch table: the function registered for the operator under each key. A call visits the
    keys of its arguments and its thread in order: Autocast if torch.autocast is enabled, Autograd,
    then the device."""
    # Lines: "CPU: registered at FILE:LINE :: (SCHEMA) -> RESULT [ boxed unboxed ]".
    lines = torch._C._dispatch_dump_table("lltm::sequence").splitlines()
    keys = ("CPU", "CUDA", "Meta", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
    return "\n".join(
        line.split(" :: ")[0].strip() for line in lines if line.split(":")[0].strip() in keys
    )


def schedule(call: Call) -> str:
    """Schedule of the CPU kernels for these sizes and this CPU, in a training step: threads,
    blocks of hidden units, chunks of steps, GEMM format. For a sequence on a GPU: the engine, and
    why it is not the persistent engine; "ATen operations" are slow. In any program, set
    LLTM_SCHEDULE=1 in the environment."""
    # A process reads the variable only once, so a new process runs the call.
    program = f"from lltm.explain import Call, run_eagerly; run_eagerly({call!r})"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LLTM_SCHEDULE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        message = result.stderr.strip().rpartition("\n")[2] or f"exit status {result.returncode}"
        raise RuntimeError(f"{call} failed: {message}")
    lines = [line for line in result.stderr.splitlines() if line.startswith("lltm: ")]
    return "\n".join(wrapped(line.removeprefix("lltm: ")) for line in lines)


def dynamo(call: Call) -> str:
    """TorchDynamo's FX graph: the operators that the Python code of the module called when it ran
    once, without data."""
    graphs, _ = _captured(call)
    return graphs


def joint(call: Call) -> str:
    """AOTAutograd's joint graph: forward and backward of a training step in a single graph of
    kernel calls. AOTAutograd splits it where the least memory must be saved."""
    _, graphs = _captured(call)
    return graphs


def core_aten(call: Call) -> str:
    """Exported program after lltm.decompositions(): only Core ATen operators, which every backend
    has. A dynamic number of steps becomes torch's scan over one step."""
    program = torch.export.export(
        call.module(), call.arguments(), dynamic_shapes=call.dynamic_shapes()
    )
    graph = program.run_decompositions(decompositions()).graph_module
    return _readable(graph)


def inductor(call: Call) -> str:
    """Code that Inductor generates for a training step by default, forward and then backward. It
    calls lltm's kernels."""
    return _generated(call, "inductor", training=True)


def inductor_with_decomposition(call: Call) -> str:
    """Code that Inductor generates for inference with backend=lltm.inductor_decomposed: a GEMM
    call, and a fused C++ loop (Triton on a GPU) for the element-wise part."""
    return _generated(call, inductor_decomposed, training=False)


def _of_cell(stage: Callable[[Cell], str]) -> Callable[[Call], str]:
    @functools.wraps(stage)
    def explained(call: Call) -> str:
        cell = custom_cell(call.cell)
        assert cell is not None, call.cell
        return stage(cell)

    return explained


CELL_STAGES = {name: _of_cell(stage) for name, stage in explanation.STAGES.items()}
STAGES: dict[str, Callable[[Call], str]] = {
    "dispatcher": dispatcher,
    "schedule": schedule,
    "dynamo": dynamo,
    "joint": joint,
    "core-aten": core_aten,
    "inductor": inductor,
    "inductor-decomposed": inductor_with_decomposition,
}
SHORT = ("dispatcher", "schedule")  # up to 40 lines
SHORT_OF_CUSTOM = ("cell", "saved", "hints", "schedule")


def _captured(call: Call) -> tuple[str, str]:
    """Returns both graphs of a training step."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[str] = []
    joint: list[str] = []

    def as_it_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return make_boxed_func(graph.forward)

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint.append(_readable(graph))
        return min_cut_rematerialization_partition(graph, inputs, **options)

    aot = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(_readable(graph))
        return aot(graph, inputs, **options)

    _run(call, backend, training=True)
    return "\n".join(graphs), "\n".join(joint)


def _generated(call: Call, backend: Any, training: bool) -> str:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    # With a cache hit, no code would be recorded.
    with config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(_run, call, backend, training)
    return "\n".join(map(_without_preamble, sources))


def _run(call: Call, backend: Any, training: bool) -> None:
    torch.compiler.reset()
    _step(
        torch.compile(call.module(), backend=backend, fullgraph=True, dynamic=call.dynamic),
        call,
        training,
    )


def run_eagerly(call: Call) -> None:
    _step(call.module(), call, training=True)


def _step(run: Callable[..., Any], call: Call, training: bool) -> None:
    with torch.set_grad_enabled(training):
        result = run(*call.arguments())
        if training:
            sum(tensor.sum() for tensor in torch.utils._pytree.tree_leaves(result)).backward()


def _readable(graph: torch.fx.GraphModule) -> str:
    text = graph.print_readable(print_output=False, include_stride=False)
    return "\n".join(line for line in text.splitlines() if line.strip())


def _without_preamble(source: str) -> str:
    """Returns the kernels and their calling function, without imports and other code."""
    lines = source.splitlines()
    begins = [k for k, line in enumerate(lines) if line.startswith("async_compile = ")]
    ends = [k for k, line in enumerate(lines) if line.startswith(("runner = ", "def get_args"))]
    body = lines[begins[0] + 1 if begins else 0 : ends[0] if ends else len(lines)]
    return "\n".join(line for line in body if line.strip())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def size(text: str) -> int:
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
        return int(text)

    def device(text: str) -> str:
        try:
            torch.empty(0, device=text)
        except (RuntimeError, AssertionError):  # AssertionError in a build without CUDA
            message = f"{text} is not an available device"
            raise argparse.ArgumentTypeError(message) from None
        return text

    def cell(text: str) -> str:
        try:
            custom_cell(text)
        except FileNotFoundError:
            known = ", ".join((*BUILT_IN, *cells._NAMES))
            message = f"{text} is not a file, and not one of {known}"
            raise argparse.ArgumentTypeError(message) from None
        except (ArgumentError, OSError) as error:
            raise argparse.ArgumentTypeError(f"cannot load {text}: {error}") from None
        return text

    parser = argparse.ArgumentParser(
        prog="python -m lltm.explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    cells_text = "of lltm, lstm, gru, rnn, lltm.cells, or a file; default: %(default)s"
    option("--cell", type=cell, default="lltm", metavar="CELL", help=cells_text)
    option("--op", choices=("step", "sequence"), default="step", help="default: %(default)s")
    option("--steps", type=size, default=3, metavar="T", help="default: %(default)s")
    option("--batch", type=size, default=16, metavar="B", help="default: %(default)s")
    option("--input-size", type=size, default=32, metavar="I", help="default: %(default)s")
    option("--hidden-size", type=size, default=128, metavar="H", help="default: %(default)s")
    option("--device", type=device, default="cpu", help="default: %(default)s")
    option("--dynamic", action="store_true", help="symbolic batch size and number of steps")
    option = parser.add_mutually_exclusive_group().add_argument
    every = {**CELL_STAGES, **STAGES}
    option("--only", nargs="+", choices=every, metavar="STAGE", help=", ".join(every))
    option("--all", action="store_true", help="every stage, also graphs and generated code")
    options = parser.parse_args(arguments)
    built_in = options.cell in BUILT_IN
    known, short = (STAGES, SHORT) if built_in else (every, SHORT_OF_CUSTOM)
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"{', '.join(unknown)}: only of a custom cell, not of {options.cell}")
    options.only = [*known] if options.all else options.only
    options.more = [] if options.only else [name for name in known if name not in short]
    options.only = options.only or [*short]
    fixed = ["--batch"] if options.op == "step" else ["--batch", "--steps"]
    if options.dynamic and any(getattr(options, name[2:]) == 1 for name in fixed):
        # torch.export treats a size of 1 as static.
        parser.error(f"with --dynamic, {' and '.join(fixed)} must be 2 at least")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    call = Call(**{field.name: getattr(options, field.name) for field in fields(Call)})
    # torch itself uses deprecated functions.
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    every = {**CELL_STAGES, **STAGES}
    try:
        for text in sections({name: every[name] for name in options.only}, call, call):
            print(text, flush=True)
    except RuntimeError as error:  # such as too little memory
        raise SystemExit(str(error)) from None
    if options.more:
        print(wrapped(f"More with --all, or with --only: {', '.join(options.more)}"))


if __name__ == "__main__":
    main()
