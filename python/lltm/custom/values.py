"""The expression graph of a traced function: values and the operations that compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the table in cpp/src/cell/program.h: the words, and expensive functions of one operand.
_WORDS, _FUNCTIONS = torch.ops.lltm._operations()
# PyTorch equivalents: functions of the same name, except these. Conditions are the numbers 0 and 1.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{word: getattr(torch, word) for word in _WORDS if hasattr(torch, word)},
    "copy": torch.clone,
    "negate": torch.neg,
    "elu": F.elu,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "not": torch.logical_not,
    "equal": torch.eq,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
}
EXPENSIVE = frozenset(_FUNCTIONS)
COMMUTATIVE = {"add", "multiply", "maximum", "minimum", "equal", "not_equal", "and", "or"}
COMPARISONS = {"greater", "greater_equal", "equal", "not_equal"}
CONDITIONS = COMPARISONS | {"and", "or", "not"}
# Operations that combine hidden units: between them, a step is element-wise.
CUTS = {"product", "mean"}


def _operators(op: str) -> tuple[Callable[[Value, Operand], Any], ...]:
    """Returns a Python operator and its reflected form."""
    return lambda a, b: apply(op, a, b), lambda b, a: apply(op, a, b)


@dataclass(eq=False, repr=False)
class Value:
    """A node of the expression graph, with one value per hidden unit: an input or a result."""

    graph: dict[Any, Value]  # all values, by operation and operands
    op: str
    args: tuple[Operand, ...]
    rank: int  # position in the graph
    name: str = ""  # the local variable of the user's function
    # In backward, a product has the gates of one operand: args are the gradients of these gates.
    gates: tuple[str, ...] = ()

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __truediv__, __rtruediv__ = _operators("divide")

    def __neg__(self) -> Operand:
        return apply("negate", self)


Operand: TypeAlias = Value | float


def apply(op: str, *args: Operand) -> Operand:
    """Adds an operation to the graph: folds constants, simplifies, and reuses an equal node."""
    values = [a for a in args if isinstance(a, Value)]
    if not values:
        return float(OPERATIONS[op](*(torch.tensor(a, dtype=torch.float64) for a in args)))
    if (simpler := _simplified(op, args)) is not None:
        return simpler
    graph = values[0].graph
    key = (op, frozenset(args) if op in COMMUTATIVE else args)
    return graph.setdefault(key, Value(graph, op, args, len(graph)))


def _simplified(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """Returns a simpler equal operand, or None. Bitwise identical, except for the sign of zero."""
    match op, args:
        case ("add" | "subtract", (a, 0.0)) | ("multiply" | "divide", (a, 1.0)):
            return a
        case ("add", (0.0, a)) | ("multiply", (1.0, a)):
            return a
        case ("multiply" | "divide", (a, -1.0)) | ("multiply", (-1.0, a)) | ("subtract", (0.0, a)):
            return -a
        case ("negate", (Value(op="negate", args=(a,)),)) | ("not", (Value(op="not", args=(a,)),)):
            return a
        case ("negate", (Value(op="multiply", args=(float(k), a) | (a, float(k))),)):
            return -k * a
        case ("add", (a, Value(op="negate", args=(b,))) | (Value(op="negate", args=(b,)), a)):
            return a - b
        case ("subtract", (a, Value(op="negate", args=(b,)))):
            return a + b
        case ("multiply" | "divide", (Value(op="negate", args=(a,)), b)):
            return apply(op, a, -b) if isinstance(b, float) else -apply(op, a, b)
        case ("multiply" | "divide", (a, Value(op="negate", args=(b,)))):
            return apply(op, -a, b) if isinstance(a, float) else -apply(op, a, b)
        case ("detach", (Value(op=op) as a,)) if op in {*CONDITIONS, "sign", "detach"}:
            return a
        case ("mean", (Value(op="mean") as a,)):
            return a
        case ("greater", (Value(op="maximum", args=(a, 0.0)), 0.0)):
            return apply(op, a, 0.0)
        case ("greater_equal", (0.0, Value(op="maximum", args=(a, 0.0)))):
            return apply(op, 0.0, a)
        case ("where", (float(k), a, b)):
            return a if k else b
        case ("where", (Value(op="not", args=(condition,)), a, b)):
            return apply("where", condition, b, a)
        case ("where", (condition, 1.0, 0.0)):
            return condition
        case ("where", (_, a, b)) if a is b:
            return a
    return None


def needed(results: Sequence[Operand], known: Mapping[Value, Any] | None = None) -> list[Value]:
    """Returns the values to compute for the results, without the known values, in order."""
    found, todo = set(known or ()), [r for r in results if isinstance(r, Value)]
    while todo:
        if (v := todo.pop()) not in found:
            found.add(v)
            todo += [a for a in v.args if isinstance(a, Value)]
    return sorted(found.difference(known or ()), key=lambda v: v.rank)


@dataclass(frozen=True)
class Expressions:
    """Results of the function and its derivative, by their names in the serialized cell."""

    inputs: dict[str, Value]  # z, also of products; states, h, parameters
    tangents: dict[str, Value]  # gradients of h' and states'
    results: dict[str, Operand]  # h' and states'
    gradients: dict[str, Operand]  # gradients of the inputs
    own_gradient: bool  # True if the function defines its own gradient

    @property
    def products(self) -> dict[str, Value]:
        """Pre-activations that the function computes by a product, by their names."""
        return {name: v for name, v in self.inputs.items() if v.op == "product"}

    def written_out(self) -> list[Any]:
        """Returns a form in which two traces can be compared."""
        results = [*self.products.values(), *self.results.values(), *self.gradients.values()]
        rows: list[tuple[Any, ...]] = [("results", *results)]
        rows += [(v.op, *v.args) for v in needed(results)]
        return [[f"value {a.rank}" if isinstance(a, Value) else a for a in row] for row in rows]
