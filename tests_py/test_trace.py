"""A cell's Python function against its program: results and gradients."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F
from support import evaluate
from torch import Tensor, sigmoid, tanh
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lltm
from lltm.custom.explanation import assignments
from lltm.custom.program import Program
from lltm.custom.trace import Tracer, trace
from lltm.custom.values import EXPENSIVE, Value

ROWS, UNITS = 5, 7


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        spikes: Tensor = (x > 0).to(x.dtype)
        return spikes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = grad / (1 + 25 * x.abs()) ** 2
        return gradient


class SpikeInFloat32(Spike):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()


def spike(x: Tensor) -> Tensor:
    return Spike.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def lltm_cell(z: Any, c: Tensor) -> Any:
    i, o, g = sigmoid(z[0]), sigmoid(z[1]), F.elu(z[2])
    c_next = c + i * g
    tanh_c = tanh(c_next)
    return o * tanh_c, c_next


def built_in(name: str) -> tuple[Callable[..., Any], dict[str, Any], int]:
    """A built-in cell from lltm.reference, as an entry of CELLS."""
    gates_x, gates_h, function, *_ = lltm.reference._EQUATIONS[name]
    _, _, states, _, _, saved, _ = torch.ops.lltm._cell(name)

    def of_c(z: Any, c: Tensor) -> Any:
        h: Any = None
        return function(z, h, c)

    def of_h(z: Any, h: Tensor) -> Any:
        return function(z, h)[0]

    reads = {g: "x" for g in gates_x if g not in gates_h}
    reads |= {g: "h" for g in gates_h if g not in gates_x}
    gates = list(dict.fromkeys((*gates_x, *gates_h)))
    return of_c if states else of_h, {"gates": gates, "reads": reads, "name": name}, saved


def two_products(z: Any, h: Tensor, c: Tensor) -> Any:
    """Gates a and b share an operand, gate d multiplies a value of theirs, gate e a state."""
    v = sigmoid(z.r) * h
    a, b = tanh(z.a(v)), sigmoid(z["b"](sigmoid(z.r) * h))
    d = tanh(z.d(a * b.detach()))
    return b * d + (1 - b) * h, F.relu(z.e(c)) * d


def means(z: Any, h: Tensor, p: Tensor) -> Any:
    a = z[0] - torch.mean(p * z[0], 1, keepdim=True)
    b = F.rms_norm(z[1], z[1].shape[-1:], p, eps=1e-4)
    scale = torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + 0.1)
    b = b.mean(axis=(-1,), keepdims=True)  # type: ignore[call-overload]
    return a * b.mean(-1, keepdim=True) * scale + p.mean(-1, keepdim=True)


def derived(z: Any, h: Tensor, nu: Tensor, theta: Tensor, p: Tensor, q: Tensor) -> Any:
    """Complex numbers, sizes, several results, views, constants, parameters also in the step."""
    decay = torch.exp(-torch.exp(nu) + 1j * theta).imag
    largest, _ = torch.sort(theta, descending=True)
    with torch.no_grad():
        a, b = torch.stack([p.detach(), 2 * p])
        scale = torch.diagonal((a * b)[None, :, None], 0, 0, 2).view(-1)
    scaled = scale[None] * F.normalize(z[0].new_tensor(2) - p, dim=0) + torch.cat([q, p])[: len(p)]
    h_next = h * decay * (1 - p) * q.mean() + z[0] * torch.sigmoid(largest + scale)
    return torch.tanh(h_next - scaled / (2 + h) + torch.where(p > 0.5, F.softplus(p), h))


PRODUCTS = {"a": ("x", "product"), "b": "product", "d": ("input", "product"), "e": ["product"]}
PARAMETERS = dict.fromkeys(("nu", "theta", "p", "q"), torch.nn.init.uniform_)
# Cells with the minimal number of saved values; test_gallery.py has the numbers of lltm.cells.
CELLS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    **{name: built_in(name) for name in lltm.reference._EQUATIONS},
    "two_products": (two_products, {"gates": [*"rabde"], "reads": PRODUCTS}, 9),
    "means": (means, {"gates": 2, "parameters": {"p": torch.nn.init.uniform_}}, 7),
    "derived": (derived, {"gates": 1, "parameters": PARAMETERS}, 3),
}


def check(
    function: Callable[..., Any], reference: Callable[..., Any] | None = None, **options: Any
) -> Program:
    cell = lltm.cell(**options)(function)
    compared = lltm.Cell(cell.serialized, function=reference) if reference else cell
    shapes, dtypes = [(3, 2, 4, 7)], [torch.float64]
    lltm.testing.check_cell(compared, shapes=shapes, dtypes=dtypes, verbose=False)
    assert EXPENSIVE.isdisjoint(op for _, op, _ in assignments(cell.text, "backward"))
    return Program.read(cell.text)


@pytest.mark.parametrize("name", CELLS)
def test_the_program_computes_the_same_as_the_function(name: str) -> None:
    function, options, saved = CELLS[name]
    program = check(function, **options)
    assert len(program.saved) == saved, program.text


@pytest.mark.parametrize("name", ["keras_gru", "zoneout_lstm", "two_products", "means"])
def test_layers_with_products_means_and_given_gates(name: str) -> None:
    """On any number of threads, and a new sequence after a reset."""
    if name in CELLS:
        function, options, _ = CELLS[name]
        cell = lltm.cell(**options)(function)
        dtypes, shapes = (
            [torch.float64, torch.float32, torch.bfloat16],
            [(5, 3, 4, 5), (4, 40, 24, 64)],
        )
        with support.threads(1):  # fastest for small layers
            lltm.testing.check_cell(cell, shapes=shapes, dtypes=dtypes, verbose=False)
    else:
        cell = getattr(lltm.cells, name)
    layer = cell.Layer(24 + 64 * len(cell.Layer._HEADER.gates_input), 64)
    x = torch.randn(6, 5, layer.input_size)
    reset = torch.arange(6).unsqueeze(1).expand(6, 5) == 3
    with torch.no_grad():
        output = layer(x, reset=reset)[0]
        torch.testing.assert_close(output[3:], layer(x[3:])[0])
        for threads in (1, 3, 7):
            with support.threads(threads):
                torch.testing.assert_close(layer(x, reset=reset)[0], output)


def test_a_product_without_gradient_leaves_those_of_other_gates() -> None:
    def first(z: Any, h: Tensor) -> Any:
        v = sigmoid(z.r) * h
        with torch.no_grad():
            without = z.o(v)
        return tanh(z.n(v) + without)

    reads = {"n": ("x", "product"), "o": "product"}
    cell = lltm.cell(gates=("r", "n", "o"), reads=reads)(first)
    assert "d.h = copy 0.0" not in cell.text
    lltm.testing.check_cell(cell, shapes=[(3, 2, 4, 5)], dtypes=[torch.float64], verbose=False)


def test_results_of_products_means_and_norms_may_change_in_place() -> None:
    def cell(z: Any, h: Tensor, w: Tensor, b: Tensor) -> Any:
        y = z.n(h)
        y += 1
        y.mul_(2)
        m = y.mean(-1, keepdim=True)
        m += 1
        v = F.layer_norm(y, y.shape[-1:], 1 + w, b)
        v *= m
        a, b = lltm.layer_norm((v, z.a))
        a += b
        return tanh(a)

    reads, parameters = {"n": ("x", "product")}, {"w": 1, "b": 1}
    check(cell, gates=("n", "a"), reads=reads, parameters=parameters)


def test_rms_norm_has_a_default_eps() -> None:
    def reference(z: Any) -> Tensor:
        return F.rms_norm(z[0], z[0].shape[-1:], eps=torch.finfo(torch.float32).eps)

    with pytest.warns(UserWarning, match="rms_norm without eps adds 1.19.*e-07 in every dtype"):
        check(lambda z: F.rms_norm(z[0], z[0].shape[-1:]), reference, gates=1, name="cell")


def test_a_trace_is_freed() -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(x) in (Tracer, Value) for x in gc.get_objects())

    before = alive()
    for function, options, _ in CELLS.values():
        trace(function, **options)
    with pytest.raises(TypeError):
        trace(lambda z: lltm.layer_norm(z[0]).sum(), gates=1, name="wrong")
    assert alive() <= before


def test_a_step_with_means_may_have_no_units() -> None:
    cell = lltm.cell(gates=("a",), name="centered")(lambda z: z.a - z.a.mean(-1, keepdim=True))
    zeros = (torch.zeros(shape) for shape in ((0, 4), (0, 0), (0,), (0,)))
    output, *_ = torch.ops.lltm.sequence(
        cell.text, torch.zeros(2, 3, 4), torch.zeros(3, 0), None, *zeros
    )
    assert output.shape == (2, 3, 0)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


# test_special_values has each function.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda a, b: -a * 2 + (3 - b) / (b * b + 1) - 1 / (a * a + 0.5) + a / 4,
    "rounding_mode": lambda a, b: torch.div(a, b, rounding_mode=None),
    "logical": lambda a, b: torch.logical_or(a < b, torch.logical_not(a <= 0)).to(a.dtype) * a,
    "conditions": lambda a, b: (a > 0).float() * b + (b == a).double() + ((a > 0) ^ (b > 0)) * a,
    "masked_fill": lambda a, b: a.masked_fill(a > b, 0.25),
    "constants": lambda a, b: torch.zeros_like(a) + torch.full_like(b, 0.3) * a + a.new_ones(1) * b,
    "tensor": lambda a, b: a * torch.tensor(0.3, dtype=torch.float64) + torch.tensor(0.5) * b,
    "in_place": lambda a, b: (a * b).add_(a).mul_(2).clamp_(max=1.0) + F.celu_(a * b),
    "detach": lambda a, b: a.detach() * b + a,
    "surrogate": lambda a, b: spike(a - b) * b,
    "scripted": lambda a, b: scripted(a) * b,
    "loop": lambda a, b: sum(a**k / (k + 1) for k in range(4)) * b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    check(lambda z: FUNCTIONS[name](*z), gates=2, name=name)


_TORCH = ["abs", "neg", "sign", "sgn", "floor", "ceil", "trunc", "frac", "exp", "exp2", "expm1"]
_TORCH += ["log", "log1p", "sin", "cos", "erf", "sqrt", "rsqrt", "reciprocal", "square", "sigmoid"]
_NN = ["tanh", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "logsigmoid"]
_NN += ["silu", "mish", "gelu", "hardtanh", "hardsigmoid", "hardswish", "softsign", "tanhshrink"]
ONE_GATE: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _TORCH}
ONE_GATE |= {name: getattr(F, name) for name in _NN}
ONE_GATE |= {f"power_{n}": (lambda a, n=n: a**n) for n in (3, -1, -2, 0.5, 2.5, -1.5, 8)}
ONE_GATE |= {
    "power_of_2": lambda a: 2**a,
    "elu_of_alpha": lambda a: F.elu(a, 0.5),
    "celu_of_alpha": lambda a: F.celu(a, 2.0),
    "softplus_of_beta": lambda a: F.softplus(a, 1.25),
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "hardtanh_of_limits": lambda a: F.hardtanh(a, -0.25, 0.5),
    "threshold": lambda a: F.threshold(a, 0.25, 0.5),
    "prelu": lambda a: F.prelu(a, torch.full((1,), 0.25, dtype=a.dtype)),
    "clamp": lambda a: a.clamp(-1, 1) + a.clamp(min=-0.5) + a.clamp(max=0.5),
    "isnan": lambda a: torch.where(torch.isnan(a), 0.0, a),
    "isinf": lambda a: torch.where(torch.isinf(a), 0.0, a),
    "logical_not": lambda a: torch.logical_not(a).to(a.dtype) + a,
    "remainder_of_constant": lambda a: a.remainder(3.0) * a.remainder(-0.75) - a.fmod(0.75),
    "quotient_of_constant": lambda a: torch.div(a, 0.75, rounding_mode="floor") * a,
}
TWO_GATES: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (torch.add, torch.sub, torch.mul, torch.div, torch.remainder)},
    **{f.__name__: f for f in (torch.fmod, torch.maximum, torch.minimum)},
    "lerp": lambda a, b: torch.lerp(a, 2 - a, b),
    "clamp_tensor": lambda a, b: a.clamp(-b.abs(), b.abs()),
    "logical": lambda a, b: (a.logical_and(b) | (a > 0).logical_xor(b > 0)).to(a.dtype) * b,
    "where": lambda a, b: torch.where(a <= b, a * 2, b),
    "ties": lambda a, b: torch.maximum(F.relu(a), F.relu(b)),
    "quotient": lambda a, b: torch.div(a, b, rounding_mode="floor") * b,
    "truncated": lambda a, b: torch.div(a, b, rounding_mode="trunc") * b,
    "lerp_constant": lambda a, b: torch.lerp(a, b, 0.25) + torch.lerp(a, b, 0.75),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a),
}
SPECIAL_VALUES = [
    *(math.nan, math.inf, -math.inf, 0.0, 1e-7, 1e10, -1e10, 1e22, -1e22, 1.7e38, -2e38, 3e4),
    *(0.25, -0.25, 0.3, 0.5, -0.5, 1, -1, 2, 3, -3, 3.5, 6, -8, 15, -15, -100),
]


@pytest.mark.parametrize("name", [*ONE_GATE, *TWO_GATES])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    """A layer has the values and gradients of PyTorch in its dtype, in float32 or in float64."""
    function, count = (ONE_GATE | TWO_GATES)[name], 1 + (name in TWO_GATES)
    tiny = torch.finfo(dtype).tiny
    # In PyTorch, vectorized fmod is NaN if the quotient overflows.
    subnormal = [tiny / 4, -tiny / 2] if count == 1 else []
    numbers = torch.tensor([*SPECIAL_VALUES, *subnormal], dtype=torch.float64).to(dtype)
    units = len(numbers)
    inputs = [numbers.repeat(units, 1), numbers[:, None].repeat(1, units)][:count]
    gates = ["a", "b"][:count]
    cell = lltm.cell(gates=gates, reads=dict.fromkeys(gates, "input"), name="special")(
        lambda z: function(*z)
    )
    given = torch.cat(inputs, -1)[None].requires_grad_()
    output, _ = cell.Layer(count * units, units, dtype=dtype)(given)
    (gradient,) = torch.autograd.grad(output.sum(), given)
    got = output[0], *gradient[0].chunk(count, -1)
    near = [torch.zeros(units, units, dtype=torch.bool) for _ in got]
    # ATen rounds the derivative of hardsigmoid to float32. Others, such as 1 - y * y, cancel.
    rtol = 1e-7 if name == "hardsigmoid" else 1e-14
    rtol = max(rtol, 4 * torch.finfo(dtype).eps)
    atol = 1e-14 if dtype == torch.float64 else max(2e-6, tiny)
    for other in {torch.float64, torch.promote_types(dtype, torch.float32), dtype}:
        arguments = [x.to(other).requires_grad_() for x in inputs]
        y = function(*arguments)
        gradients = torch.autograd.grad(y.sum(), arguments, materialize_grads=True)
        for ok, mine, theirs in zip(near, got, (y, *gradients), strict=True):
            theirs = theirs.to(dtype).double()
            ok |= torch.isclose(mine.double(), theirs, rtol, atol, equal_nan=True)
    for what, ok, mine in zip(("result", *gates), near, got, strict=True):
        wrong = [*zip(*(x[~ok].tolist() for x in (*inputs, mine)), strict=True)]
        assert not wrong, f"{what} (arguments, then lltm's): {wrong[:5]}"
    assert EXPENSIVE.isdisjoint(op for _, op, _ in assignments(cell.text, "backward"))


# By function for which autograd rounds in float32: the same function without rounding.
EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "hardsigmoid": (
        lambda z: F.hardsigmoid(3 * z[0]),
        lambda z: torch.clamp(3 * z[0] + 3, 0, 6) / 6,
    ),
    "celu": (lambda z: F.celu(z[0], 0.3), lambda z: 0.3 * F.elu(z[0] / 0.3)),
    "spikes": (
        lambda z: SpikeInFloat32.apply(z[0] - z[1]) * z[1],  # type: ignore[no-untyped-call]
        lambda z: spike(z[0] - z[1]) * z[1],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_are_more_exact_than_autograd(name: str) -> None:
    check(*EXACT[name], gates=2, name=name)


def test_prelu_has_a_slope_per_unit() -> None:
    check(lambda z, p: F.prelu(z[0], p), gates=1, parameters={"p": 0.25}, name="prelu")


MISH = F.mish(torch.tensor(-0.25, dtype=torch.float64)).item()  # of z in the second run
# ATen's vector loops and scalar loops differ in the last bit.
ROUNDED: dict[str, Callable[..., Any]] = {
    "mish": lambda z, h: tanh(F.logsigmoid(F.mish(z[0]))) * h,
    "amplified": lambda z, h: F.logsigmoid(1e16 * (F.mish(z[0]) - MISH)) * h,
    "constants": lambda z, h: h * sum(F.mish(torch.full_like(h, -k / 8)) for k in range(40)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_no_dependence_on_positions(name: str) -> None:
    trace(ROUNDED[name], gates=1, name=name)


def test_names_of_operations_registers_and_other_letters_are_replaced() -> None:
    def cell(z: Any, exp: Tensor, h: Tensor, p: Tensor) -> Any:
        t1 = z.x + p * exp
        negate = sigmoid(t1)
        unicode_ä = z.y * h
        return negate + unicode_ä, exp

    options: dict[str, Any] = {"gates": ("x", "y"), "reads": {"x": "x"}, "bounded": True}
    program = check(cell, **options, states={"exp": -0.25}, parameters={"p": 0.5})
    for line in ("bounded", "state exp -0.25", "t1 = add z.x t2", "negate_ = sigmoid t1"):
        assert f"\n{line}\n" in program.text


def test_decisions_survive_rounding() -> None:
    """A comparison that rounded operands would change is saved."""

    def cell(z: Any, c: Tensor) -> Any:
        return torch.where(z[0] > 0.3, 2 * z[0] * c, z[0] - c), torch.maximum(z[0], c)

    program = trace(cell, gates=1)
    z = (0.3 + 1e-4 * torch.randn(ROWS, UNITS, dtype=torch.float64)).requires_grad_()
    c = (z + 1e-4 * torch.randn_like(z)).detach().requires_grad_()
    expected = torch.autograd.grad(sum(x.sum() for x in cell([z], c)), (z, c))
    inputs = {"z.g0": z.detach(), "c": c.detach()}
    forward = inputs | evaluate(program.text, "forward", inputs)
    saved = {name: forward[name].bfloat16().double() for name in program.saved}
    ones = torch.ones_like(z)
    backward = evaluate(program.text, "backward", {**saved, "d.h'": ones, "d.c'": ones})
    for name, gradient in zip(("d.z.g0", "d.c"), expected, strict=True):
        torch.testing.assert_close(backward[name], gradient, rtol=1e-2, atol=1e-2)


def test_rounded_float32_constants_warn() -> None:
    """Warns once."""
    expected = r"0\.30000001192092896 in torch.float32.*\n.*test_trace"
    with pytest.warns(UserWarning, match=expected) as warned:
        trace(lambda z: torch.tensor(math.inf) - torch.tensor(0.3) * z[0], gates=1, name="cell")
    assert [w.filename for w in warned] == [__file__]


class WithTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (tanh if func is sigmoid else func)(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if isinstance(result, Tensor) else result


# Modes of the caller, which neither change a trace nor end with it.
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "device": lambda: torch.device("meta"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.numpy(), torch.from_numpy
    ),
    "fake": FakeTensorMode,
    "dispatch": Doubled,
    "function": WithTanh,
    "forward_ad": torch.autograd.forward_ad.dual_level,
}


def modes() -> tuple[Any, ...]:
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch._C._len_torch_dispatch_stack()),
        *(torch.overrides._get_current_function_mode_stack(), torch._C._get_tracing_state()),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._functorch.peek_interpreter_stack() is None,
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_modes_change_nothing(mode: str) -> None:
    expected = trace(lltm_cell, gates=3)
    with MODES[mode]():
        before = modes()
        assert trace(lltm_cell, gates=3) == expected
        assert modes() == before


@pytest.mark.parametrize(
    "transform",
    [
        *(torch.vmap, torch.func.grad, torch.func.functionalize, make_fx, symbolic_trace),
        lambda function: torch.jit.trace(function, torch.ones(3)),
    ],
)
def test_transforms_around_a_cell_change_nothing(transform: Callable[..., Any]) -> None:
    expected = trace(lltm_cell, gates=3)

    def making(x: Tensor) -> Tensor:
        before = modes()
        assert trace(lltm_cell, gates=3) == expected
        assert modes() == before
        return x.sum()

    made = transform(making)
    if transform is not symbolic_trace:  # already traced
        made(torch.ones(3))


OUTSIDE = torch.ones(UNITS)
LEARNED = torch.nn.Parameter(torch.ones(()))


class BadSpike(Spike):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.atan(grad)


def in_place(z: Any, c: Tensor) -> Any:
    c += z[0]
    return c, c


# Functions with one gate, by reported operation.
UNSUPPORTED: dict[str, Callable[..., Any]] = {
    r"layer_norm\(v, v.shape\[-1:\]\).*got the shape": lambda z: F.layer_norm(z[0], z[0].shape),
    "weight to be of same shape": lambda z, h: F.rms_norm(z[0], z[0].shape[-1:], h, 1e-3),
    "prelu: expected `weight` to be": lambda z, h: F.prelu(z[0], h),
    "argument 'eps' .*not Tensor": lambda z, h: F.rms_norm(z[0], z[0].shape[-1:], eps=h),
    "expected eps to be a number, got None": lambda z: lltm.layer_norm(
        z[0],
        None,  # type: ignore[arg-type]
    ),
    r"layer_norm: expected values to have.*got \(\)": lambda z: lltm.layer_norm(()),
    r"mean\(-1, keepdim=True\), got dim=None, keepdim=False": lambda z: z[0].mean(),
    "got dim=-1, keepdim=True, dtype=torch.float32": lambda z: z[0].mean(
        -1, True, dtype=torch.float
    ),
    'calls only of gates with "product" in reads': lambda z, h: z[0](h),
    "no matrix multiplications in addition to.*matmul": lambda z: (
        z[0] @ torch.ones(1, 1, dtype=torch.float64)
    ),
    r"hooks only on .*got \[3, 1\]": lambda z: z[0].mean(-1, True).register_hook(tanh) and z[0],
    "do not combine hidden units, got aten::sum": lambda z: z[0].sum(),
    "correction=0, keepdim=True\\), got correction=1": lambda z: z[0].var(-1, keepdim=True),
    "do not combine hidden units, got batch_norm": lambda z: F.batch_norm(z[0], None, None),
    "no matrix multiplications in addition to.*linear": lambda z: F.linear(z[0], torch.ones(7, 7)),
    "a single real value, .*on meta": lambda z: z[0] * torch.ones((), device="meta"),
    "aten::add_": in_place,
    "torch.where instead of Python's.*aten::_local_scalar_dense": lambda z: (
        z[0] if z[0] > 0 else -z[0]
    ),
    "and torch functions instead of math functions, got aten::_local": lambda z: (
        z[0] * math.exp(z[0])
    ),
    "a multiple of 1/2.*aten::pow": lambda z: z[0] ** 0.3,
    "the base 2,.*aten::pow": lambda z: 3 ** z[0],
    "invalid for input of size 1; .* as z.a.shape": lambda z: z[0].reshape(-1, 4),
    r"size\[1, 1\]; the function is traced with other sizes": lambda z: F.layer_norm(z[0], (128,)),
    "default threshold.*aten::softplus": lambda z: F.softplus(z[0], 1, 5),
    "dtype conversions only of conditions.*aten::_to_copy": lambda z: z[0].float(),
    "torch.where instead of Python's `if`, got aten::all": lambda z: (
        z[0] if (z[0] > 0).all() else -z[0]
    ),
    r"a gate, such as z\[0\] or z.g0, got z, the tuple of all gates": lambda z: torch.tanh(z),
    r"outside tensors with a single real value, got \[7\]": lambda z: z[0] * OUTSIDE,
    "learned tensors in parameters=": lambda z: z[0] * LEARNED,
    "'What the function may do'.*aten::log2": lambda z: torch.log2(z[0]),
    "in the derivative": lambda z: BadSpike.apply(z[0]),  # type: ignore[no-untyped-call]
    "other than NaN, got NaN": lambda z: z[0] * torch.tensor(float("nan")),
    "change of a detached tensor, got aten::mul_": lambda z: tanh(z[0]).detach().mul_(2),
    "the function to return only h', got tuple": lambda z: (z[0], z[0]),
    "a function that returns, got StopIteration": lambda z: next(iter(())),
    r"\(h', c'\), got Tensor; arguments other than h and parameters= are states": lambda z, c: c,
    r"with the shape of a gate .*got \[\]": lambda z: torch.zeros(()),
    "a floating-point dtype, .*bool": lambda z: z[0] > 0,
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("match", UNSUPPORTED)
def test_unsupported_operations(match: str) -> None:
    expected = f"(?ms)^lltm::cell: wrong: .*{match}.*\n  .*test_trace.py:"
    with pytest.raises((TypeError, lltm.ArgumentError), match=expected):
        trace(UNSUPPORTED[match], gates=1, name="wrong")


# Functions with a gate g0 that reads a product, by message.
MISUSED: dict[str, Callable[..., Any]] = {
    "one call of z.g0, which reads a product.*got no call": lambda z, h: z[0] * h,
    "z.g0.*a second call": lambda z, h: z.g0(h) + z.g0(h),
    r"dtype of a gate in z.g0\(...\), got float": lambda z, h: z.g0(0.5),
    r"dtype of a gate in z.g0.*, got \[1, 1\], torch.bool": lambda z, h: z.g0(h > 0),
    "a value of the step in z.g0.*got a constant": lambda z, h: z.g0(torch.zeros_like(h)),
    "register hooks of parameters on": lambda z, p: p.register_hook(tanh),
    r"hooks only on .*got \[1\].* parameters": lambda z, p: (2 * p).grad_fn.register_hook(tanh),
    "z.g0.*got a call with 2 values": lambda z, h: z.g0(h, h),
    "only h', got z.g0$": lambda z, h: (z.g0(h), z.g0)[1],
    "one tensor for z.g0.* and z.g1": lambda z, h: z.g0(spike(h)) + z.g1(spike(h).detach() + 0),
}


@pytest.mark.parametrize("match", MISUSED)
def test_misused_products(match: str) -> None:
    expected = f"(?ms)^lltm::cell: wrong: .*expected .*{match}.*\n  .*test_trace.py:"
    parameters = {"p": 0.0} if "parameter" in match else {}
    with pytest.raises(TypeError, match=expected):
        trace(
            MISUSED[match],
            gates=2,
            reads={"g0": ("x", "product"), **({"g1": "product"} if "z.g1" in match else {})},
            parameters=parameters,
            name="wrong",
        )


OF_PARAMETERS: dict[str, Callable[..., Any]] = {
    r"a value per hidden unit or a single one, got \[2\]": lambda z, p: (
        z[0] * torch.stack([p.mean(), p.sum()])
    ),
    r"a value per hidden unit or a single one, got \[130, 130\]": lambda z, p: (
        z[0] * torch.outer(p, p)
    ),
    r"no integers, got a tensor of torch.int64, in a": lambda z, p: z[0] * ((p > 0).cumsum(0) * p),
    "operation .* got aten.lgamma.default, .* in a module": lambda z, p: z[0] * torch.lgamma(p),
    "learned tensors in parameters=, got": lambda z, p: z[0] * (p[None] * LEARNED).sum(),
    "got aten.bernoulli.p, in a function": lambda z, p: z[0] * torch.bernoulli(p.exp(), 0.5),
    r"got aten._to_copy.default with .*int32": lambda z, p: z[0] * p.exp().to(torch.int32),
    r"got aten.add.Tensor with .*NaN": lambda z, p: z[0] * (p[None] + math.nan),
    "aten.mul.Tensor with 1.0, then 11.4": lambda z, p: z[0] * (p[None] * len(p) ** 0.5),
    "no torch.autograd.Function before": lambda z, p: z[0] * spike(p).mean(),
    "torch.where instead of Python's": lambda z, p: z[0] * float(p),
    "no in-place change of an argument": lambda z, p: z[0] * p.mul_(2),
    "got aten.mul_.Tensor, in a function": lambda z, p: z[0] * p[None].flip(1).mul_(2)[0],
}


@pytest.mark.parametrize("match", OF_PARAMETERS)
def test_misused_functions_of_parameters(match: str) -> None:
    with pytest.raises((TypeError, lltm.ArgumentError), match=f"^lltm::cell: wrong: .*{match}"):
        trace(OF_PARAMETERS[match], gates=1, parameters={"p": 0.5}, name="wrong")


OF_SIZES: dict[str, Callable[..., Any]] = {
    r"outside tensors with a single real value, got \[130\], torch.float64": lambda z, h: (
        torch.linspace(0.1, 0.9, h.shape[-1], dtype=torch.float64) * h
    ),
    r"outside tensors with a single real value, got \[130\], torch.bfloat16": lambda z, h: (
        h * (1 + torch.arange(h.shape[1] - 1, -1, -1) * 5e-4).bfloat16()
    ),
    "do not combine hidden units, got aten::slice": lambda z, h: h - h[:, :1],
    "aten::div with 1.0, then aten::div with 11.40": lambda z, h: h / h.shape[-1] ** 0.5,
    "aten::mul with 1.0, then aten::mul with 3.0": lambda z, h: h * h.shape[0],
    "aten::tanh, then aten::sigmoid": lambda z, h: sigmoid(h) if len(h) > 1 else tanh(h),
    "end of the function, then aten::mul with 2.0": lambda z, h: h * 2 if h.shape[1] > 100 else h,
    r"got \[3, 130\], torch.float32": lambda z, h: h * torch.eye(*h.shape),
}


@pytest.mark.parametrize("match", OF_SIZES)
def test_values_that_depend_on_sizes_or_positions_are_no_constants(match: str) -> None:
    """The message reports the operation and line."""
    expected = f"^lltm::cell: wrong: expected .*{match}.*\n  .*test_trace.py:"
    with pytest.raises((TypeError, lltm.ArgumentError), match=expected):
        trace(OF_SIZES[match], gates=1, name="wrong")


def test_outside_tensors_of_equal_elements_are_numbers() -> None:
    program = check(
        lambda z, h: z[0] * torch.full(h.shape, 0.5) + h * torch.ones(h.shape[1]),
        gates=1,
        name="cell",
    )
    assert "multiply z.g0 0.5" in program.text


@pytest.mark.parametrize(
    ("match", "function"),
    [
        ("expected torch functions instead of NumPy f", lambda z: np.tanh(z[0])),
        ("shape", lambda z: z[0].view(3, 3)),
        ("int too big", lambda z: z[0] * 10**400),
        ("not enough values", lambda z: [a for a, b in [z]]),
    ],
)
def test_other_errors_have_the_line(match: str, function: Callable[..., Any]) -> None:
    with pytest.raises(lltm.ArgumentError, match=rf"wrong: .*{match}.*\n.*test_trace\.py:\d+: "):
        trace(function, gates=1, name="wrong")


def test_states_may_be_their_number() -> None:
    assert trace(lltm_cell, gates=3, states=1) == trace(lltm_cell, gates=3)
    for states in (1, {"x": np.float32(0)}):
        assert trace(lambda z, x: (z[0], x), gates=1, states=states, name="it").states == {"x": 0}


@pytest.mark.xdist_group("compilers")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_compiled_functions() -> None:
    """The original function is traced; creating a cell inside a compiled function is an error."""
    compiled = torch.compile(lltm_cell, backend="aot_eager")
    assert trace(compiled, gates=3, name="lltm_cell") == trace(lltm_cell, gates=3)

    @torch.compile(backend="eager")
    def making(x: Tensor) -> Tensor:
        lltm.cell(gates=1, name="inside")(unit)
        return x

    with pytest.raises(lltm.ArgumentError, match=r"created outside torch\.compile"):
        making(torch.ones(1))


def unit(z: Any) -> Any:
    return z[0]


def state(z: Any, c: Any) -> Any:
    return c, c


WRONG: list[tuple[str, type[Exception], Callable[..., Any], dict[str, Any]]] = [
    ("gates to be an int or a sequence of names, got 'ifgo'", TypeError, unit, {"gates": "ifgo"}),
    ("a name of .* got 'a-b'", ValueError, unit, {"gates": ["a-b"]}),
    ("a name of .* got 'a{65}'", ValueError, unit, {"name": "a" * 65}),
    ("name= for a function without a name", ValueError, lambda z: z[0], {"name": None}),
    (r"reads of gates \(g0\), got 'n'", ValueError, unit, {"reads": {"n": "x"}}),
    ("a tuple of these in reads of g0, got 'both'", ValueError, unit, {"reads": {"g0": "both"}}),
    ('"x" or "input" in reads of g0', ValueError, unit, {"reads": {"g0": ("x", "input")}}),
    (r"parameters to be a dict, got \['p'\]", TypeError, unit, {"parameters": ["p"]}),
    ("a gate that reads x or input, got reads={'g0'", ValueError, unit, {"reads": {"g0": "h"}}),
    ("in z, and states={'x': 0} if x is a state", ValueError, lambda z, x: (x, x), {}),
    ("states={'t': 0} if t is a state, got an argument t", ValueError, lambda z, t: t, {}),
    ("0 states, got 1 in its arguments \\(c\\)", ValueError, lambda z, c: c, {"states": 0}),
    ("states to be an int or a dict, got True", TypeError, unit, {"states": True}),
    ("in the range of float, got a larger", ValueError, lambda z, c: c, {"states": {"c": 10**400}}),
    ("got 'p': its arguments are \\(\\)", ValueError, unit, {"parameters": {"p": 0}}),
    ("identifiers, got 'if'", ValueError, lambda z, **p: z[0], {"parameters": {"if": 0}}),
    ("named arguments, got \\*c", ValueError, lambda z, *c: c, {}),
    ("no default .* got k=3", ValueError, lambda z, k=3: z[0] * k, {}),
    (r"z, the gates, as the first argument .*, got \(a, z\)", ValueError, lambda a, z: (z, z), {}),
    ("a function or a bound method, got <class '.*Spike'>", TypeError, Spike, {}),
    ("a function of z, h.*, got <.*tanh.* without named arguments", ValueError, torch.tanh, {}),
    ("gate names that are not attributes of z, got '_no'", ValueError, unit, {"gates": ["_no"]}),
    (
        r"weight to be of same shape as .*weight of shape \[1\]",
        TypeError,
        lambda z, p: F.layer_norm(z[0], z[0].shape[-1:], p),
        {"parameters": {"p": lltm.scalar()}},
    ),
    ("a number as the initial value of c", TypeError, lambda z, c: (c, c), {"states": {"c": "0"}}),
    ("an initial value of c, got nan", ValueError, state, {"states": {"c": 1e999 * 0}}),
    ("a state or a parameter", ValueError, state, {"states": {"c": 0}, "parameters": {"c": 0}}),
    ("bounded to be a bool, got 1", TypeError, unit, {"bounded": 1}),
    ("bias of gates \\(g0\\), got 'a'", ValueError, unit, {"bias": {"a": False}}),
    ("outputs, each once, from h, got 'c'", ValueError, unit, {"outputs": ("h", "c")}),
    ("outputs, each once, from h, c, got 'c'", ValueError, lambda z, c: c, {"outputs": ("c", "c")}),
    (
        "a number as the initial value of p, got '0'",
        TypeError,
        lambda z, p: p,
        {"parameters": {"p": lltm.scalar("0")}},  # type: ignore[arg-type]
    ),
    ("one of z's g0, got z\\[1\\]", ValueError, lambda z: z[1], {}),
    (r"one of z's g0, got z.q\n  .*test_trace\.py:\d+: .*lambda", ValueError, lambda z: z.q, {}),
    ("runs the same operations in each call", ValueError, lambda z: z[0] * random.random(), {}),
    ("whatever the values", ValueError, lambda z: z[0] * z[0].tolist()[0][0], {}),
]


@pytest.mark.parametrize(("match", "error", "function", "options"), WRONG)
def test_wrong_arguments(
    match: str, error: type[Exception], function: Any, options: dict[str, Any]
) -> None:
    named = {} if "a name of" in match else {"name": "wrong"}
    with pytest.raises(error, match=f"(?s)^lltm::cell: .*expected .*{match}"):
        trace(function, **{"gates": 1, **named, **options})


@pytest.mark.parametrize("name", lltm.reference._EQUATIONS)
def test_no_more_instructions_are_executed_than_by_the_built_in_cell(name: str) -> None:
    function, options, _ = CELLS[name]
    text = trace(function, **options).text
    forward, backward = torch.ops.lltm._instructions(text)
    of_page = torch.ops.lltm._instructions(name)
    assert forward <= of_page[0]
    assert backward <= of_page[1]
