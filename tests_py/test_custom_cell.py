"""Custom cells: modules, transforms, compilers, files."""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import itertools
import math
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import support
import torch
import torch.nn.functional as F
from support import evaluate, flat
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lltm
from lltm.testing import check_cell, loop

sigmoid, tanh = torch.sigmoid, torch.tanh


@lltm.cell(gates=("i", "f", "g", "o"), bounded=True)
def lstm(z: Any, c: Tensor) -> tuple[Tensor, Tensor]:
    c_next = sigmoid(z.f) * c + sigmoid(z.i) * tanh(z.g)
    return sigmoid(z.o) * tanh(c_next), c_next


@lltm.cell(gates=("r", "u", "n_x", "n_h"), reads={"n_x": "x", "n_h": "h"}, bounded=True)
def gru(z: Any, h: Tensor) -> Tensor:
    n = tanh(z.n_x + sigmoid(z.r) * z.n_h)
    u = sigmoid(z.u)
    h_next: Tensor = (1 - u) * n + u * h
    return h_next


@lltm.cell(gates=("z",))
def plain(z: Any) -> Tensor:
    return tanh(z.z)


@lltm.cell(gates=("i", "g"), parameters={"p": 0.25, "q": lltm.scalar(-0.5)}, states={"m": 0.5})
def two_states(z: Any, c: Tensor, m: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    i = sigmoid(z.i + p * c)
    m_next = 0.5 * m + tanh(c * q)
    c_next = (1 - i) * c + i * tanh(z.g) * m_next
    return tanh(c_next), c_next, m_next


@lltm.cell(gates=("a", "b"), outputs=("c", "h"), bias={"b": False})
def reads_both(z: Any, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    a = sigmoid(z.a)
    c_next = a * c + (1 - a) * h
    return tanh(z.b + c_next), c_next


@lltm.cell(gates=("a", "b"))
def detaching(z: Any, c: Tensor) -> tuple[Tensor, Tensor]:
    a = z.a.detach() * z.b + tanh(c).detach() * z.a.data
    c_next = sigmoid(a + c).detach() * tanh(z.b) + a * c
    return tanh(c_next), c_next


@lltm.cell(gates=("r", "n", "o"), reads={"n": ("x", "product"), "o": "product"})
def several_stages(z: Any, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    v = sigmoid(z.r) * h
    c_next = 0.5 * c + tanh(z.n(v))
    scale = torch.rsqrt(c_next.var(-1, keepdim=True, correction=0) + 0.1)
    return tanh(scale * c_next) * sigmoid(z.o(v)), c_next


@lltm.cell(gates=("a",), parameters={"nu": -0.5, "tau": lltm.scalar(2), "u": torch.nn.init.ones_})
def derived(z: Any, h: Tensor, nu: Tensor, tau: Tensor, u: Tensor) -> Tensor:
    decay, weight = torch.exp(-torch.exp(nu)), torch.softmax(u, 0)
    return tanh(u * z.a / tau.round(decimals=1).clamp(1) + decay * h * weight)


def at_limits(name: str, products: bool) -> lltm.Cell:
    """Returns a cell with as many gates, states and parameters as possible."""
    reads: Any = {"g14": "x", "g15": "h"}
    if products:
        reads = {f"g{k}": "product" if k == 15 else ("x", "product") for k in range(1, 16)}
    parameters = {f"p{k}": 0.1 * k - 0.7 for k in range(16)}

    @lltm.cell(
        gates=16, reads=reads, states={"d": -1.0}, parameters=parameters, bounded=True, name=name
    )
    def cell(
        z: Any,
        h: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        e: Tensor,
        f: Tensor,
        **of: Tensor,
    ) -> Any:
        p = [*of.values()]

        def gate(k: int) -> Any:
            return z[k](p[k] * h) if products and k > 0 else z[k]

        s = [sigmoid(gate(k) + p[k] * h) for k in range(14)]
        n = tanh(gate(14) + p[14] * gate(15))
        a_next = s[0] * a + s[1] * n + p[11] * b
        b_next = s[2] * b + s[3] * a_next
        c_next = s[4] * c + s[5] * tanh(b_next + p[12] * c)
        d_next = s[6] * d + s[7] * sigmoid(p[13] * d + n)
        e_next = s[8] * e + s[9] * n
        f_next = s[10] * f + s[11] * e_next
        first, second = tanh(a_next + p[10] * c_next), tanh(d_next + p[15] + f_next)
        output = s[12] * first + (1 - s[12]) * s[13] * second
        return output, a_next, b_next, c_next, d_next, e_next, f_next

    return cell


limits, product_limits = at_limits("limits", products=False), at_limits("product_limits", True)

CELLS = (
    *(lstm, gru, plain, two_states, reads_both, detaching, several_stages, derived),
    *(limits, product_limits),
    *(lltm.cells.indrnn, lltm.cells.lif),
)
OWN = CELLS[:-2]  # test_gallery.py compares the others with their functions
# States and parameters, products, derived parameters, no GEMM of h, a custom gradient.
SOME = (two_states, reads_both, several_stages, derived, lltm.cells.indrnn, lltm.cells.lif)


def each_of(cells: tuple[lltm.Cell, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cell", cells, ids=lambda cell: cell.name)


each, each_own, each_of_some = map(each_of, (CELLS, OWN, SOME))


def states(cell: lltm.Cell, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    drawn = tuple(0.3 * torch.randn(shape, dtype=dtype) for _ in range(1 + len(cell.states)))
    return drawn if len(drawn) > 1 else drawn[0]


def same(a: Any, b: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(flat(a), flat(b), **tolerance)


# ---- results and gradients -----------------------------------------------------------


@each_own
def test_a_layer_computes_its_function(cell: lltm.Cell) -> None:
    shapes = [(5, 3, 4, 5), (4, 40, 24, 72)]
    if cell is plain:  # small-batch engines: each block of hidden units reads all of h_0
        shapes += [(3, 2, 3, 200), (40, 2, 3, 200)]
    check_cell(cell, shapes=shapes, verbose=False)


@pytest.mark.parametrize("wrong", ["add", "subtract inf inf\noff = add"])  # also NaN
def test_check_cell_finds_a_wrong_gradient(wrong: str) -> None:
    text = lstm.text.replace("d.z.o = subtract", f"d.z.o = {wrong}")
    assert text != lstm.text
    with pytest.raises(AssertionError, match=r"^lstm, plain, torch.float64.*of gradient of"):
        check_cell(lltm.Cell(text, function=lstm.function), dtypes=[torch.float64], verbose=False)


def test_the_check_needs_no_mode_of_the_caller() -> None:
    with torch.inference_mode(), torch.device("meta"), FakeTensorMode():
        check_cell(plain, shapes=[(3, 2, 4, 5)], dtypes=[torch.float64], verbose=False)


def test_the_check_reports_functions_that_are_not_finite() -> None:
    for function, text in (
        (lambda z: torch.log(z[0]), "plain, torch.float64, .* function is finite, got NaN or"),
        (lambda z: torch.sqrt(F.relu(z[0])), "second derivatives are finite, got NaN or infinity"),
    ):
        cell = lltm.cell(gates=1, name="it")(function)
        with pytest.raises(AssertionError, match=text):
            check_cell(cell, shapes=[(3, 2, 4, 5)], dtypes=[torch.float64], verbose=False)


@pytest.mark.parametrize("name", ["hardsigmoid", "softplus", "rounded number", "float32"])
def test_check_cell_allows_for_rounding_by_pytorch(name: str) -> None:
    """Larger errors still fail."""

    def step(x: Tensor) -> Tensor:
        return (x > 0).float()

    function: Any = {
        "hardsigmoid": lambda z, c: (F.hardsigmoid(z[0]) * c, F.hardsigmoid(z[1] + c)),
        "softplus": lambda z, c: (F.softplus(20 * z[0]) - 0.05 * F.softplus(20 * z[1]), tanh(c)),
        "rounded number": lambda z, c: (step(z[0]) * 0.5 * c, tanh(z[1] * (1.5 - step(c)))),
        "float32": lambda z, c: (tanh(c + step(z[0]) / 3 + step(z[1]) * 7 / 9), z[0]),
    }[name]
    cell = lltm.cell(gates=2, name="rounding")(function)
    check = functools.partial(check_cell, shapes=[(6, 3, 4, 5)], verbose=False)
    check(cell, dtypes=[torch.float64, torch.float32], scale=2.0)
    wrong = re.sub(r"\nh' = (.+)", r"\noff = \1\nh' = multiply off 1.00001", cell.text)
    assert wrong != cell.text
    with pytest.raises(AssertionError, match="float64"):
        check(lltm.Cell(wrong, function=function), dtypes=[torch.float64])


@each
def test_one_step_is_a_sequence_of_one(cell: lltm.Cell) -> None:
    layer, step = cell.Layer(4, 6), cell.Cell(4, 6)
    step.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    x, hx = torch.randn(3, 4), states(cell, 1, 3, 6)
    _, last = layer(x.unsqueeze(0), hx)
    own = hx[0] if isinstance(hx, Tensor) else tuple(s[0] for s in hx)
    after = step(x, own)
    same(after, tuple(s[0] for s in flat(last)) if not isinstance(hx, Tensor) else last[0])
    row = own[1] if isinstance(hx, Tensor) else tuple(s[1] for s in own)
    same(flat(step(x[1], row)), [s[1] for s in flat(after)])


@each
def test_forms_of_input(cell: lltm.Cell) -> None:
    layer = cell.Layer(4, 6, batch_first=True)
    x = torch.randn(5, 3, 4)
    output, last = layer(x.transpose(0, 1))
    layer.batch_first = False
    same(([y.transpose(0, 1) for y in flat(output)], last), layer(x))
    one, its_last = layer(x[:, 1])
    same([one, its_last], [[y[1] for y in flat(output)], [s[:, 1] for s in flat(last)]])
    packed, packed_last = layer(pack_sequence([x[:, 0], x[:, 1], x[:, 2]]))
    rows = packed if cell.Layer._OUTPUTS else (packed,)
    same(
        ([y.data for y in rows], packed_last), ([y.flatten(0, 1) for y in flat(layer(x)[0])], last)
    )


def test_a_layer_returns_states_of_every_step() -> None:
    """check_cell compares them with the function's."""

    def function(z: Any, c: Tensor, m: Tensor) -> Any:
        m_next = 0.5 * m + sigmoid(z.a)
        return tanh(c - m_next), 0.9 * c + z.a * m, m_next

    for outputs in (("h",), ("m", "c"), ("c", "h", "m")):
        cell = lltm.cell(gates=("a",), outputs=outputs, name="several")(function)
        check_cell(cell, shapes=[(5, 20, 4, 32)], dtypes=[torch.float32], verbose=False)
        layer = cell.Layer(4, 32)
        x, reset = torch.randn(5, 3, 4), torch.arange(5).expand(3, 5).T == 2
        for y, after in zip(layer(x, reset=reset)[0], layer(x[2:])[0], strict=True):
            same(y[2:], after)
        for steps, batch in ((0, 3), (3, 0)):
            empty = torch.zeros(steps, batch, 4, requires_grad=True)
            sum(y.sum() for y in layer(empty)[0]).backward()
            assert empty.grad is not None
            assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
            layer.zero_grad()


def test_biases_and_scalars_have_their_own_shapes() -> None:
    unbiased = lltm.cell(gates=("a",), bias={"a": False}, name="unbiased")(lambda z: tanh(z.a))
    check_cell(unbiased, shapes=[(3, 2, 3, 4)], dtypes=[torch.float32], verbose=False)
    assert "no bias     a" in unbiased.explain()
    shapes = {k: tuple(p.shape) for k, p in reads_both.Layer(3, 4).named_parameters()}
    assert shapes["bias_ih_l0"] == shapes["bias_hh_l0"] == (4,)
    layer = two_states.Layer(3, 4)
    assert layer.q_l0.shape == (1,)
    layer.q_l0 = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"expected q of shape \(1,\), got \(4,\)"):
        layer(torch.zeros(1, 2, 3))
    other = reads_both.Cell(3, 4)
    other.bias_hh = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match=r"expected bias_hh of shape \(4,\), got \(8,\)"):
        other(torch.zeros(2, 3))


@pytest.mark.parametrize("reads", ["input", ("input", "h"), ("input", "product")], ids=str)
def test_weight_ih_may_have_no_rows(reads: Any) -> None:
    def function(z: Any, h: Tensor) -> Tensor:
        n = z.n(tanh(h)) if "product" in reads else z.n
        return tanh(n - n.mean(-1, keepdim=True)) - 0.5 * h

    cell = lltm.cell(gates=("n",), reads={"n": reads}, name="given")(function)
    check_cell(cell, shapes=[(3, 4, 0, 32)], verbose=False)
    layer, step, x = cell.Layer(4, 4), cell.Cell(4, 4), torch.randn(1, 3, 4)
    step.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    same(step(x[0]), layer(x)[0][0])
    packed = layer.prepack().packed_weights_l0.dtype == torch.uint8
    assert packed == (reads != "input" and support.HAS_OWN_GEMM)


@pytest.mark.parametrize("reads", [{}, {"f": "input", "g": ("input", "h")}], ids=str)
@pytest.mark.parametrize("keeps", [0.0, 1.0])  # the small-batch engine then computes in float64
def test_small_batches_with_heads_and_given_gates(reads: Any, keeps: float) -> None:
    @lltm.cell(gates=("i", "f", "g"), reads=reads)
    def cell(z: Any, c: Tensor) -> tuple[Tensor, Tensor]:
        c_next = (keeps + (1 - keeps) * sigmoid(z.f)) * c + sigmoid(z.i) * tanh(z.g)
        return tanh(c_next) * sigmoid(z.f), c_next

    # Weights in place and packed.
    check_cell(cell, shapes=[(3, 2, 5, 6), (33, 2, 5, 64)], dtypes=[torch.float], verbose=False)


def test_padding_of_a_product_does_not_read_uninitialized_memory() -> None:
    @lltm.cell(gates=("n",), reads={"n": ("x", "product")}, parameters={"p": 0.5})
    def cell(z: Any, h: Tensor, p: Tensor) -> Tensor:
        return tanh(z.n(h * p))

    layer, x = cell.Layer(5, 48, dtype=torch.bfloat16), torch.randn(6, 8, 5).bfloat16()
    for _ in range(30):
        output, _ = layer(x)
        size = (output.numel() * 2,)  # of the gradient of pre-activations and p
        nan = [torch.full(size, math.nan, dtype=torch.bfloat16) for _ in range(30)]
        del nan  # the allocator returns this memory
        output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


# ---- transforms, compilers, files ------------------------------------------------------


class Clamped(torch.autograd.Function):
    """Backward clamps large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-8, 8)


class Windowed(Clamped):
    """Backward returns the derivative only for small x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() > 1e5, 0.0, 2 * grad)


def hooked(x: Tensor) -> Tensor:
    y = 2 * x
    y.register_hook(lambda grad: grad.clamp(-8, 8))
    return y


def prehooked(x: Tensor) -> Tensor:
    y = 2 * x
    y.grad_fn.register_prehook(lambda grads: (grads[0].clamp(-8, 8),))  # type: ignore[union-attr]
    return y


def halved(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / 2)  # also without a gradient, as in prepacked layers
    return x


@pytest.mark.parametrize("applied", [Clamped.apply, Windowed.apply, hooked, prehooked, halved])
def test_a_custom_gradient_is_not_mistaken_for_the_derivative(applied: Any) -> None:
    """Custom gradients equal the derivative at most points."""
    make = lltm.cell(gates=2, reads={"g1": ("x", "product")}, name="own")
    cell = make(lambda z, h: tanh(applied(z.g0)) + applied(z.g1(applied(h))))
    check_cell(cell, shapes=[(3, 2, 4, 5)], dtypes=[torch.float64], verbose=False)
    layer = cell.Layer(3, 4)
    with pytest.raises(NotImplementedError, match="defines its own gradient: expected first"):
        torch.func.grad(lambda x: layer(x)[0].sum())(torch.randn(2, 3, 3))


def test_no_grad_detaches_in_derivatives_of_any_order() -> None:
    def cell(z: Any, c: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            m = torch.maximum(z[0], c)
            rare = torch.where(z[0].abs() > 1e3, z[0], 0.0) * 2
        i, f = torch.exp(z[0] - m), torch.exp(c - m)
        return tanh(i / (i + f) + rare) * z[0], tanh(m * z[0])

    made = lltm.cell(gates=1)(cell)
    assert "own_gradient" not in made.text
    check_cell(made, shapes=[(3, 2, 4, 5)], dtypes=[torch.float64], verbose=False)
    z, c = torch.randn(2, 5, dtype=torch.float64)
    z[:2] *= 1e4

    def second(run: Callable[[Tensor], Any]) -> Tensor:
        given = z.clone().requires_grad_()
        (grad,) = torch.autograd.grad(run(given).sum(), given, create_graph=True)
        again: Tensor = torch.autograd.grad((grad * grad).sum(), given)[0]
        return again

    def program(given: Tensor) -> Tensor:
        return evaluate(made.text, "forward", {"z.g0": given, "c": c})["h'"]

    same(second(program), second(lambda given: cell([given], c)[0]))


def test_torchscript_traces() -> None:
    for module, x in (
        (two_states.Layer(3, 4), torch.randn(3, 2, 3)),
        (gru.Cell(3, 4), torch.randn(2, 3)),
    ):
        same(torch.jit.trace(module, (x,))(x), module(x))


def test_torchscript_compiles_values_of_functions_of_parameters() -> None:
    """A prepacked layer has the values. Other modules raise an error."""
    layer, x = derived.Layer(3, 4, num_layers=2), torch.randn(3, 2, 3)
    for module in (layer, derived.Cell(3, 4), torch.nn.Sequential(layer)):
        with pytest.raises(NotImplementedError, match=r"^lltm::derived\.\w+: .*decay.*prepack\(\)"):
            torch.jit.script(module)
    packed = layer.prepack()
    same(support.saved_and_loaded(torch.jit.script(packed))(x), packed(x), rtol=0.0, atol=0.0)


def test_a_function_without_module_is_scripted() -> None:
    names: dict[str, Any] = {"tanh": tanh}
    exec("def cell(z): return tanh(z[0])", names)
    assert names["cell"].__module__ != __name__
    for module in (None, "no such module", "__main__"):
        names["cell"].__module__ = module
        layer = lltm.cell(gates=1)(names["cell"]).Layer(3, 4)
        x = torch.randn(3, 2, 3)
        same(torch.jit.script(layer)(x), layer(x))


@each_of_some
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(cell: lltm.Cell, autocast: torch.dtype) -> None:
    layer = cell.Layer(3, 4)
    x = torch.randn(3, 2, 3)
    with torch.autocast("cpu", autocast):
        output, _ = layer(x)
    expected, _ = copy.deepcopy(layer).to(autocast)(x.to(autocast))
    assert {y.dtype for y in flat(output)} == {autocast}
    same(output, expected)


@each_of((*SOME, limits))
def test_copies_and_files(cell: lltm.Cell, tmp_path: Path) -> None:
    layer = cell.Layer(3, 4, num_layers=2)
    packed = cell.Layer(3, 4).prepack()
    x = torch.randn(3, 2, 3)
    for module in (layer, packed):
        for other in (
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            support.saved_and_loaded(module, torch, weights_only=False),
        ):
            same(other(x), module(x))
            assert type(other).__name__ == type(module).__name__
    cell.save(tmp_path / "it.cell")
    again = lltm.Cell.load(tmp_path / "it.cell")
    assert again.text == cell.text
    assert repr(again) == repr(cell)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: parameter u is NaN")  # no initializer is serialized
        own = again.Layer(3, 4, num_layers=2)
    own.load_state_dict(layer.state_dict())
    same(own(x), layer(x))


@pytest.mark.slow  # compiles against PyTorch
@support.needs_cmake
def test_saved_cells_and_weights_run_in_a_program_without_python(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = support.program_without_python("tests_cpp/packaging/consumer", "app")
    paths = [tmp_path / name for name in ("it.cell", "weights", "input", "results")]
    cells = [cell for cell in CELLS if cell is not derived]  # which C++ does not compute
    for cell, dtype in itertools.product(cells, (torch.float64, torch.float32)):
        layer = cell.Layer(3, 4, num_layers=2, bidirectional=True, dtype=dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
        x = torch.randn(6, 3, 3, dtype=dtype)
        cell.save(paths[0])
        save_file(layer.state_dict(), paths[1])
        save_file({"input": x}, paths[2])
        run(*paths)
        results = load_file(paths[3])
        for prefix, module in (("", layer), ("prepacked ", layer.prepack())):
            with torch.no_grad():
                output, states = module(x)
            first, *others = flat(output)
            expected = [first, *flat(states), *others]
            found = [results.pop(f"{prefix}{k}") for k in range(len(expected))]
            same(found, expected)
        assert not results


class Doubled:
    def forward(self, *arguments: Any) -> Any:
        first, *others = super().forward(*arguments)  # type: ignore[misc]
        return 2 * first, *others


BASES = {"DoubledLayer": two_states.Layer, "DoubledStep": two_states.Cell}
BASES["DoubledPacked"] = two_states.Layer._PACKED
DOUBLED: Any = [type(name, (Doubled, base), {}) for name, base in BASES.items()]
DoubledLayer, DoubledStep, DoubledPacked = DOUBLED


class Noted(lltm.Cell):
    def __init__(self, note: str) -> None:
        super().__init__(plain.text)
        self.note = note


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL, "torch"])
def test_subclasses_are_pickled_as_subclasses(protocol: Any) -> None:
    def again(module: Any) -> Any:
        if protocol == "torch":
            return support.saved_and_loaded(module, torch, weights_only=False)
        return pickle.loads(pickle.dumps(module, protocol))

    layer, x = DoubledLayer(3, 4), torch.randn(2, 1, 3)
    layer.extra = "extra"
    for module in (layer, DoubledStep(3, 4), DoubledPacked(layer)):
        other, given = again(module), x[0] if isinstance(module, DoubledStep) else x
        assert type(other) is type(module)
        same(other(given), module(given))
        assert getattr(other, "extra", None) == getattr(module, "extra", None)
    assert type(again(Noted("note"))) is Noted
    assert again(Noted("note")).note == "note"

    class Local(two_states.Layer): ...  # type: ignore[misc, name-defined]

    with pytest.raises(AttributeError, match="local object"):
        again(Local(3, 4))


def drawn(parameter: Tensor) -> Tensor:
    return torch.full_like(parameter, 3.0)


def test_copies_and_pickles_initialize_parameters_as_the_cell_does() -> None:
    """Covers layers, prepacked layers and cells; copies also work with lambdas."""
    functions: dict[str, Any] = {
        "a": torch.nn.init.ones_,
        "b": functools.partial(torch.nn.init.constant_, val=2.0),
        "c": drawn,
        "d": 4.0,
        "e": lambda parameter: parameter.fill_(5.0),
    }

    @lltm.cell(gates=("n", "r"), reads={"n": "h"}, parameters=functions)
    def cell(z: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return tanh(z.n + z.r) * a + b * c + d * e

    def values(module: Any) -> list[float]:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
        module.reset_parameters()
        return [parameter[0].item() for parameter in [*module.parameters()][-5:]]

    make: Any
    for make in (cell.Layer, cell.Cell):
        for copied in (copy.deepcopy, copy.copy):
            module = copied(make(3, 4))
            assert type(module) is make
            assert values(module) == [1.0, 2.0, 3.0, 4.0, 5.0]
        module = make(3, 4)
        for _ in range(2):  # also pickles a pickled cell
            module = pickle.loads(pickle.dumps(module))
            with pytest.warns(UserWarning, match=r"(Layer|Cell): parameter e is NaN"):
                assert values(module)[:4] == [1.0, 2.0, 3.0, 4.0]
            assert module.e_l0.isnan().all() if make is cell.Layer else module.e.isnan().all()
    assert copy.deepcopy(cell) is copy.copy(cell) is cell
    again = pickle.loads(pickle.dumps(cell))
    assert (repr(again), again.text) == (repr(cell), cell.text)  # with the gates in z's order
    missing = r"^lltm::cell\.Layer: parameter e is NaN because"
    with pytest.warns(UserWarning, match=missing) as warned:
        layer = again.Layer(3, 4)
    assert Path(warned[0].filename) == Path(__file__)
    layer.load_state_dict(cell.Layer(3, 4).state_dict())
    assert (layer.e_l0 == 5.0).all()
    given: Any = lltm.Cell(cell.text, functions).Layer(3, 4)
    assert (given.e_l0 == 5.0).all()


def test_an_initializer_that_cannot_be_unpickled_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    @lltm.cell(gates=1, parameters={"a": drawn})
    def cell(z: Any, a: Tensor) -> Tensor:
        return tanh(z[0]) * a

    text = pickle.dumps(cell.Layer(3, 4))
    monkeypatch.delattr(sys.modules[__name__], "drawn")
    layer = pickle.loads(text)
    assert (layer.a_l0 == 3.0).all()
    with pytest.warns(UserWarning, match="parameter a is NaN because"):
        layer.reset_parameters()


def test_hints_name_unused_gates() -> None:
    cell = lltm.cell(gates=("a", "b"), name="half")(lambda z: tanh(z.b))
    assert "z.a is not used" in cell.explain()
    assert "is not used" not in lstm.explain()


def test_a_missing_argument_is_an_error_that_names_the_cells_class() -> None:
    make: Any
    for make, name in ((lstm.Layer, "Layer"), (lstm.Cell, "Cell")):
        with pytest.raises(TypeError, match=rf"^lstm\.{name}\(\) missing .* 'hidden_size'"):
            make(4)
        assert "hidden_size: 'int'" in str(inspect.signature(make))


def test_int8_requires_a_bounded_cell() -> None:
    layer = lstm.Layer(32, 32)
    x = torch.randn(5, 3, 32)
    same(layer.prepack(torch.qint8)(x), layer(x), rtol=0.0, atol=0.05)
    expected = (
        r"lltm::prepack: expected a cell that is bounded \(\|h'\| <= 1\) to quantize, got plain"
    )
    with pytest.raises(ValueError, match=expected):
        plain.Layer(32, 32).prepack(torch.qint8)


# ---- errors ----------------------------------------------------------------------------


def test_wrong_states_are_named() -> None:
    layer = two_states.Layer(3, 4)
    x, s = torch.randn(2, 3, 3), torch.zeros(1, 3, 4)
    for hx, text in (
        (s, r"expected hx to be a tuple \(h_0, c_0, m_0\), got Tensor"),
        ((s, s), r"expected hx to be a tuple \(h_0, c_0, m_0\), got 2 values"),
        ((s, s, 1), r"expected m_0 to be a tensor, got int"),
        ((s, s, s[:, :2]), r"expected m_0 of shape \(1, 3, 4\), got \(1, 2, 4\)"),
        ((s, s, s.half()), r"expected m_0 of dtype float32, the dtype of the input, got float16"),
        ((s, s.bool(), s), r"expected c_0 of dtype float32, the dtype of the input, got bool"),
        ((s[:, :1], s[:, :1], s[:, :1]), r"expected h_0 of shape \(1, 3, 4\), got \(1, 1, 4\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^lltm::two_states.Layer: {text}"):
            layer(x, hx)
    with pytest.raises(
        TypeError, match=r"^lltm::gru.Layer: expected h_0 to be a tensor, got tuple"
    ):
        gru.Layer(3, 4)(x, (s,))


def test_states_may_be_changed_in_place() -> None:
    layer, x = two_states.Layer(3, 4, bias=False), torch.randn(2, 3, 3)
    weights = torch.randn(8, 3, requires_grad=True), torch.randn(8, 4), torch.zeros(16)
    zeros = torch.zeros(3, 4)
    for states in (
        layer(x)[1],
        two_states.Cell(3, 4)(x[0]),
        lltm.functional.step(two_states, x[0], (zeros, zeros, zeros), *weights),
    ):
        others = [state.detach().clone() for state in states]
        states[1].mul_(2)
        assert torch.equal(states[0], others[0])
        assert torch.equal(states[1], 2 * others[1])
        assert states[1].untyped_storage().data_ptr() != states[2].untyped_storage().data_ptr()
        sum(state.sum() for state in states).backward()


def test_wrong_serialized_cells_are_rejected() -> None:
    """tests_cpp/test_program_text.cpp has every error."""
    wrong = lstm.text.replace("sigmoid z.f", "sigmoid z.nothing")
    x, h = torch.zeros(1, 1, 3), torch.zeros(1, 4)
    expected = r"^lltm::cell program, line \d+: expected .*, got 'z.nothing'"
    with pytest.raises(lltm.ArgumentError, match=expected):
        lltm.Cell(wrong)
    with pytest.raises(ValueError, match=expected):
        torch.ops.lltm.sequence(wrong, x, h, h, torch.zeros(16, 3), torch.zeros(16, 4))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([b"lltm-cell 1"], "a serialized cell, got b'lltm-cell 1'$"),
        (["lstm"], "a serialized cell, got 'lstm', the name of a built-in cell"),
        (["\ud800\n"], r"got '\\ud800\\n', without 'lltm-cell' first"),
        ([plain.text, [1]], r"plain: expected initial to be a dict, got \[1\]"),
        ([two_states.text, {"a": 1.0}], r"parameters of the cell \(p, q\), got 'a'"),
        ([two_states.text, {"p": lltm.scalar()}], "p with a value per hidden unit, got lltm.scal"),
        ([two_states.text, {"p": torch.ones(1)}], "a number as the initial value of p, got tensor"),
    ],
)
def test_wrong_arguments_of_cells_are_named(arguments: Any, expected: str) -> None:
    with pytest.raises((TypeError, lltm.ArgumentError), match=f"^lltm::cell: .*{expected}"):
        lltm.Cell(*arguments)


def test_a_cell_is_not_a_class() -> None:
    with pytest.raises(TypeError, match=r"^lltm::cell: expected gates .*gates=3\), got <function"):
        lltm.cell(lambda z: z[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^lltm::cell: plain: .* plain\.Layer or plain\.Cell"):
        plain(3, 4)
    with pytest.raises(TypeError, match=r"a function or a bound method, got lltm\.Cell\('plain'"):
        lltm.cell(gates=1)(plain)
    with pytest.raises(TypeError, match=r"check_cell: expected cell to be an lltm\.Cell, got"):
        check_cell(plain.Layer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loop: expected layer to be a plain\.Layer, got lstm"):
        loop(plain, lstm.Layer(3, 4), torch.randn(2, 1, 3))
    with pytest.raises(ValueError, match=r"shapes \(T, B, I, H\) of .*, got \(1, 2, 0, 0\)"):
        check_cell(plain, shapes=[(1, 2, 0, 0)])


def test_files_that_are_no_serialized_cells_are_rejected(tmp_path: Path) -> None:
    text = plain.text.encode()
    for content, expected in (
        (b"\xff\xfe\0\n", r"got '\\\\xff\\\\xfe\\x00\\n'"),
        (text.replace(b"tanh", b"\xff"), r"line \d+: .* an operation, got '\\xff'"),
        (text[:-4], "got the end of the cell"),
        (derived.serialized.encode().replace(b"%0", b"\xff"), r"a line of derived .*got '\\\\xff"),
        (text * 1000, "at most 65536 bytes, got 65537"),
    ):
        (file := tmp_path / "it.cell").write_bytes(content)
        got = f"expected a serialized cell, got the file '{file}', not a serialized cell: "
        with pytest.raises(lltm.ArgumentError, match=f"^lltm::cell: {re.escape(got)}.*{expected}"):
            lltm.Cell.load(file)
    wrong: Any = 1  # a file descriptor
    with pytest.raises(TypeError, match="PathLike"):
        lltm.Cell.load(wrong)


@lltm.cell(gates=1, parameters={"u": 0.5, "s": lltm.scalar(0.5)})
def once(z: Any, u: Tensor, s: Tensor) -> Tensor:
    a = torch.exp(u)
    h_next: Tensor = a * z[0] * s
    return h_next


ONCE = '%0 = aten.exp.default [["u"], {}]\na = %0\n'
# Lines that compute %0 instead, by the error. The line before the semicolon computes %1.
REJECTED = {
    "a line of derived parameters, got '%0 = aten": f"""
        save.default [["u", {{"str": "f"}}], {{}}]
        exp.def [["u"], {{}}]
        exp_.default [["u"], {{}}]
        exp.out [["u"], {{"out": "u"}}]
        rand_like.default [["u"], {{}}]
        exp.default [["exit()"], {{}}]
        exp.default [["u", 1], {{}}]
        exp.default [[], {{"self": "u"}}]
        exp.default [["u"], {{"out": "u"}}]
        exp.default [["u"]]
        exp.default [["u"], {{}}] 1
        add.Tensor [["u", {{"tensor": "exit()"}}], {{}}]
        add.Tensor [["u", {{"tensor": NaN}}], {{}}]
        add.Tensor [["u", {{"size": 2}}], {{}}]
        add.Tensor [["u", NaN], {{}}]
        add.Tensor [["u", 1{"0" * 400}], {{}}]
        add.Tensor [["u", {"[" * 9999}{"]" * 9999}], {{}}]
        stack.default [["u", 0.5], {{}}]
        sum.dim_IntList [["u", [9223372036854775808]], {{}}]
        gelu.default [["u"], {{"approximate": {{"str": "exit()"}}}}]
        zeros_like.default [["u"], {{"dtype": {{"dtype": "int64"}}}}]
    """,
    "a function that computes a for 1 hidden units, got ": """
        complex.default [["u", 0.5], {}]
        view.default [["u", [3]], {}]
        sum.dim_IntList [["u", [7]], {}]
        unbind.int [["u"], {}]; exp.default [["%1"], {}]
    """,
    "at most 1[63]1? elements, as the parameters have, in a function of only param": """
        new_zeros.default [["u", [300000000]], {}]
        new_full.default [["u", [3, 300000000], 0.5], {}]
        repeat.default [["u", [1000000]], {}]
        expand.default [["s", [1000000000000]], {}]
        expand.default [["s", [300000000, 0]], {}]
        cat.default [[["u", "u"]], {}]; slice.Tensor [["%1", 0, 0, {"size": 1}], {}]
        unsqueeze.default [["u", 1], {}]; mul.Tensor [["u", "%1"], {}]
    """,
    "at most 64 results of an operation": 'unbind.int [["u"], {}]; exp.default [["%1[0]"], {}]',
    "no integers in a function of": 'sort.default [["u"], {}]; neg.default [["%1[1]"], {}]',
    "a with a floating-point dtype": 'mul.Tensor [["u", {"complex": [0.0, 1.0]}], {}]',
    "130 values in a, got 1": 'sum.default [["u"], {}]',
}


@pytest.mark.parametrize("expected", REJECTED)
def test_serialized_functions_of_parameters_are_checked(expected: str) -> None:
    for line in REJECTED[expected].strip().splitlines():
        *before, last = line.strip().split("; ")
        rows = [f"%1 = aten.{row}\n" for row in before] + [f"%0 = aten.{last}\na = %0\n"]
        text = once.serialized.replace(ONCE, "".join(rows))
        with pytest.raises(lltm.ArgumentError, match=rf"^lltm::cell: expected {expected}"):
            lltm.Cell(text)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("\na = %0", "", "1 to 512 lines that compute"),
        (ONCE, ONCE + "w = %0\n", "parameters a, s, u, w, got .'a', 's'"),
        (ONCE, ONCE + ONCE, "a line of derived parameters, got '%0 = "),
        (ONCE, ONCE + "a = %0\n", "a line of derived parameters, got 'a = %0'"),
        (ONCE, 'a = "exit()"\n', "a line of derived parameters, got 'a = "),
        (ONCE, '%1 = aten.exp.default [["u"], {}]\n' + ONCE, "1 to 512 lines that compute"),
        ("\nparameter u", "\nparameter a", "a line of derived .*, got '%0 = "),
        ("\nparameter u", "\nparameter a 0.5\nparameter u", "a line of derived .*, got 'a = %0'"),
        ("\nparameter u", "\nparameter class 0.5\nparameter u", "names in modules .*'class'"),
        ("\nparameter u", "\nparameter é 0.5\nparameter u", r"names in modules .*xe9"),
        ("parameter u 0.5", "parameter u exit()", "a line of derived parameters, got 'parameter u"),
        (" scalar\n%0", "\n%0", "scalars s, got"),
        ("derived\n", "derived\n" + "parameter x 0\n" * 9999, "at most 65536 bytes, got 1"),
        ("derived", "\nparameter x".join(["derived", *(f"{k} 0" for k in range(15))]), "16 par"),
    ],
)
def test_damaged_functions_of_parameters(old: str, new: str, expected: str) -> None:
    section = once.serialized.removeprefix(once.text)
    assert old in section
    with pytest.raises(lltm.ArgumentError, match=f"^lltm::cell: .*expected .*{expected}"):
        lltm.Cell(once.text + section.replace(old, new))


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.elements = max([self.elements, *sizes])
        return result


def test_functions_of_parameters_are_checked_for_the_hidden_size() -> None:
    """Results of the serialized lines grow with (H - 120)^2."""
    lines = """%1 = aten.slice.Tensor [["u", 0, 120, 9223372036854775807], {}]
%2 = aten.unsqueeze.default [["%1", 1], {}]
%3 = aten.mul.Tensor [["%1", "%2"], {}]
%4 = aten.sum.default [["%3"], {}]
%0 = aten.add.Tensor [["u", "%4"], {}]
a = %0
"""
    cell = lltm.Cell(once.serialized.replace(ONCE, lines))
    assert cell.Cell(3, 125).a.shape == (125,)
    for make, device in ((cell.Layer, "cpu"), (cell.Cell, "cpu"), (cell.Cell, "meta")):
        with pytest.raises(lltm.ArgumentError, match=r"at most 501 .*up to 144400 of aten\.mul"):
            make(3, 500, device=device)


@pytest.mark.filterwarnings("ignore:.* is NaN because its initializer:UserWarning")
@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_functions_of_parameters(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is rejected, or computes values of the right shape from small tensors."""
    random = Random(torch.initial_seed())
    bases = [cell.serialized for cell in (derived, lltm.cells.lru, lltm.cells.hgrn, once)]
    rows = [row for text in bases for row in text.partition("\nderived\n")[2].splitlines()]
    words = sorted({word for row in rows for word in re.findall(r"[^ ,\[\]{}]+", row)})
    words += ["aten.mul.Tensor", "aten.expand.default", "aten.relu.default", "NaN", "1e999", "-1"]
    words += ["300000000", '["u", "u"]', '{"size": 1}', '"u"', '"%1"', "é", ""]
    with Largest():  # type: ignore[no-untyped-call]
        lltm.Cell(derived.serialized).Cell(3, 4)  # imports modules of PyTorch
    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, None)
    accepted = 0
    for _ in range(count):
        text, middle, section = random.choice(bases).partition("\nderived\n")
        changed = section.splitlines()
        for _ in range(random.choice((1, 1, 2))):
            k = random.randrange(len(changed))
            parts = re.split(r"([ ,\[\]{}]+)", changed[k])
            parts[random.randrange(0, len(parts), 2)] = random.choice(words)
            others = ["".join(parts)] * 4 + [random.choice(rows)]
            changed[k : k + random.choice((0, 1, 1, 1))] = [random.choice(others)]
        largest = Largest()  # type: ignore[no-untyped-call]
        with largest:
            try:
                cell = lltm.Cell(text + middle + "\n".join(changed) + "\n")
                made = cell.Cell(3, 4)
            except lltm.ArgumentError:
                made = None
        assert largest.elements <= 16 * 130
        if made is not None:
            accepted += 1
            for name in made._DERIVATION.results:
                units = 1 if name in cell.Layer._HEADER.scalars else 4
                assert getattr(made, name).shape == (units,)
    assert accepted > 0


def test_initializers_fill_or_return_a_parameter() -> None:
    def cell_of(initial: Any) -> lltm.Cell:
        return lltm.cell(gates=1, parameters={"a": initial}, name="it")(lambda z, a: z[0] * a)

    for initial in (
        lambda t: torch.full_like(t, 0.7),
        lambda t: t.data.fill_(0.7),
        lambda t: torch.nn.init.constant_(t, 0.7),
        lambda t: [t.fill_(0.7)],
    ):
        made = cell_of(initial)
        same(made.Layer(3, 4).a_l0, torch.full((4,), 0.7))
        with torch.inference_mode():
            same(made.Cell(3, 4).a, torch.full((4,), 0.7))
        assert made.Layer(3, 4, device="meta").a_l0.is_meta
    for wrong in (lambda t: None, lambda t: 0.7):
        with pytest.raises(
            ValueError, match=r"^lltm::it.Layer: .* fills or returns a, got .*neither"
        ):
            cell_of(wrong).Layer(3, 4)
    with pytest.raises(ValueError, match="the result of the initializer of a of shape"):
        cell_of(lambda t: torch.ones(1)).Cell(3, 4)


def test_names_that_modules_and_z_use_are_rejected() -> None:
    layer = lstm.Layer(32, 32)
    modules = lstm.Cell(3, 4), layer, layer.prepack(), layer.prepack(torch.qint8), lltm.LLTM(3, 4)
    tensors = [name for m in modules for name in (*m.state_dict(), *dict(m.named_buffers()))]
    of_modules = {name.removesuffix("_l0") for name in tensors} | {"forward", "training", "heads"}
    assert {"weights", "packed_weights", "weight_ih_scales"} < of_modules
    for replaced, names, kind in (
        ("p", {*of_modules, "bias", "__class__"}, "parameter"),
        ("g", {"_no", "__class__", "__init__"}, "gate"),
    ):
        for name in names:
            text = re.sub(rf"\b{replaced}\b", name, two_states.text)
            expected = rf"^lltm::cell: two_states: expected {kind} names .*, got '{name}'$"
            with pytest.raises(lltm.ArgumentError, match=expected):
                lltm.Cell(text)
    lltm.cell(gates=1, parameters={"self": 1}, name="it")(lambda z, *, self: z[0] * self)


def test_initial_values_are_in_the_range_of_the_dtype() -> None:
    initial: dict[str, Any] = {"states": {"c": -1e30}, "parameters": {"p": 1e39}}
    cell = lltm.cell(gates=1, name="it", **initial)(lambda z, c, p: (z[0] * p, c))
    for make in (cell.Layer, cell.Cell):
        for dtype, text in ((torch.half, "c .* float16, got -1e"), (torch.float, "p .* float32")):
            with pytest.raises(lltm.ArgumentError, match=rf"^lltm::it.*: .* value of {text}"):
                make(3, 4, dtype=dtype)
        make(3, 4, dtype=torch.double)


@pytest.mark.parametrize(
    ("kept", "function"),
    [
        (4, lambda z, h: torch.exp(z.a - torch.maximum(z.a, h).detach())),
        (28, lambda z, h: functools.reduce(torch.mul, lltm.layer_norm((z.a, z.b, h)))),
        (8, lambda z, h: tanh(z.n(h))),
    ],
)
def test_bytes_that_autograd_saves(kept: int, function: Any) -> None:
    """Counts no freed graphs, tensors once, and operands of products."""
    reads = {"n": ("x", "product")} if kept == 8 else {}
    cell = lltm.cell(gates=[*"abn"], reads=reads, name="it")(function)
    report = cell.explain()
    assert f" autograd saves {kept} bytes" in " ".join(report.split())
    with torch.no_grad(), torch.autograd.set_detect_anomaly(True), FakeTensorMode():
        assert cell.explain() == report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_padding_of_a_concatenated_matrix_has_a_zero_gradient(dtype: torch.dtype) -> None:
    @lltm.cell(gates=("a", "b"), reads={"a": "x"})
    def unequal(z: Any, h: Tensor) -> Tensor:
        return torch.tanh(z.a + torch.sigmoid(z.b) * h)

    hidden = 32
    weights = torch.randn(2 * hidden, hidden + 8, dtype=dtype).div(8).requires_grad_()
    arguments = torch.randn(6, 16, 8, dtype=dtype), torch.randn(16, hidden, dtype=dtype), None
    with support.deterministic():
        output, *_ = torch.ops.lltm.sequence(unequal.text, *arguments, weights, None)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), [weights])
    assert gradient[:hidden].abs().min() > 0
    assert torch.equal(gradient[hidden:, :hidden], torch.zeros(hidden, hidden, dtype=dtype))
    assert gradient[hidden:, hidden:].isfinite().all()
