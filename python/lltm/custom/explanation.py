"""Implements `cell.explain()` of custom cells."""

from __future__ import annotations

import functools
import itertools
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .trace import call, plain_torch, trace
from .values import CUTS

if TYPE_CHECKING:
    from .cell import Cell  # imports this file

UNITS = 64
WIDTH = 79  # line width of prose


def sections(stages: Mapping[str, Callable[[Any], str]], of: Any, title: object) -> Iterator[str]:
    """Yields the output of every stage, after its name and docstring."""
    for name, stage in stages.items():
        sentence = textwrap.fill(" ".join((stage.__doc__ or "").split()), WIDTH)
        yield f"==== {name}: {title}\n{sentence}\n\n{stage(of)}\n"


def wrapped(line: str) -> str:
    """Wraps a line of prose. Code, such as graphs, is not wrapped."""
    return textwrap.fill(
        line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def interface(cell: Cell) -> str:
    """Interface of the modules: gates with their inputs, states besides h with initial values,
    parameters (one value per hidden unit, or a scalar), and whether |h'| <= 1 is declared, which
    int8 weights require."""
    header, learned = cell.Layer._HEADER, cell.Layer._DERIVATION
    lines = {
        "gates": ", ".join(f"{gate} ({', '.join(header.reads[gate])})" for gate in cell.gates),
        "states": ", ".join(f"{k} = {v!r}" for k, v in header.states.items()),
        "parameters": ", ".join(
            f"{name} (scalar)" if name in learned.scalars else name for name in learned.parameters
        ),
        "bounded": "yes" if header.bounded else "no",
    }
    lines |= {"computed once": ", ".join(learned.results)} if learned.results else {}
    lines |= {"no bias": ", ".join(header.no_bias)} if header.no_bias else {}
    lines |= {"outputs": ", ".join(header.outputs)} if header.outputs else {}
    return "\n".join(wrapped(f"{name:11} {value or 'none'}") for name, value in lines.items())


def saved(cell: Cell) -> str:
    """Values that forward saves for backward: the fewest from which backward computes the
    gradients without an expensive function. Values have the names of the function's variables, or
    t1, t2 and so on."""
    header = cell.Layer._HEADER
    made = {name: (op, *words) for name, op, words in assignments(cell.text, "forward")}
    lines = [f"{name} = {' '.join(made[name])}" if name in made else name for name in header.saved]
    values = len(header.saved)
    total = (
        f"{values} values, {4 * values} bytes per hidden unit, sequence and time step in float32"
    )
    if cell.function is not None:
        kept = kept_by_autograd(cell.function, cell)
        total += f"; in a Python loop autograd saves {kept} bytes"
    return "\n".join([*lines, wrapped(total)])


def forward(cell: Cell) -> str:
    """Instructions of forward between the GEMMs, for each hidden unit. An executed instruction may
    combine several, such as a multiplication and an addition, or a result and its copy to
    the saved values. Products and means combine hidden units: they divide a step into parts."""
    return _instructions(cell, "forward")


def backward(cell: Cell) -> str:
    """Instructions of backward. d.X is the gradient of X."""
    return _instructions(cell, "backward")


def hints(cell: Cell) -> str:
    """Possible savings."""
    lines = []
    used = {word for _, _, words in assignments(cell.text, "forward") for word in words}
    for gate in cell.gates:
        if f"z.{gate}" not in used:
            lines.append(
                f"z.{gate} is not used, but the GEMMs compute it. Its weight rows are not trained."
            )
    if cell.function is not None:
        header = cell.Layer._HEADER
        without = trace(
            _with_detached_maxima(cell.function),
            gates=cell.gates,
            reads=header.reads,
            states=header.states,
            parameters=dict.fromkeys(cell.parameters, 0.0),
            name=header.name,
        )
        if (more := len(header.saved) - len(without.saved)) > 0:
            lines.append(
                f"The derivatives of maximum and minimum save {more} additional"
                f" value{'s' * (more > 1)}. If a maximum or minimum cancels out, like a stabilizer"
                " of exponentials, call detach() on it."
            )
    return "\n".join(map(wrapped, lines)) or "none"


STAGES = {
    "cell": interface,
    "saved": saved,
    "forward": forward,
    "backward": backward,
    "hints": hints,
}


def _instructions(cell: Cell, section: str) -> str:
    lines = [" ".join([y, "=", op, *words]) for y, op, words in assignments(cell.text, section)]
    executed = torch.ops.lltm._instructions(cell.text)[section == "backward"]
    (_, shown), *others = _parts(lines)
    for k, (cuts, part) in enumerate(others):
        shown += [f"---- between parts {k + 1} and {k + 2}", *map(_with_cost, cuts)]
        shown += [f"---- part {k + 2}", *part]
    elementwise = len(lines) - sum(len(cuts) for cuts, _ in others)
    total = f"{elementwise} instructions, {executed} executed"
    if others:
        total += (
            f", in {len(others) + 1} parts. If threads share sequences, they wait for each other"
            " between parts."
        )
    return "\n".join([*shown, wrapped(total)])


def assignments(text: str, section: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields name, operation and operands of each assignment in forward or backward."""
    lines = text.splitlines()
    for line in lines[lines.index(section) + 1 :]:
        name, *words = line.split(" ")
        if words[:1] != ["="]:
            return
        yield name, words[1], words[2:]


def _parts(lines: list[str]) -> list[tuple[list[str], list[str]]]:
    """Divides assignments into element-wise parts. Returns for each part the products and means
    before it, and its assignments."""
    depth, divided = dict[str, int](), [(list[str](), list[str]())]
    for line in lines:
        name, _, op, *words = line.split(" ")
        depth[name] = k = max([0, *(depth.get(word, 0) for word in words)]) + (op in CUTS)
        divided += [([], [])] * (k == len(divided))
        divided[k][op not in CUTS].append(line)
    return divided


def _with_cost(line: str) -> str:
    """Returns a product or mean with its cost."""
    _, _, op, *words = line.split(" ")
    if op == "mean":
        return f"{line}  # sum over the hidden units"
    gates = "" if len(words) == 1 else f"{len(words)} "
    return f"{line}  # GEMM with recurrent weights, ({gates}H, H)"


def kept_by_autograd(function: Callable[..., Any], cell: Cell) -> int:
    """Returns the bytes per hidden unit that autograd saves in a call, without parameters."""
    header = cell.Layer._HEADER
    kept = weakref.WeakValueDictionary[int, Tensor]()  # freed with their graph, as after detach()
    numbers = itertools.count()

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, 0.5).requires_grad_()

    def keep(x: Tensor) -> Tensor:
        kept[next(numbers)] = saved = x.detach()
        return saved

    with plain_torch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        scalars = cell.Layer._DERIVATION.scalars
        parameters = {p: filled(1 if p in scalars else UNITS) for p in cell.parameters}
        weight = filled(UNITS, UNITS)
        z: dict[str, Any] = {gate: filled(1, UNITS) for gate in cell.gates}
        z |= {gate: lambda v: v @ weight + filled(1, UNITS) for gate in header.products}
        states = {state: filled(1, UNITS) for state in ("h", *header.states)}
        results = call(function, z, states | parameters)  # keeps the saved tensors alive
    assert results
    storages = [x.untyped_storage() for x in (weight, *kept.values()) if x.dim() > 1]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()) // UNITS - weight.nbytes // UNITS


class _DetachedMaxima(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        chooses = getattr(func, "__name__", "") in ("maximum", "minimum")
        return result.detach() if chooses else result


def _with_detached_maxima(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def detaching(*args: Any, **kwargs: Any) -> Any:
        with _DetachedMaxima():
            return function(*args, **kwargs)

    return detaching
