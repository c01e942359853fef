"""Means and norms over the hidden units: lltm.layer_norm, and operations of a trace."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

if TYPE_CHECKING:
    from .trace import Tracer  # imports this file


def layer_norm(values: Any, eps: float = 1e-5) -> Any:
    """Layer norm over the hidden units, without weight and bias.

    A sequence of values is normalized together: all of them have the same mean and variance.

    Args:
        values (Tensor or tuple[Tensor, ...]): tensors of equal shape, whose last dimension is the
            hidden units, such as gates in a function for :func:`lltm.cell`
        eps (float): added to the variance. Default: 1e-5

    Returns:
        The normalized tensor, or a tuple of them.

    Example::

        r, c, u = lltm.layer_norm((z.r, z.c, z.u), eps=1e-3)
    """
    several = not isinstance(values, Tensor)
    tensors = tuple(values) if several else (values,)
    if not tensors:
        raise ValueError("lltm.layer_norm: expected values to have at least one tensor, got ()")
    if has_torch_function(tensors):
        return handle_torch_function(layer_norm, tensors, tensors if several else values, eps=eps)
    if not isinstance(eps, (numbers.Real, Tensor)):
        raise TypeError(f"lltm.layer_norm: expected eps to be a number, got {eps!r}")
    stacked = torch.stack(tensors, -2)
    made = F.layer_norm(stacked, stacked.shape[-2:], eps=eps)
    # select allows in-place changes, unbind does not.
    each = tuple(made.select(-2, k) for k in range(len(tensors)))
    return each if several else each[0]


class TracerFunction(torch.autograd.Function):
    """Base of functions that the tracer applies: their gradients are derivatives."""


class _Mean(TracerFunction):
    """The mean, with the shape of x. Its derivative is a mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tracer: Tracer) -> Tensor:
        ctx.tracer = tracer
        return tracer.mean(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tracer.mean(grad), None


class _Normalized(TracerFunction):
    """Layer norm of values together, or without `centered` their RMS norm. The means of the
    derivative do not depend on each other."""

    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, centered: bool, eps: float, *values: Tensor
    ) -> tuple[Tensor, ...]:
        part = 1 / len(values)
        ctx.mean = lambda terms: tracer.mean(functools.reduce(torch.add, terms) * part)
        ctx.centered, differences = centered, values
        if centered:
            center = ctx.mean(values)
            differences = tuple(x - center for x in values)
        scale = torch.rsqrt(ctx.mean([x * x for x in differences]) + eps)
        results = tuple(x * scale for x in differences)
        ctx.save_for_backward(scale, *results)
        return tuple(y.clone() for y in results)  # the function may change them in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale, *results = ctx.saved_tensors
        along = ctx.mean([d * y for d, y in zip(grads, results, strict=True)])
        found = [d - y * along for d, y in zip(grads, results, strict=True)]
        if ctx.centered:
            center = ctx.mean(grads)
            found = [d - center for d in found]
        return None, None, None, *(d * scale for d in found)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _mean(
    tracer: Tracer, input: Tensor, dim: Any = None, keepdim: Any = False, **options: Any
) -> Tensor:
    dims = (*dim,) if isinstance(dim, (tuple, list)) else (dim,)
    options = {k: x for k, x in options.items() if x is not None}  # dtype and out
    if dims not in ((-1,), (1,)) or not keepdim or options:
        given = {"dim": dim, "keepdim": keepdim, **options}
        got = ", ".join(f"{k}={x}" for k, x in given.items())
        tracer.fail(f"expected a mean over the hidden units, v.mean(-1, keepdim=True), got {got}")
    return _apply(_Mean, input, tracer)  # type: ignore[no-any-return]


def _var(
    tracer: Tracer,
    input: Tensor,
    dim: Any = None,
    unbiased: Any = True,
    keepdim: Any = False,
    *,
    correction: Any = None,
    **options: Any,
) -> Tensor:
    correction = int(unbiased) if correction is None else correction
    if correction != 0:
        tracer.fail(f"expected v.var(-1, correction=0, keepdim=True), got correction={correction}")
    difference = input - _mean(tracer, input, dim, keepdim, **options)
    return _apply(_Mean, difference * difference, tracer)  # type: ignore[no-any-return]


def _norm(
    name: str,
    tracer: Tracer,
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
) -> Tensor:
    if tuple(shape) != tuple(input.shape[-1:]):
        tracer.fail(f"expected {name}(v, v.shape[-1:]), got the shape {[*shape]}")
    if eps is None:  # PyTorch's default depends on the dtype
        eps = torch.finfo(torch.float32).eps
        tracer.warn(f"{name} without eps adds {eps!r} in every dtype; PyTorch differs in float64")
    (y,) = _apply(_Normalized, tracer, name == "layer_norm", eps, input)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias  # type: ignore[no-any-return]


def _layer_norm(
    tracer: Tracer,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _norm("layer_norm", tracer, input, normalized_shape, weight, bias, eps)


def _rms_norm(
    tracer: Tracer,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return _norm("rms_norm", tracer, input, normalized_shape, weight, None, eps)


def _joint_norm(tracer: Tracer, values: Any, eps: float) -> Any:
    several = not isinstance(values, Tensor)
    made = _apply(_Normalized, tracer, True, eps, *(values if several else [values]))
    return made if several else made[0]


# By PyTorch's names. Their arguments follow the tracer.
OVER_UNITS: dict[Any, Callable[..., Any]] = {
    "mean": _mean,
    "var": _var,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    layer_norm: _joint_norm,
}
