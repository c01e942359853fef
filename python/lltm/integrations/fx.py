"""torch.fx support: a module is a leaf of the trace, a single node, like torch.nn's modules.

Tracers recognize leaves by the module of their class, torch.nn, and have no list to extend. So this
file patches Tracer.call_module for modules that use lltm's forward. Subclasses with another
forward are traced through, and lltm's forward in them becomes a node of the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils import _pytree as pytree

# Returns True while a model is being traced. A call without proxies then has only constant
# arguments, but its parameters are proxies.
is_tracing = is_fx_symbolic_tracing

_call_module = Tracer.call_module


def make_leaves(base: type) -> None:
    """Makes modules of this class leaves for every tracer."""

    def call_module(
        self: Tracer,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def node(*args: Any, **kwargs: Any) -> Proxy:
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

        # Tracers that use tensors, such as torch.export's, pass no proxies.
        is_leaf = isinstance(m, base) and _is_called_as_it_is(m) and _holds_proxy((args, kwargs))
        return _call_module(self, m, node if is_leaf else forward, args, kwargs)

    Tracer.call_module = call_module  # type: ignore[method-assign]


def _is_called_as_it_is(module: nn.Module) -> bool:
    """Returns False if the subclass or the module itself overrides forward or __call__."""
    cls = type(module)
    return (
        cls.forward.__module__.startswith("lltm.")
        and "forward" not in vars(module)
        and cls.__call__ is nn.Module.__call__
    )


def _holds_proxy(arguments: Any) -> bool:
    return any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves(arguments))


def states(where: str, hx: Any, count: int) -> Any:
    """Returns the states of a traced call. A proxy, whose type is unknown, is indexed."""
    if count == 1 or not isinstance(hx, Proxy):
        return hx
    if hx.node.op == "placeholder" and hx.node.args == (None,):
        raise RuntimeError(
            f"lltm::{where}: torch.fx can't tell whether hx is None: trace a model that holds this"
            " module, or with concrete_args={'hx': None}"
        )
    pair: Any = hx
    return tuple(pair[k] for k in range(count))


def listed(hx: Any) -> Any:
    """Returns a list of the single state of a call. In a graph, the state may be None."""
    if isinstance(hx, Proxy) and hx.node.op == "placeholder":
        return hx.tracer.create_proxy("call_function", _given, (hx,), {})
    return [hx]


def _given(hx: Any) -> list[Any]:
    return [] if hx is None else [hx]
