"""torch.fx support: a trace contains a layer as a call of its operator."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

# Returns True while a model is being traced. A call without proxies then has only constant
# arguments, but its parameters are proxies.
is_tracing = is_fx_symbolic_tracing


def listed(hx: Any, count: int) -> Any:
    """Returns the states of a call as a list. An argument of a graph may be None, so a node lists
    it when the graph runs."""
    if not isinstance(hx, Proxy):
        return [] if hx is None else [hx] if count == 1 else [*hx]
    if hx.node.op == "placeholder":
        return hx.tracer.create_proxy("call_function", listed, (hx, count), {})
    pair: Any = hx
    return [hx] if count == 1 else [pair[k] for k in range(count)]
