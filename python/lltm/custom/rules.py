"""Rules that translate ATen's operations, also of derivatives, into operations of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from .values import EXPENSIVE, Operand, Value, apply

where, maximum, minimum = (partial(apply, op) for op in ("where", "maximum", "minimum"))
sigmoid, tanh, sqrt = (partial(apply, op) for op in ("sigmoid", "tanh", "sqrt"))
greater, at_least = partial(apply, "greater"), partial(apply, "greater_equal")
equal, both, fmod = (partial(apply, op) for op in ("equal", "and", "fmod"))


def _power(x: Operand, n: Operand) -> Any:
    if x == 2.0 and isinstance(n, Value):
        return apply("exp2", n)
    if not isinstance(n, float) or not isinstance(x, Value) or abs(n) > 9 or n * 2 % 1:
        return NotImplemented
    if n <= 0:
        return 1.0 / _power(x, -n) if n else 1.0
    if n == 0.5:
        return sqrt(x)
    if n % 1:
        x = where(equal(x, -math.inf), math.inf, x)  # as pow(), which differs from sqrt() here
        return _power(x, n - 0.5) * sqrt(x)
    half = _power(x, n // 2)
    return half * half * x if n % 2 else half * half


def _clamp(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Operand:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def _trunc(x: Operand) -> Operand:
    return where(greater(x, 0.0), apply("floor", x), -apply("floor", -x))


def _other_sign(rest: Operand, b: Operand) -> Operand:
    """True if b must be added to fmod(a, b), so that it has the sign of b."""
    if not isinstance(b, Value):
        return greater(rest, 0.0) if b < 0 else greater(0.0, rest)
    return where(greater(b, 0.0), greater(0.0, rest), both(greater(rest, 0.0), greater(0.0, b)))


def _remainder(a: Operand, b: Operand) -> Operand:
    rest = fmod(a, b)
    return where(_other_sign(rest, b), rest + b, rest)


def _divide(a: Operand, b: Operand, rounding_mode: str | None = None) -> Operand:
    quotient = apply("divide", a, b)
    if rounding_mode == "trunc":
        return _trunc(quotient)
    if rounding_mode is None or b == 0.0:
        return quotient
    # A rounded quotient could be the next integer.
    rest = fmod(a, b)
    exact = apply("floor", apply("divide", a - rest, b) + (0.5 - _other_sign(rest, b)))
    return where(equal(b, 0.0), quotient, exact) if isinstance(b, Value) else exact


def _elu(x: Operand, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if input_scale <= 0 or alpha < 0:
        return NotImplemented
    y = apply("elu", input_scale * x)
    return scale * (y if alpha == 1 == input_scale else where(greater(y, 0.0), x, alpha * y))


def _elu_backward(
    grad: Operand, alpha: float, scale: float, input_scale: float, of_result: float, x: Operand
) -> Operand:
    if abs(alpha * input_scale - 1) < 1e-6:  # celu, for which ATen rounds alpha to float32 here
        input_scale = 1.0 / alpha
    if of_result:
        return grad * where(greater(x, 0.0), scale, input_scale * (x + alpha * scale))
    y = apply("elu", input_scale * x)
    return grad * where(greater(y, 0.0), scale, input_scale * alpha * scale * (y + 1.0))


def _lerp(a: Operand, b: Operand, weight: Operand) -> Operand:
    near_a, near_b = a + weight * (b - a), b - (b - a) * (1.0 - weight)
    if isinstance(weight, Value):
        return where(greater(0.5, apply("abs", weight)), near_a, near_b)
    return near_a if abs(weight) < 0.5 else near_b


def _softplus(x: Operand, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if threshold != 20:
        return NotImplemented
    y = apply("softplus", beta * x) / beta
    return y if beta == 1 else where(greater(beta * x, threshold), x, y)


def _sigmoid_backward(grad: Operand, y: Operand) -> Operand:
    """grad y (1 - y) in two instructions: a multiplication and a fused multiply-subtract."""
    product = grad * y
    return product - product * y


def _mish_backward(grad: Operand, x: Operand) -> Operand:
    y = tanh(apply("softplus", x))
    return grad * (y + x * sigmoid(x) * (1.0 - y * y))


def _gelu(x: Operand, approximate: str = "none", grad: Operand | None = None) -> Any:
    """Returns gelu(x), or its derivative times grad."""
    if approximate == "none":
        cdf = 0.5 * (1.0 + apply("erf", x * math.sqrt(0.5)))
        if grad is None:
            return x * cdf
        density = apply("exp", -0.5 * x * x) * (1.0 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * density)
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    near = _clamp(x, -32.0, 32.0)  # the square of a large x could be infinite
    y = 1.0 + tanh(scale * (near + cubic * near * near * near))
    if grad is None:
        return 0.5 * x * y
    slope = scale * (1.0 + 3 * cubic * near * near)
    return grad * (0.5 * y + 0.5 * x * (y * (2.0 - y)) * slope)


# Rules by ATen name, without the underscore of in-place operations. Tensors are passed as operands,
# numbers as floats. Derivatives reuse values that the function itself computes.
RULES: dict[str, Callable[..., Operand]] = {
    **{op: partial(apply, op) for op in EXPENSIVE - {"elu", "softplus"}},
    **{op: partial(apply, op) for op in ("abs", "sign", "floor", "maximum", "minimum", "where")},
    **dict.fromkeys(("alias", "clone", "detach", "expand", "view", "_to_copy"), lambda x, *_: x),
    **{name: partial(apply, "and") for name in ("logical_and", "bitwise_and")},
    **{name: partial(apply, "or") for name in ("logical_or", "bitwise_or")},
    **{name: partial(apply, "not") for name in ("logical_not", "bitwise_not")},
    **{name: partial(apply, "not_equal") for name in ("logical_xor", "bitwise_xor", "ne")},
    "eq": equal,
    "gt": greater,
    "ge": at_least,
    "lt": lambda a, b: greater(b, a),
    "le": lambda a, b: at_least(b, a),
    "add": lambda a, b, alpha=1.0: a + alpha * b,
    "sub": lambda a, b, alpha=1.0: a - alpha * b,
    "rsub": lambda a, b, alpha=1.0: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "remainder": _remainder,
    "fmod": fmod,
    "ceil": lambda x: -apply("floor", -x),
    "trunc": _trunc,
    "frac": lambda x: x - _trunc(x),
    "neg": partial(apply, "negate"),
    "sgn": partial(apply, "sign"),
    "isnan": lambda x: apply("not_equal", x, x),
    "isinf": lambda x: apply("equal", apply("abs", x), math.inf),
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / sqrt(x),
    "pow": _power,
    "addcmul": lambda x, a, b, value=1.0: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1.0: x + value * a / b,
    "lerp": _lerp,
    "fill": lambda _, number: number,
    "zero": lambda _: 0.0,
    "masked_fill": lambda x, mask, number: where(mask, number, x),
    "clamp": _clamp,
    "clamp_min": maximum,
    "clamp_max": minimum,
    "relu": lambda x: maximum(x, 0.0),
    # NaN meets no condition. The selected values are those of PyTorch's vectorized functions.
    "threshold": lambda x, threshold, number: where(at_least(threshold, x), number, x),
    "threshold_backward": lambda grad, y, threshold: where(at_least(threshold, y), 0.0, grad),
    "leaky_relu": lambda x, slope=0.01: where(greater(x, 0.0), x, slope * x),
    "leaky_relu_backward": lambda grad, x, slope, _: where(greater(x, 0.0), grad, slope * grad),
    "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "hardtanh_backward": lambda grad, x, low, high: where(
        both(greater(x, low), greater(high, x)), grad, 0.0
    ),
    "hardsigmoid": lambda x: _clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "hardsigmoid_backward": lambda grad, x: where(
        both(greater(x, -3.0), greater(3.0, x)), grad / 6.0, 0.0
    ),
    "hardswish": lambda x: x * (_clamp(x + 3.0, 0.0, 6.0) / 6.0),
    "hardswish_backward": lambda grad, x: where(
        at_least(-3.0, x), 0.0, where(at_least(x, 3.0), grad, grad * (x / 3.0 + 0.5))
    ),
    "gelu": _gelu,
    "gelu_backward": lambda grad, x, approximate="none": _gelu(x, approximate, grad),
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": lambda grad, y: grad * (1.0 - y * y),
    "elu": _elu,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1.0 / alpha),
    "elu_backward": _elu_backward,
    "softplus": _softplus,
    "softplus_backward": lambda grad, x, beta, _: grad * sigmoid(beta * x),
    "log_sigmoid_forward": lambda x: -apply("softplus", -x),
    "log_sigmoid_backward": lambda grad, x, _: grad * sigmoid(-x),
    "silu": lambda x: x * sigmoid(x),
    "silu_backward": lambda grad, x: grad * (sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
    "mish": lambda x: x * tanh(apply("softplus", x)),
    "mish_backward": _mish_backward,
}
# Operations with constant results, although an argument is a value.
FACTORIES = {"zeros_like", "ones_like", "full_like", "empty_like"}
FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_empty"}
# Keyword arguments that do not change the operation.
OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}

NO_PRODUCT = (
    "expected no matrix multiplications in addition to weight_ih and weight_hh of the step (z.n(v)"
    ' multiplies v by the recurrent weights of gate n, with reads={"n": ("x", "product")})'
)
ELEMENT_WISE = (
    "expected v.mean(-1, keepdim=True), layer_norm, rms_norm, z.n(v), or operations that do not"
    " combine hidden units"
)
_WHY_NOT = {
    **dict.fromkeys(("mm", "addmm", "bmm", "dot", "mv"), NO_PRODUCT),
    **dict.fromkeys(("any", "all"), f"{ELEMENT_WISE}, and torch.where instead of Python's `if`"),
    **dict.fromkeys(("sum", "mean", "max", "min", "prod", "median", "dist"), ELEMENT_WISE),
    **dict.fromkeys(("index", "masked_select", "nonzero", "take", "t", "trace"), ELEMENT_WISE),
    "_local_scalar_dense": "expected torch.where instead of Python's `if`, bool() and item(), and"
    " torch functions instead of math functions",
    "pow": "expected the base 2, or an exponent that is a multiple of 1/2 up to 8",
    "softplus": "expected the default threshold",
    "elu": "expected alpha >= 0",
    "_to_copy": "expected dtype conversions only of conditions: cells run in the dtype of their"
    " arguments",
}


def tie(a: Operand, b: Operand) -> list[Operand]:
    """Returns operands whose comparison with 0 is like a's with b. The derivative of maximum tests
    both a > b and a == b, and so saves a single value."""
    return [a, b] if 0.0 in (a, b) else [where(equal(a, b), 0.0, a - b), 0.0]


def why_not(func: Any, deriving: bool) -> str:
    """Returns the supported alternative to an operation that has no rule."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    listed = (
        "expected a supported element-wise operation (the page 'Custom cells' lists them under"
        " 'What the function may do')"
    )
    # Arguments such as dim, size and k.
    integers = {x.name for x in func._schema.arguments if "int" in str(x.type)}
    integers -= {"decimals", "n"}
    return _WHY_NOT.get(name, ELEMENT_WISE if integers and not deriving else listed)
