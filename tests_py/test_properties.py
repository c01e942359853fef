"""Properties of the modules of every built-in cell (forms.py).

tests_cpp/properties.cpp tests the functions, test_torch_cells.py all combinations of options. The
tests include the checks of PyTorch's test/test_modules.py.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from forms import Form, Sample, Sizes, Values, cases, each_form, id_of, state_of
from support import DTYPES, deterministic, saved_and_loaded
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence
from torch.testing import assert_close

SINGLE_AND_DOUBLE = (torch.float32, torch.float64)


def is_ours(form: Form) -> bool:
    """Excludes lltm.reference, whose modules inherit all but forward."""
    return not form.plain


def is_trained(form: Form) -> bool:
    return form.trainable and not form.plain


same = partial(assert_close, rtol=0, atol=0)


def mapped(values: Values, change: Callable[[Tensor], Tensor]) -> Values:
    return {name: change(value) for name, value in values.items()}


def leaves(values: Values) -> Values:
    return mapped(values, lambda value: value.detach().clone().requires_grad_())


def gradients(
    results: list[Tensor], values: Values, cotangents: list[Tensor] | None = None
) -> Values:
    """The output gradients are ones."""
    pairs = [
        (y, torch.ones_like(y) if cotangents is None else cotangents[k])
        for k, y in enumerate(results)
        if y.requires_grad
    ]
    if not pairs:
        return mapped(values, torch.zeros_like)
    ys, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, list(values.values()), grads, materialize_grads=True)
    return dict(zip(values, found, strict=True))


@each_form(SINGLE_AND_DOUBLE)
def test_agrees_with_the_reference_and_does_not_change_arguments(
    form: Form, dtype: torch.dtype
) -> None:
    for s in form.each(dtype):
        before = copy.deepcopy(s.values)
        versions = [value._version for value in s.values.values()]
        results = s.run(s.values)
        if not form.quantized:  # test_int8.py tests its values
            assert_close(results, s.plain(s.values))
        assert [value._version for value in s.values.values()] == versions
        same(s.values, before)
        if not form.plain:
            places = {t.untyped_storage().data_ptr() for t in (*results, *s.values.values())}
            assert len(places) == len(results) + len(s.values), "memory is shared"


@each_form()
def test_results_have_the_dtype_of_the_arguments(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        assert {y.dtype for y in s.run(s.values)} == {dtype}


@each_form((torch.float32,))
def test_runs_are_bitwise_identical(form: Form, dtype: torch.dtype) -> None:
    with deterministic():
        for s in form.each(dtype, Sizes(4, 65, 17, 64), every=False):
            runs = []
            for _ in range(2):
                values = leaves(s.values)
                results = s.run(values)
                runs.append((results, gradients(results, values) if form.trainable else {}))
            same(*runs)


def rows_of(batch: Tensor | PackedSequence, dim: int) -> Sequence[Tensor]:
    return unpack_sequence(batch) if isinstance(batch, PackedSequence) else batch.unbind(dim)


@each_form(SINGLE_AND_DOUBLE)
def test_each_sequence_is_independent_of_the_others(form: Form, dtype: torch.dtype) -> None:
    """Calls are batched, packed and unbatched."""
    of_states = 1 if form.steps else 0  # batch dimension
    for s in filter(Sample.is_plain, form.each(dtype)):
        input, *hx = s.arguments(s.values)
        states = [s.values[name] for name in s.states] if hx else []
        of_input = 0 if s.options.get("batch_first") or not form.steps else 1

        def run(input: Any, states: list[Tensor], s: Sample = s) -> list[Any]:
            given = dict(zip(s.states, states, strict=False))
            results = s.module(input, *([state_of(given, s.states)] if states else []))
            output, final = results if form.steps else (None, results)
            return [output] * form.steps + list(final if isinstance(final, tuple) else (final,))

        def by_row(
            results: list[Any], of_input: int = of_input, s: Sample = s
        ) -> list[list[Tensor]]:
            dims = [of_input] * form.steps + [of_states] * len(s.states)
            columns = [rows_of(y, dim) for y, dim in zip(results, dims, strict=True)]
            return [list(row) for row in zip(*columns, strict=True)]

        if s.kind == "unbatched":
            batch = run(input.unsqueeze(of_input), [h.unsqueeze(of_states) for h in states])
            assert_close(by_row(batch), [run(input, states)])
            continue
        alone = zip(rows_of(input, of_input), by_row(run(input, states)), strict=True)
        for k, (row, expected) in enumerate(alone):
            assert_close(run(row, [state.select(of_states, k) for state in states]), expected)


def check_shapes(form: Form, s: Sample, sizes: Sizes, results: list[Tensor]) -> None:
    *rows, _ = s.values["input"].shape
    directions = 2 if s.options.get("bidirectional") else 1
    of_h = s.options.get("proj_size", 0) or sizes.hidden
    batch = rows
    if form.steps:
        output, *results = results
        assert output.shape == (*rows, directions * of_h)
        batch = [] if s.kind == "unbatched" else [sizes.batch]
        batch = [directions * s.options.get("num_layers", 1), *batch]
    widths = (of_h, *[sizes.hidden] * (len(results) - 1))
    assert [y.shape for y in results] == [(*batch, width) for width in widths]


@each_form()
def test_an_empty_batch_gives_empty_results_and_zero_gradients(
    form: Form, dtype: torch.dtype
) -> None:
    sizes = Sizes(batch=0)
    for s in form.each(dtype, sizes):
        check_shapes(form, s, sizes, s.run(s.values))
        if form.trainable:
            values = leaves(s.values)
            results = s.run(values)
            check_shapes(form, s, sizes, results)
            same(gradients(results, values), mapped(s.values, torch.zeros_like))


@each_form(where=lambda form: form.steps)
def test_an_empty_sequence_gives_the_initial_states(form: Form, dtype: torch.dtype) -> None:
    sizes = Sizes(steps=0)
    for s in form.each(dtype, sizes):
        values = leaves(s.values) if form.trainable else s.values
        _, *final = results = s.run(values)
        # Without steps, only the order or a state determines the batch size.
        check_shapes(form, s, Sizes(steps=0, batch=0) if s.name == "packed" else sizes, results)
        for name, y in zip(s.states, final, strict=True):
            same(y, s.values.get(name, torch.zeros_like(y)))
            assert name not in values or form.plain or y.data_ptr() != values[name].data_ptr()
        # All results depend on all arguments, as in torch.nn.functional.linear; but h_n of a
        # projected layer is h_0 here.
        depends = form.trainable and "proj" not in s.name
        for k in range(len(results) if depends else 0):
            y = s.run(values)[k]
            assert y.requires_grad
            for name, gradient in gradients([y], values).items():
                is_its_own = k > 0 and name == s.states[k - 1]
                same(gradient, torch.full_like(values[name], float(is_its_own)))


def by_columns(t: Tensor) -> Tensor:
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def with_gaps(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, math.nan)], dim=-1)[..., 0]


# tests_cpp/properties.cpp tests more of them on the operators.
@pytest.mark.parametrize("layout", [by_columns, with_gaps])
@each_form(SINGLE_AND_DOUBLE)
def test_arguments_and_gradients_may_have_any_strides(
    form: Form, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    def results(s: Sample, values: Values, strided: bool) -> tuple[list[Tensor], Values]:
        given = {
            name: (layout(value) if strided else value).detach().requires_grad_(form.trainable)
            for name, value in values.items()
        }
        ys = s.run(given)
        if not form.trainable:
            return ys, {}
        generator = torch.Generator().manual_seed(1)
        grads = [layout(torch.randn(y.shape, generator=generator).to(dtype)) for y in ys]
        if not strided:
            grads = [grad.contiguous() for grad in grads]
        return [y.detach() for y in ys], gradients(ys, given, grads)

    for s in form.each(dtype):
        found, expected = results(s, s.values, strided=True), results(s, s.values, strided=False)
        # In int8, only a projection is a GEMM in the layer's dtype.
        (same if form.quantized and "proj_size" not in s.options else assert_close)(found, expected)


@each_form(SINGLE_AND_DOUBLE, is_trained)
def test_results_and_gradients_have_the_memory_layout_of_torch_nn_s(
    form: Form, dtype: torch.dtype
) -> None:
    for s in filter(Sample.is_plain, form.each(dtype)):
        strides = []
        for module in (s.module, form.torch_module(**s.options).to(dtype)):
            values = {name: s.values[name].clone().requires_grad_() for name in s.given()}
            results = s.call(module, values)
            grads = torch.autograd.grad(
                [y.sum() for y in results], [*values.values(), *module.parameters()]
            )
            of_arguments, of_parameters = grads[: len(values)], grads[len(values) :]
            assert all(gradient.is_contiguous() for gradient in of_parameters)
            strides.append([tensor.stride() for tensor in (*results, *of_arguments)])
        assert strides[0] == strides[1]


@each_form((torch.float64,), is_trained)
def test_each_gradient_is_the_same_for_any_set_of_gradients(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype, every=False):

        def found(wanted: set[str], s: Sample = s) -> Values:
            values = {
                name: value.clone().requires_grad_(name in wanted)
                for name, value in s.values.items()
            }
            results = s.run(mapped(values, lambda value: 1 * value))
            torch.stack([y.square().sum() for y in results]).sum().backward()
            return {name: v.grad for name, v in values.items() if v.grad is not None}

        everything = found(set(s.values))
        assert everything.keys() == s.values.keys()
        # With many values, request all gradients but one: enough calls for each.
        subsets = [s.values.keys() - {name} for name in s.values]
        subsets += [{name} for name in s.values] if len(s.values) <= 5 else []
        # Of two directions, one requires none.
        subsets.append({name for name in s.values if name.endswith("_reverse")})
        for wanted in filter(None, subsets):
            assert_close(found(wanted), {name: everything[name] for name in wanted})


@each_form(SINGLE_AND_DOUBLE)
def test_no_graph_is_recorded_without_need(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        expected = s.run(s.values)
        assert not any(y.requires_grad for y in expected)
        values = leaves(s.values)
        with torch.no_grad():
            results = s.run(values)
        assert not any(y.requires_grad for y in results)
        assert_close(results, expected)
        with torch.inference_mode():
            results = s.run(values)
            assert all(y.is_inference() for y in results)
            assert all(torch.isfinite(y).all() for y in s.call(s.fresh()))
        assert_close(results, expected)


# Their second derivatives are slow; the LLTM is always tested.
SLOWEST = ("LSTM", "GRU", "RNN", "LLTM, checkpoints")
# Uses of other cells than the LLTM, where only the equations differ, and of second derivatives.
DERIVED = ("packed out of order, layers and directions, state", "batch, state, no bias")


@pytest.mark.parametrize(
    ("form", "order"),
    [
        pytest.param(
            form, order, marks=pytest.mark.slow if order == 2 and form.name in SLOWEST else ()
        )
        for form, _ in cases((torch.float64,), is_trained)
        for order in (1, 2)
    ],
    ids=id_of,
)
def test_derivatives_match_finite_differences(form: Form, order: int) -> None:
    """Along random directions."""
    check: Callable[..., bool] = torch.autograd.gradgradcheck
    options = {"check_fwd_over_rev": True}
    if order == 1:
        check = torch.autograd.gradcheck
        options = {"check_forward_ad": True}
    for s in form.each(torch.float64, Sizes(2, 2, 2, 3), every=False):
        everything = "proj_size" in s.options or ("LLTM" in form.name and order == 1)
        if not everything and s.name not in DERIVED:
            continue
        names, values = list(s.values), list(leaves(s.values).values())
        if order == 1:  # vmap has no random numbers
            options["check_batched_forward_grad"] = "dropout" not in s.name

        def function(*values: Tensor, s: Sample = s, names: list[str] = names) -> Any:
            return tuple(s.run(dict(zip(names, values, strict=True))))

        assert check(function, values, fast_mode=True, check_batched_grad=True, **options)
        parameters = s.parameters()
        for alone in (parameters[0], parameters[-1]) if order == 1 else ():
            given = [
                v if name == alone else v.detach() for name, v in zip(names, values, strict=True)
            ]
            assert check(function, given, fast_mode=True, check_batched_grad=True)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@each_form(SINGLE_AND_DOUBLE, is_trained)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_parameters(
    form: Form, dtype: torch.dtype, lower: torch.dtype
) -> None:
    """float64 is not cast."""
    computed = lower if dtype == torch.float32 else dtype
    for s in form.each(dtype, every=False):
        values = leaves(s.values)
        with torch.autocast("cpu", dtype=lower):
            results = s.run(values)
        cast = leaves(mapped(s.values, lambda value: value.to(computed)))
        expected = s.run(cast)
        assert {y.dtype for y in results} == {computed}
        same(results, expected)
        found = gradients(results, values)
        assert {gradient.dtype for gradient in found.values()} == {dtype}
        wanted = mapped(gradients(expected, cast), lambda gradient: gradient.to(dtype))
        # Direction sums and projections use float32.
        rounded = ["input"] if s.options.get("bidirectional") else []
        rounded += found if "proj_size" in s.options else []
        eps = torch.finfo(lower).eps
        for name in rounded:
            assert_close(found.pop(name, None), wanted.pop(name, None), rtol=eps, atol=eps)
        same(found, wanted)


@each_form((torch.float32, torch.bfloat16))
def test_on_meta_the_results_have_the_shapes_of_real_ones(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        values = mapped(s.values, lambda value: value.to("meta"))
        if form.prepacked:
            with pytest.raises(NotImplementedError, match="prepack: expected weights with data"):
                s.run(values)
            continue
        for found, real in zip(s.run(values), s.run(s.values), strict=True):
            assert found.is_meta
            assert (found.shape, found.stride(), found.dtype) == (
                real.shape,
                real.stride(),
                real.dtype,
            )


def check_parameters(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    named = list(module.named_parameters())
    assert named
    for name, parameter in named:
        found = (parameter.device, parameter.dtype, parameter.requires_grad)
        assert found == (torch.device(device), dtype, True), name


@each_form((torch.float32,), is_trained)
def test_the_constructor_s_device_and_dtype_hold_for_every_parameter(
    form: Form, dtype: torch.dtype
) -> None:
    for s in form.each(dtype):
        for device in ("cpu", "meta"):
            for other in DTYPES:
                options = {**s.options, "device": device, "dtype": other}
                check_parameters(form.make(**options), device, other)


@each_form((torch.float32,), is_trained)
def test_default_device_and_dtype_apply_to_the_constructor(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        on_cpu = form.make(**s.options)
        with torch.device("meta"):
            on_meta = form.make(**s.options)
        check_parameters(on_meta, "meta", torch.float32)
        for here, there in zip(on_cpu.parameters(), on_meta.parameters(), strict=True):
            assert (here.shape, here.stride()) == (there.shape, there.stride())
        on_meta.to_empty(device="cpu")
        on_meta.reset_parameters()
        bound = on_meta.hidden_size**-0.5
        assert all(float(p.detach().abs().max()) <= bound for p in on_meta.parameters())
        assert all(torch.isfinite(y).all() for y in s.call(on_meta))
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            check_parameters(form.make(**s.options), "cpu", torch.float64)
        finally:
            torch.set_default_dtype(previous)


@pytest.fixture(params=["set", "swap"])
def conversion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes a conversion set .data or swap parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param == "swap")
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def load(module: nn.Module, weights: Values) -> None:
    """Weak references prevent swapping in an RNNBase."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        swaps and not isinstance(module, nn.RNNBase)
    )
    module.load_state_dict(weights)
    torch.__future__.set_swap_module_params_on_conversion(swaps)


@pytest.mark.usefixtures("conversion")
@torch.no_grad()  # parameters in a graph can't be swapped
@each_form(SINGLE_AND_DOUBLE, is_trained)
def test_it_computes_in_the_dtype_that_it_is_converted_to(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype, every=False):
        weights, expected = copy.deepcopy(s.module.state_dict()), s.call()
        for other in (*DTYPES, dtype):
            assert s.module.to(other) is s.module
            check_parameters(s.module, "cpu", other)
            results = s.call(values=mapped(s.values, partial(torch.Tensor.to, dtype=other)))
            assert {y.dtype for y in results} == {other}
            another = torch.float32 if other == torch.float64 else torch.float64
            with pytest.raises(TypeError, match=r"^lltm::\w+: expected input of dtype"):
                s.call(values=mapped(s.values, partial(torch.Tensor.to, dtype=another)))
        load(s.module, weights)
        same(s.call(), expected)


@pytest.mark.usefixtures("conversion")
@torch.no_grad()
@each_form((torch.float32,), is_ours)
def test_it_moves_to_another_device_and_back(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype, every=False):
        weights, expected = copy.deepcopy(s.module.state_dict()), s.call()
        if form.prepacked:  # stays on its device
            with pytest.raises(RuntimeError, match="expected device to stay cpu, got meta"):
                s.module.to("meta")
        else:
            s.module.to("meta")
            check_parameters(s.module, "meta", dtype)
            with pytest.raises(RuntimeError, match="expected input on device meta, the device"):
                s.call()
        s.module.to_empty(device="cpu")
        load(s.module, weights)
        same(s.call(), expected)


@each_form((torch.float32,), is_ours)
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        partial(saved_and_loaded, package=torch, weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_computes_the_same_and_shares_nothing(
    form: Form, dtype: torch.dtype, copied: Callable[[nn.Module], nn.Module]
) -> None:
    for s in form.each(dtype, every=False):
        module, expected = copied(s.module), s.call()
        assert type(module) is type(s.module)
        assert (repr(module), module.training) == (repr(s.module), s.module.training)
        for tensor in (*s.module.parameters(), *s.module.buffers()):
            tensor.data.zero_()
        same(s.call(module), expected)


@each_form((torch.float32,), is_ours)
@pytest.mark.parametrize("loads", ["copy", "assign", "assign to meta"])
def test_a_state_dict_makes_another_module_the_same(
    form: Form, dtype: torch.dtype, loads: str
) -> None:
    for s in form.each(dtype):
        other, expected = s.fresh(), s.call()
        assert not torch.equal(s.call(other)[0], expected[0])
        if loads == "assign to meta" and not form.prepacked:
            other.to("meta")
        state_dict = copy.deepcopy(s.module.state_dict())
        assert not any(other.load_state_dict(state_dict, assign=loads != "copy"))
        same(s.call(other), expected)


@each_form((torch.float32,), is_ours)
def test_repr_shows_the_constructor_arguments(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        text, cls = repr(s.module), type(s.module)
        assert text == str(s.module)
        if not form.prepacked:
            again = eval(text.removeprefix("lltm."), {cls.__name__: cls})
            assert repr(again) == text
            shapes = {name: p.shape for name, p in s.module.named_parameters()}
            assert {name: p.shape for name, p in again.named_parameters()} == shapes


@each_form((torch.float32,), is_trained)
def test_without_dropout_training_is_not_read(form: Form, dtype: torch.dtype) -> None:
    for s in form.each(dtype):
        if any("dropout" in name for name in s.options):
            continue
        expected = s.call()
        del s.module.training
        same(s.call(), expected)
