"""What torch.fx makes of a layer: a leaf, one node, as it does of torch.nn's.

A tracer knows leaves by where their class was defined, and has no list to add to. So it calls
forward, with proxies, and gets the node that a leaf would have had from there.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy, Tracer
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

# Whether a model is being traced. A call without proxies then has constants alone as arguments, but
# parameters that are proxies.
is_tracing = is_fx_symbolic_tracing


def node(where: str, module: Any, input: Any, hx: Any, reset: Any = None) -> Proxy | None:
    """Returns the call as a node of the graph that is being traced; None if there is none."""
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    for value in (input, *states, reset):
        if isinstance(value, Proxy):
            break
    else:
        return None
    tracer = value.tracer
    path = tracer.path_of_module(module) if isinstance(tracer, Tracer) else ""
    if path == "":
        raise RuntimeError(
            f"lltm::{where}: torch.fx traces a model that holds this module, not the module alone"
        )
    args = (input,) if hx is None else (input, hx)
    kwargs = {} if reset is None else {"reset": reset}
    return tracer.create_proxy("call_module", path, args, kwargs)
