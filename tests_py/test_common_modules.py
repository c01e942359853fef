"""What PyTorch's own tests (test/test_modules.py) check of every module of torch.nn, of ours.

The modules are described as PyTorch describes its own, by a ModuleInfo with samples of arguments.
Among the samples are those of nn.LSTM and nn.LSTMCell, with PyTorch's references. No module of ours
has an `inplace` argument; instead of what is checked of that, arguments must stay as they were.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import flat
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.testing import assert_close, make_tensor

import lltm

try:
    # The import forbids the whole process to set torch.backends.*: not in here.
    with torch.backends.__allow_nonbracketed_mutation():
        from torch.testing._internal.common_modules import (
            ErrorModuleInput,
            FunctionInput,
            ModuleErrorEnum,
            ModuleInfo,
            ModuleInput,
            module_db,
        )
        from torch.testing._internal.common_utils import gradcheck, gradgradcheck
except (ImportError, AttributeError) as error:  # internal: it may move, or need more packages
    pytest.skip(f"this PyTorch's tests of modules: {error}", allow_module_level=True)

Tree = Any  # of tensors, tuples and PackedSequences


def changed(tree: Tree, change: Callable[[Tensor], Any]) -> Tree:
    """The tree with `change` applied to its tensors, of a PackedSequence to the rows."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(change(tree.data), *tree[1:])
    if isinstance(tree, (tuple, list)):
        return tuple(changed(branch, change) for branch in tree)
    return tree


def tensors(tree: Tree) -> list[Tensor]:
    """Its tensors that carry values: of a PackedSequence the rows."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    changed(tree, note)
    return found


# ----- the modules, described ------------------------------------------------


def theirs(module_cls: type) -> Any:
    return next(info for info in module_db if info.module_cls is module_cls)


def by_the_other(options: dict[str, Any], m: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
    """What lltm's module should give, by lltm.reference's, and the reverse."""
    of_reference = isinstance(m, (lltm.reference.LLTM, lltm.reference.LLTMCell))
    module = getattr(lltm if of_reference else lltm.reference, type(m).__name__)(**options)
    module.to(p[0].dtype).load_state_dict(m.state_dict())
    return module(*args, **kwargs)


def one_by_one(m: Any, p: Any, packed: PackedSequence, hx: Any = None) -> Any:
    """What a layer should give for packed sequences, by running it over each alone."""
    outputs, states = zip(
        *(
            m(x, None if hx is None else (hx[0][:, k], hx[1][:, k]))
            for k, x in enumerate(unpack_sequence(packed))
        ),
        strict=True,
    )
    h_n, c_n = (torch.stack(of_each, dim=1) for of_each in zip(*states, strict=True))
    return pack_sequence(list(outputs), enforce_sorted=False), (h_n, c_n)


def sample(desc: str, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    is_packed = isinstance(args[0], PackedSequence)
    return ModuleInput(
        FunctionInput(**options),
        FunctionInput(*args, **kwargs),
        desc=desc,
        reference_fn=one_by_one if is_packed else partial(by_the_other, options),
    )


def cell_inputs(
    module_info: Any, device: Any, dtype: torch.dtype, requires_grad: bool, **rest: Any
) -> list[Any]:
    make = partial(make_tensor, device=device, dtype=dtype, requires_grad=requires_grad)
    sizes = {"input_size": 3, "hidden_size": 4}
    without_bias = {**sizes, "bias": False}
    return [
        *theirs(nn.LSTMCell).module_inputs_func(module_info, device, dtype, requires_grad, **rest),
        sample("batch", sizes, make(2, 3)),
        sample("batch, state", sizes, make(2, 3), (make(2, 4), make(2, 4))),
        sample("batch, state, no bias", without_bias, make(2, 3), hx=(make(2, 4), make(2, 4))),
        sample("no batch, no state", sizes, make(3)),
    ]


def layer_inputs(
    module_info: Any, device: Any, dtype: torch.dtype, requires_grad: bool, **rest: Any
) -> list[Any]:
    make = partial(make_tensor, device=device, dtype=dtype, requires_grad=requires_grad)

    def packed(*lengths: int) -> PackedSequence:
        order = pack_sequence([torch.empty(n, 3) for n in lengths], enforce_sorted=False)
        return PackedSequence(make(sum(lengths), 3), *order[1:])

    sizes = {"input_size": 3, "hidden_size": 4}
    deep = {**sizes, "num_layers": 2, "bidirectional": True}
    given = theirs(nn.LSTM).module_inputs_func(module_info, device, dtype, requires_grad, **rest)
    return [
        *(s for s in given if not s.constructor_input.kwargs.get("proj_size")),
        sample("batch", sizes, make(5, 2, 3)),
        sample("batch, state", sizes, make(5, 2, 3), (make(1, 2, 4), make(1, 2, 4))),
        sample("batch first", {**sizes, "batch_first": True}, make(2, 5, 3)),
        sample(
            "batch first, layers and directions, state, no bias",
            {**deep, "batch_first": True, "bias": False},
            make(2, 3, 3),
            hx=(make(4, 2, 4), make(4, 2, 4)),
        ),
        sample("no batch, one layer", sizes, make(5, 3)),
        sample("packed", sizes, packed(4, 2, 2)),
        sample(
            "packed out of order, layers and directions, state",
            deep,
            packed(1, 3, 2),
            (make(4, 3, 4), make(4, 3, 4)),
        ),
    ]


def refused(text: str, options: dict[str, Any], *args: Any) -> Any:
    return ErrorModuleInput(
        ModuleInput(FunctionInput(**options), FunctionInput(*args)),
        error_on=ModuleErrorEnum.FORWARD_ERROR,
        error_type=lltm.ArgumentError,
        error_regex=f"^lltm::LLTM(Cell)?: expected {text}",
    )


def refused_by_theirs(module_cls: type, **arguments: Any) -> Iterator[Any]:
    """The errors of nn.LSTM or nn.LSTMCell, which are errors of ours, with a text of our own."""
    for error in theirs(module_cls).module_error_inputs_func(**arguments):
        options = error.module_error_input.constructor_input.kwargs
        # Ours take 0 and 1 for bools, as older releases of PyTorch do.
        if not any(type(options.get(flag)) is int for flag in ("bias", "batch_first")):
            yield ErrorModuleInput(
                error.module_error_input,
                error_on=error.error_on,
                error_type=(ValueError, TypeError),
                error_regex="^lltm::LLTM(Cell)?: expected ",
            )


def cell_errors(module_info: Any, device: Any, dtype: torch.dtype, **rest: Any) -> list[Any]:
    make = partial(make_tensor, device=device, dtype=dtype)
    sizes = {"input_size": 3, "hidden_size": 4, "dtype": dtype}
    return [
        *refused_by_theirs(
            nn.LSTMCell, module_info=module_info, device=device, dtype=dtype, **rest
        ),
        refused(r"h of shape \(2, 4\), got \(2, 5\)", sizes, make(2, 3), (make(2, 5), make(2, 4))),
        refused(r"c of shape \(4,\), got \(1, 4\)", sizes, make(3), (make(4), make(1, 4))),
    ]


def layer_errors(module_info: Any, device: Any, dtype: torch.dtype, **rest: Any) -> list[Any]:
    make = partial(make_tensor, device=device, dtype=dtype)
    sizes = {"input_size": 3, "hidden_size": 4, "dtype": dtype}
    return [
        *refused_by_theirs(nn.LSTM, module_info=module_info, device=device, dtype=dtype, **rest),
        refused(r"input of shape \(T, B, 3\) or \(T, 3\), got \(3,\)", sizes, make(3)),
        refused(
            r"h_0 of shape \(1, 2, 4\), got \(2, 4\)",
            sizes,
            make(5, 2, 3),
            (make(2, 4), make(2, 4)),
        ),
        refused(
            r"c_0 of shape \(1, 4\), got \(1, 1, 4\)",
            sizes,
            make(5, 3),
            (make(1, 4), make(1, 1, 4)),
        ),
    ]


INFOS = [
    ModuleInfo(cls, module_inputs_func=inputs, module_error_inputs_func=errors)
    for cls, inputs, errors in (
        (lltm.LLTMCell, cell_inputs, cell_errors),
        (lltm.LLTM, layer_inputs, layer_errors),
        (lltm.reference.LLTMCell, cell_inputs, cell_errors),
        (lltm.reference.LLTM, layer_inputs, layer_errors),
    )
]

OURS = INFOS[:2]

# ----- what is tested --------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    module: Any
    options: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Gives what the module should.
    expected: Callable[[], Any]

    def run(self, module: Any = None, change: Callable[[Tensor], Any] | None = None) -> Any:
        """The results for these arguments, or for what `change` makes of them."""
        args, kwargs = self.args, self.kwargs
        if change is not None:
            args = changed(args, change)
            kwargs = {name: changed(value, change) for name, value in kwargs.items()}
        return (self.module if module is None else module)(*args, **kwargs)

    def leaves(self) -> list[Tensor]:
        """The arguments' tensors."""
        return tensors((self.args, tuple(self.kwargs.values())))


@dataclass(frozen=True)
class Case:
    info: Any
    dtype: torch.dtype
    training: bool = True
    prepacked: bool = False

    def __str__(self) -> str:
        cls = self.info.module_cls
        name = f"{cls.__module__.removesuffix('.modules')}.{cls.__name__}"
        mode = "" if self.training else "-eval"
        prepacked = "-prepacked" if self.prepacked else ""
        return f"{name}{prepacked}-{str(self.dtype).removeprefix('torch.')}{mode}"

    def layer(self, options: dict[str, Any]) -> Any:
        return self.info.module_cls(**options).to(self.dtype).train(self.training)

    def module(self, layer: Any) -> Any:
        return layer.prepack() if self.prepacked else layer

    def samples(self, requires_grad: bool = False) -> Iterator[Sample]:
        inputs = self.info.module_inputs_func(
            self.info, "cpu", self.dtype, requires_grad, training=self.training
        )
        names = ("input_size", "hidden_size")
        for given in inputs:
            constructor, forward = given.constructor_input, given.forward_input
            options = {**dict(zip(names, constructor.args, strict=False)), **constructor.kwargs}
            # Captured: of a test that fails, pytest shows the last one.
            shapes = [tuple(tensor.shape) for tensor in tensors(forward.args)]
            print(self, given.desc or "as PyTorch's", options, *shapes)
            layer = self.layer(options)
            expected = partial(given.reference_fn, layer, *forward.args, **forward.kwargs)
            yield Sample(self.module(layer), options, forward.args, forward.kwargs, expected)


DTYPES = (torch.float32, torch.float64)
TRAINABLE = [Case(info, dtype) for info in INFOS for dtype in DTYPES]
# In evaluation mode and prepacked, a layer does the same.
ALL = [
    *TRAINABLE,
    *(
        Case(info, dtype, training=False, prepacked=prepacked)
        for info in INFOS
        if info.module_cls is lltm.LLTM
        for dtype in DTYPES
        for prepacked in (False, True)
    ),
]
all_modules = pytest.mark.parametrize("case", ALL, ids=str)
trainable_modules = pytest.mark.parametrize("case", TRAINABLE, ids=str)
OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def same(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


def check_parameters(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    named = list(module.named_parameters())
    assert named
    for name, parameter in named:
        found = (parameter.device, parameter.dtype, parameter.requires_grad)
        assert found == (torch.device(device), dtype, True), name


# ----- values ----------------------------------------------------------------


@all_modules
def test_forward_agrees_with_the_reference(case: Case) -> None:
    for s in case.samples():
        before = copy.deepcopy((s.args, s.kwargs))
        versions = [tensor._version for tensor in s.leaves()]
        assert_close(s.run(), s.expected())
        assert [tensor._version for tensor in s.leaves()] == versions
        same((s.args, s.kwargs), before)


@trainable_modules
def test_arguments_and_parameters_may_be_strided(case: Case) -> None:
    def every_second(tensor: Tensor) -> Tensor:
        wide = tensor.detach().repeat_interleave(2, dim=-1)
        return wide[..., ::2].requires_grad_(tensor.requires_grad)

    def by_columns(tensor: Tensor) -> Tensor:
        columns = tensor.detach().movedim(-1, 0).contiguous().movedim(0, -1)
        return columns.requires_grad_(tensor.requires_grad)

    def results(s: Sample, change: Any, change_grads: Any) -> tuple[list[Tensor], list[Tensor]]:
        leaves: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            leaves.append(change(tensor))
            return leaves[-1]

        parameters = {name: change(p) for name, p in s.module.named_parameters()}
        call = partial(torch.func.functional_call, s.module, parameters)
        outputs = tensors(s.run(lambda *a, **k: call(a, k), noted))
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs]
        wanted = [*leaves, *parameters.values()]
        return outputs, list(torch.autograd.grad(outputs, wanted, [change_grads(g) for g in grads]))

    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    for s in case.samples(requires_grad=True):
        expected = results(s, plain, plain)
        for change in (plain, every_second, by_columns):
            for change_grads in (plain, every_second, by_columns):
                assert_close(results(s, change, change_grads), expected)


@pytest.mark.parametrize("case", [Case(info, dtype) for info in OURS for dtype in DTYPES], ids=str)
def test_outputs_and_gradients_lie_in_memory_as_those_of_torch_nn(case: Case) -> None:
    their_class = nn.LSTM if issubclass(case.info.module_cls, lltm.LLTM) else nn.LSTMCell
    for s in case.samples(requires_grad=True):
        strides = []
        for module in (s.module, their_class(**s.options).to(case.dtype)):
            outputs = tensors(s.run(module))
            grads = torch.autograd.grad([y.sum() for y in outputs], s.leaves(), retain_graph=True)
            strides.append([tensor.stride() for tensor in (*outputs, *grads)])
            parameters = list(module.parameters())
            for gradient in torch.autograd.grad([y.sum() for y in outputs], parameters):
                assert gradient.is_contiguous()
        assert strides[0] == strides[1]


# ----- derivatives -----------------------------------------------------------


def check_derivatives(case: Case, check: Callable[..., bool]) -> None:
    for s in case.samples(requires_grad=True):
        names, parameters = zip(*s.module.named_parameters(), strict=True)
        arguments = s.leaves()

        def function(*flat: Tensor, s: Sample = s, names: tuple[str, ...] = names) -> Any:
            given = iter(flat[: -len(names)])
            parameters = dict(zip(names, flat[-len(names) :], strict=True))
            call = partial(torch.func.functional_call, s.module, parameters)
            return tuple(tensors(s.run(lambda *a, **k: call(a, k), lambda _: next(given))))

        assert check(function, (*arguments, *parameters))
        # One parameter alone, the others and the arguments constant: the first, and the last.
        for alone in (parameters[0], parameters[-1]):
            given = (t if t is alone else t.detach() for t in (*arguments, *parameters))
            assert check(function, tuple(given))


of_ours_in_float64 = pytest.mark.parametrize(
    "case", [Case(info, torch.float64) for info in OURS], ids=str
)


@of_ours_in_float64
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    check_derivatives(case, gradcheck)


@of_ours_in_float64
def test_second_derivatives_are_those_of_finite_differences(case: Case) -> None:
    check_derivatives(case, gradgradcheck)


@trainable_modules
def test_frozen_parameters_get_no_gradient_and_change_no_other(case: Case) -> None:
    for s in case.samples(requires_grad=True):
        parameters = dict(s.module.named_parameters())

        def gradients(s: Sample = s) -> dict[str, Tensor | None]:
            s.module.zero_grad()
            # Arguments that are no leaves.
            total = sum(y.square().sum() for y in tensors(s.run(change=lambda tensor: 1 * tensor)))
            assert isinstance(total, Tensor)
            total.backward()
            return {name: p.grad for name, p in s.module.named_parameters()}

        everything = gradients()
        for frozen, parameter in parameters.items():
            parameter.requires_grad_(False)
            expected = {**everything, frozen: None}
            assert_close(gradients(), expected, equal_nan=False)
            parameter.requires_grad_(True)
        s.module.requires_grad_(False)
        with torch.no_grad():
            assert not any(y.requires_grad for y in tensors(s.run()))
        for y in tensors(s.run(change=torch.Tensor.detach)):
            assert y.grad_fn is None


# ----- devices and dtypes ----------------------------------------------------


@trainable_modules
def test_the_constructor_s_device_and_dtype_hold_for_every_parameter(case: Case) -> None:
    for s in case.samples():
        for device in ("cpu", "meta"):
            for dtype in OTHER_DTYPES:
                options = {**s.options, "device": device, "dtype": dtype}
                check_parameters(case.info.module_cls(**options), device, dtype)


@trainable_modules
def test_made_under_a_default_device_or_dtype_it_takes_that(case: Case) -> None:
    for s in case.samples():
        on_cpu = case.info.module_cls(**s.options)
        with torch.device("meta"):
            on_meta = case.info.module_cls(**s.options)
        check_parameters(on_meta, "meta", torch.float32)
        for here, there in zip(on_cpu.parameters(), on_meta.parameters(), strict=True):
            assert (here.shape, here.stride()) == (there.shape, there.stride())
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            check_parameters(case.info.module_cls(**s.options), "cpu", torch.float64)
        finally:
            torch.set_default_dtype(previous)


@trainable_modules
def test_on_meta_the_results_have_the_shapes_of_real_ones(case: Case) -> None:
    for s in case.samples():
        module = copy.deepcopy(s.module).to("meta")
        for found, real in zip(
            tensors(s.run(module, lambda tensor: tensor.to("meta"))), tensors(s.run()), strict=True
        ):
            assert found.is_meta
            assert (found.shape, found.stride(), found.dtype) == (
                real.shape,
                real.stride(),
                real.dtype,
            )


@pytest.fixture(params=["set", "swap"])
def conversion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Conversions of a module set its parameters' data, or swap the parameters for new ones."""
    torch.__future__.set_swap_module_params_on_conversion(request.param == "swap")
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def run_without_graph(s: Sample, change: Callable[[Tensor], Any] | None = None) -> Any:
    with torch.no_grad():  # parameters that a graph holds can't be swapped
        return s.run(change=change)


@pytest.mark.usefixtures("conversion")
@trainable_modules
def test_it_computes_in_the_dtype_that_it_is_converted_to(case: Case) -> None:
    for s in case.samples():
        weights, expected = copy.deepcopy(s.module.state_dict()), run_without_graph(s)
        for dtype in (*OTHER_DTYPES, case.dtype):
            s.module.to(dtype)
            check_parameters(s.module, "cpu", dtype)
            results = tensors(run_without_graph(s, partial(torch.Tensor.to, dtype=dtype)))
            assert {y.dtype for y in results} == {dtype}
            another = torch.float32 if dtype == torch.float64 else torch.float64
            with pytest.raises(TypeError, match=r"^lltm::LLTM(Cell)?: expected input of dtype"):
                s.run(change=partial(torch.Tensor.to, dtype=another))
        s.module.load_state_dict(weights)
        same(s.run(), expected)


@pytest.mark.usefixtures("conversion")
@all_modules
def test_it_moves_to_another_device_and_back(case: Case) -> None:
    for s in case.samples():
        weights, expected = copy.deepcopy(s.module.state_dict()), run_without_graph(s)
        if case.prepacked:  # stays where it was packed
            with pytest.raises(RuntimeError, match="expected to stay on device cpu, got meta"):
                s.module.to("meta")
        else:
            s.module.to("meta")
            check_parameters(s.module, "meta", case.dtype)
            with pytest.raises(RuntimeError, match="expected input on device meta, that of the"):
                s.run()
        s.module.to_empty(device="cpu")
        s.module.load_state_dict(weights)
        same(s.run(), expected)


# ----- copies ----------------------------------------------------------------


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@all_modules
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_gives_the_same_and_shares_nothing(
    case: Case, copied: Callable[[nn.Module], nn.Module]
) -> None:
    for s in case.samples():
        module, expected = copied(s.module), s.run()
        assert type(module) is type(s.module)
        assert (repr(module), module.training) == (repr(s.module), s.module.training)
        for tensor in s.module.state_dict().values():
            tensor.zero_()
        same(s.run(module), expected)


@all_modules
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_a_state_dict_makes_another_module_the_same(case: Case, assign: bool) -> None:
    for s in case.samples():
        other = case.module(case.layer(s.options))
        expected = s.run()
        assert not torch.equal(flat(s.run(other))[0], flat(expected)[0])
        assert not any(other.load_state_dict(copy.deepcopy(s.module.state_dict()), assign=assign))
        same(s.run(other), expected)


@all_modules
def test_functional_call_takes_other_parameters_and_leaves_its_own(case: Case) -> None:
    for s in case.samples():
        other, before = case.module(case.layer(s.options)), s.run()
        call = partial(torch.func.functional_call, s.module, dict(other.state_dict()))
        same(s.run(lambda *a, call=call, **k: call(a, k)), s.run(other))
        same(s.run(), before)


@all_modules
def test_its_text_says_how_to_make_it(case: Case) -> None:
    for s in case.samples():
        text = repr(s.module)
        assert text == str(s.module)
        if not case.prepacked:
            again = eval(text, {case.info.module_cls.__name__: case.info.module_cls})
            assert repr(again) == text
            shapes = {name: p.shape for name, p in s.module.named_parameters()}
            assert {name: p.shape for name, p in again.named_parameters()} == shapes


# ----- modes and errors ------------------------------------------------------


@trainable_modules
def test_without_dropout_it_does_not_ask_whether_it_trains(case: Case) -> None:
    for s in case.samples():
        expected = s.run()
        del s.module.training
        same(s.run(), expected)


@trainable_modules
def test_errors_are_of_the_types_and_texts_promised(case: Case) -> None:
    errors = case.info.module_error_inputs_func(
        module_info=case.info,
        device="cpu",
        dtype=case.dtype,
        requires_grad=False,
        training=case.training,
    )
    assert len(errors) > 3
    for error in errors:
        given = error.module_error_input
        construct = partial(
            case.info.module_cls, *given.constructor_input.args, **given.constructor_input.kwargs
        )
        on_construction = error.error_on == ModuleErrorEnum.CONSTRUCTION_ERROR
        if on_construction:
            run: Callable[[], Any] = construct
        else:
            forward = given.forward_input
            run = partial(construct().to(case.dtype), *forward.args, **forward.kwargs)
        with pytest.raises(error.error_type, match=error.error_regex):
            run()
