"""The choice of the values that forward saves for backward: a minimum cut."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from .values import COMPARISONS, CONDITIONS, CUTS, EXPENSIVE, Expressions, Value, needed


def choose_saved(made: Expressions, parameters: set[Value]) -> list[Value]:
    """Returns the fewest values from which backward can compute the gradients without an expensive
    function, a product or a mean of forward's, and the operands of products.

    Saved values may be rounded to 16 bits. A rounded operand could change the result of a
    comparison, floor or fmod, so these are themselves saved if their operands are inexact.
    Comparing a saved value with zero remains exact.
    """
    operands = {a for v in made.products.values() for a in v.args}
    order = needed([*made.gradients.values(), *operands])
    derived = set(made.tangents.values())  # values that depend on tangents
    exact, as_is = set(parameters), set(made.inputs.values()) - parameters
    for v in order:
        args = [a for a in v.args if isinstance(a, Value)]
        if not derived.isdisjoint(args):
            derived.add(v)
        decides = v.op in COMPARISONS | {"sign", "floor", "fmod"}
        if decides and not exact.issuperset(args):
            by_sign = v.op == "sign" or (v.op in COMPARISONS and 0.0 in v.args)
            as_is.add(_same_sign(args[0]) if by_sign else v)
        is_whole = v.op in CONDITIONS or v.op == "sign"
        if is_whole or (v.args and v.op not in EXPENSIVE | CUTS and exact.issuperset(args)):
            exact.add(v)
    # Minimum cut: each value is an edge, and saving the value cuts it. A path from source to sink
    # means that backward would need something that it does not have. It has the parameters.
    edges: dict[Any, dict[Any, float]] = defaultdict(dict)
    kept, after = [v for v in order if v not in derived], set[Value]()
    for v in kept:
        # Prefer the earlier of two possible values, but the later of two values after a mean: then
        # backward need not repeat the norm; and after elu(x) + 1: rounding elu(x) to 16 bits would
        # lose this slope. Prefer detach(x) to x, or backward would have to detach x again.
        of_elu = v.op == "add" and any(isinstance(a, Value) and a.op == "elu" for a in v.args)
        if v.op == "mean" or of_elu or not after.isdisjoint(v.args):
            after.add(v)
        before = [a.rank - 0.5 for a in v.args if v.op == "detach" and isinstance(a, Value)]
        rank = before[0] if before else v.rank
        edges[v, "in"][v, "out"] = 10**6 + (-rank if v in after else rank)
        if v in as_is or v in operands or v.op in EXPENSIVE | CUTS:
            edges["source"][v, "in"] = math.inf
        for a in v.args:
            edges[a, "out"][v, "in"] = math.inf
    used = [a for v in order if v in derived for a in v.args]
    for a in (*used, *made.gradients.values(), *operands):
        if a in kept:
            edges[a, "out"]["sink"] = math.inf
    near = _near_source(edges)
    return [v for v in kept if (v, "in") in near and (v, "out") not in near]


def _same_sign(v: Value) -> Value:
    """Returns the value whose sign decides whether v is positive, or whether it is negative."""
    match v:
        case (
            Value(op="negate" | "detach", args=(Value() as a,))
            | Value(op="maximum", args=(Value() as a, 0.0))
        ):
            return _same_sign(a)
    return v


def _near_source(edges: dict[Any, dict[Any, float]]) -> set[Any]:
    """Returns the nodes on the source side of a minimum cut (shortest augmenting paths)."""
    for node, following in list(edges.items()):
        for other in following:
            edges[other].setdefault(node, 0.0)
    while True:
        before, queue = {"source": "source"}, ["source"]
        for node in queue:
            for other, capacity in edges[node].items():
                if capacity > 0 and other not in before:
                    before[other] = node
                    queue.append(other)
        if "sink" not in before:
            return set(before)
        path, node = [], "sink"
        while node != "source":
            path.append((before[node], node))
            node = before[node]
        flow = min(edges[a][b] for a, b in path)
        for a, b in path:
            edges[a][b] -= flow
            edges[b][a] += flow
