"""What torch.fx makes of a layer: a leaf, one node, as it does of torch.nn's.

A tracer knows leaves by where their class was defined, in torch.nn, and has no list to add to. So
Tracer.call_module, which decides, is told here of the modules whose forward is lltm's own. A
subclass that has a forward of its own is traced through, and lltm's forward in it gives a node of
the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils import _pytree as pytree

# Whether a model is being traced. A call without proxies then has constants alone as arguments, but
# parameters that are proxies.
is_tracing = is_fx_symbolic_tracing

_call_module = Tracer.call_module


def make_leaves(base: type) -> None:
    """Makes every tracer take modules of this class for leaves."""

    def call_module(
        self: Tracer,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def node(*args: Any, **kwargs: Any) -> Proxy:
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

        # Tracers of tensors, such as torch.export's, call this without a proxy.
        is_leaf = isinstance(m, base) and _is_called_as_it_is(m) and _holds_proxy((args, kwargs))
        return _call_module(self, m, node if is_leaf else forward, args, kwargs)

    Tracer.call_module = call_module  # type: ignore[method-assign]


def _is_called_as_it_is(module: nn.Module) -> bool:
    """False if a subclass or the module itself does something around lltm's forward."""
    cls = type(module)
    return (
        cls.forward.__module__.startswith("lltm.")
        and "forward" not in vars(module)
        and cls.__call__ is nn.Module.__call__
    )


def _holds_proxy(arguments: Any) -> bool:
    return any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves(arguments))


def states(where: str, hx: Any, count: int) -> Any:
    """The states of a call that is traced through; of a proxy, whose type is unknown, its items."""
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
    """A list of the one state of a call, which in a graph may turn out to be None."""
    if isinstance(hx, Proxy) and hx.node.op == "placeholder":
        return hx.tracer.create_proxy("call_function", _given, (hx,), {})
    return [hx]


def _given(hx: Any) -> list[Any]:
    return [] if hx is None else [hx]
