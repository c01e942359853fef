"""torch.func on cells, sequences and layers: vmap, per-sample gradients, ensembles, Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import support
import torch
from forms import LAYERS, STEPS, Modules, Sample, Sizes
from support import Arguments
from test_custom_cell import several_stages, two_states
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp

import lltm

I, H = 2, 3  # noqa: E741
Parameters = Mapping[str, Tensor]


@dataclass
class Case:
    """`inputs[k]` is one sample, results are flat tuples."""

    sample: Sample
    inputs: Tensor

    @property
    def parameters(self) -> Parameters:
        return {name: self.sample.values[name] for name in self.sample.parameters()}

    @property
    def calls(self) -> int:
        """Operator calls per sample."""
        options = self.sample.options
        layers: int = options.get("num_layers", 1)
        return layers * (2 if options.get("bidirectional") else 1)

    def run(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.sample.run({**self.sample.values, **parameters, "input": x}))

    def loss(self, parameters: Parameters, x: Tensor) -> Tensor:
        return sum((y.square().sum() for y in self.run(parameters, x)), x.new_zeros(()))


def cases() -> dict[str, Case]:
    found = {}
    some = ["batch", "no batch", "no batch, one layer"]
    some += ["batch first, layers and directions, state, no bias"]
    some += ["packed out of order, layers and directions"]
    for make, uses in ((lltm.LLTMCell, STEPS), (lltm.LLTM, LAYERS)):
        for sample in Modules(uses, make, make)(torch.float64, Sizes(4, 4, I, H)):
            if sample.name in some:
                found[f"{make.__name__}, {sample.name}"] = sample
    for cell in (two_states, several_stages):
        modules = Modules((LAYERS[0],), cell.Layer, cell.Layer)
        (found[cell.name],) = modules(torch.float64, Sizes(4, 2, I, H))
    return {
        name: Case(sample, torch.randn(3, *sample.values["input"].shape, dtype=torch.float64))
        for name, sample in found.items()
    }


CASES = cases()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def stacked(results: list[Any]) -> Any:
    """Results are stacked like vmap's."""
    return torch.utils._pytree.tree_map(lambda *ys: torch.stack(ys), *results)


def test_vmap_over_inputs_is_one_call_of_the_kernels(case: Case) -> None:
    parameters = case.parameters
    expected = stacked([case.run(parameters, x) for x in case.inputs])
    for dim in range(case.inputs.dim()):
        inputs = case.inputs.movedim(0, dim)
        with support.Operators() as operators, torch.no_grad():
            mapped = torch.vmap(case.run, in_dims=(None, dim))(parameters, inputs)
        torch.testing.assert_close(mapped, expected)
        assert len(operators.ours()) == case.calls
        assert set(operators.ours()) <= {"step", "sequence"}


def test_backward_through_vmap_is_one_call_of_the_kernels(case: Case) -> None:
    given = {name: p.clone().requires_grad_() for name, p in case.parameters.items()}
    parameters = list(given.values())
    expected_x = case.inputs.clone().requires_grad_()
    expected = sum((case.loss(given, x) for x in expected_x), torch.zeros(()))
    expected_grads = torch.autograd.grad(expected, [expected_x, *parameters])

    leaf = case.inputs.clone().requires_grad_()
    with support.Operators() as operators:
        loss = torch.vmap(case.loss, in_dims=(None, 0))(given, leaf).sum()
        grads = torch.autograd.grad(loss, [leaf, *parameters])
    torch.testing.assert_close(grads, expected_grads)
    ours = operators.ours()
    assert len(ours) == 2 * case.calls
    assert all(name.endswith("_forward") for name in ours[: case.calls])
    assert all(name.endswith("_backward") for name in ours[case.calls :])


def test_vmap_in_vmap(case: Case) -> None:
    parameters = case.parameters
    both = torch.stack([case.inputs, -case.inputs], dim=1)  # (3, 2, ...)
    over_one = torch.vmap(case.run, in_dims=(None, 0))
    with support.Operators() as operators:
        mapped = torch.vmap(over_one, in_dims=(None, 1))(parameters, both)
    expected = stacked([over_one(parameters, both[:, k]) for k in range(2)])
    torch.testing.assert_close(mapped, expected)
    assert len(operators.ours()) == case.calls


@pytest.mark.parametrize(
    "mapped",
    [
        *(("input",), ("h",), ("c",), ("h", "c"), ("input", "c"), ("bias",), ("weights",)),
        *(("reset",), ("recurrent_mask",), ("input", "reset")),
    ],
)
@pytest.mark.parametrize("checkpoint_steps", [0, 4])
@pytest.mark.parametrize("kind", ["sequence", "packed"])
def test_vmap_over_some_of_the_arguments(
    kind: str, checkpoint_steps: int, mapped: tuple[str, ...]
) -> None:
    if kind == "sequence":
        a = support.sequence_arguments((6, 4, 3, 5), torch.float64)
    else:
        a = support.packed_arguments((5, 2, 1), 3, 5, torch.float64, reverse=True)
    a = support.with_masks(a)
    samples = {name: torch.randn(3, *getattr(a, name).shape).double() for name in mapped}
    names = {*mapped}.intersection(support.NAMES) if checkpoint_steps else ()
    leaves = [samples[name].requires_grad_() for name in names]
    if "reset" in mapped:
        samples["reset"] = samples["reset"] > 0.5

    def run(one: dict[str, Any]) -> tuple[Tensor, ...]:
        return support.checkpointed_outputs(checkpoint_steps, lltm.functional, replace(a, **one))

    with support.Operators() as operators:
        results = torch.vmap(run)(samples)
    expected = stacked([run({name: y[k] for name, y in samples.items()}) for k in range(3)])
    torch.testing.assert_close(results, expected)
    assert len(operators.ours()) == 1 or mapped in (("bias",), ("weights",))
    if leaves:
        assert set(operators.ours()) == {"sequence_forward"}
        gradients = [
            torch.autograd.grad([y.square().sum() for y in ys], leaves)
            for ys in (results, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_vmap_of_a_prepacked_layer_is_one_call() -> None:
    packed, inputs = lltm.LLTM(I, H).prepack(), torch.randn(3, 5, 4, I)
    with support.Operators() as operators:
        mapped = torch.vmap(packed)(inputs)
    torch.testing.assert_close(mapped, stacked([packed(x) for x in inputs]))
    assert operators.ours() == ["sequence"]


@pytest.mark.parametrize("shape", [(0, 5, 4, I), (3, 0, 4, I), (3, 5, 0, I)], ids=str)
def test_vmap_over_no_samples_returns_empty_results(shape: tuple[int, ...]) -> None:
    output, (h_n, _) = torch.vmap(lltm.LLTM(I, H))(torch.randn(shape))
    assert output.shape == (*shape[:-1], H)
    assert h_n.shape == (shape[0], 1, shape[2], H)


@pytest.mark.xdist_group("compilers")
def test_vmap_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    layer, inputs = lltm.LLTM(I, H), torch.randn(3, 5, 4, I)
    function = torch.vmap(lambda x: layer(x)[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(inputs), function(inputs))


@pytest.mark.parametrize("shared_input", [True, False], ids=["one input", "an input each"])
def test_an_ensemble_equals_its_models(case: Case, shared_input: bool) -> None:
    models = [case.sample.fresh() for _ in range(3)]
    parameters, _ = stack_module_state(models)
    inputs = case.inputs[0] if shared_input else case.inputs

    def loss(parameters: Parameters) -> Tensor:
        in_dims = (0, None if shared_input else 0)
        return torch.vmap(case.loss, in_dims=in_dims)(parameters, inputs)

    losses = loss(parameters)
    one_by_one = [
        case.loss(dict(model.named_parameters()), case.inputs[0 if shared_input else k])
        for k, model in enumerate(models)
    ]
    torch.testing.assert_close(losses, torch.stack(one_by_one))
    grads = torch.autograd.grad(losses.sum(), list(parameters.values()))
    expected = [
        torch.autograd.grad(y, list(m.parameters()))
        for y, m in zip(one_by_one, models, strict=True)
    ]
    torch.testing.assert_close(grads, stacked(expected))
    plain = {name: p.detach() for name, p in parameters.items()}
    transformed = grad(lambda parameters: loss(parameters).sum())(plain)
    torch.testing.assert_close(tuple(transformed.values()), grads)


def test_per_sample_gradients_equal_those_of_a_loop(case: Case) -> None:
    parameters = case.parameters
    mapped = torch.vmap(grad(case.loss), in_dims=(None, 0))(parameters, case.inputs)
    looped = [grad(case.loss)(parameters, x) for x in case.inputs]
    torch.testing.assert_close(mapped, stacked(looped))


@pytest.mark.parametrize("kind", ["LLTMCell, batch", "LLTM, no batch, one layer", "several_stages"])
def test_hessians_are_equal_in_every_mode(kind: str) -> None:
    """test_properties.py compares reverse over reverse with finite differences."""
    case = CASES[kind]
    loss, x = partial(case.loss, case.parameters), case.inputs[0]
    expected = jacrev(jacrev(loss))(x)
    assert expected.any()
    torch.testing.assert_close(hessian(loss)(x), expected)
    torch.testing.assert_close(jacrev(jacfwd(loss))(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_16_bits_a_transform_is_as_accurate_as_the_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, inputs, hidden = 16, 32, 64
    x = torch.randn(5, batch, inputs)
    h, c = torch.randn(2, batch, hidden)
    weights = torch.randn(3 * hidden, hidden + inputs) / (hidden + inputs) ** 0.5
    arguments = [y.to(dtype) for y in (x, h, c, weights, torch.randn(3 * hidden))]

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        return support.sequence_outputs(lltm.functional, Arguments(*tensors))  # type: ignore[arg-type]

    exact = op(*(y.double() for y in arguments))
    of_kernels = op(*arguments)
    of_transform = jvp(op, tuple(arguments), tuple(torch.zeros_like(y) for y in arguments))[0]
    for y64, ours, theirs in zip(exact, of_transform, of_kernels, strict=True):
        assert ours.dtype == dtype
        assert (ours - y64).abs().max() <= 1.2 * (theirs - y64).abs().max()


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_sequence_of_no_steps_depends_on_every_argument(kind: str) -> None:
    """By the ATen fallback of transforms. The final states are the initial states."""
    a = support.sequence_arguments((0, 4, 3, 5), torch.float64)
    if kind == "packed":
        none = torch.zeros(0, dtype=torch.int64)
        a = replace(a, input=a.input.flatten(0, 1), batch_sizes=none)
    weights = a.weights.clone().requires_grad_()

    def of_h(h: Tensor) -> tuple[Tensor, ...]:
        given = a.with_argument("h", h).with_argument("weights", weights)
        return support.sequence_outputs(lltm.functional, given)

    _, tangents, *_ = jvp(of_h, (a.h,), (a.h,))
    torch.testing.assert_close(tangents[1:], (a.h, torch.zeros_like(a.c)))
    results, pull_back, *_ = vjp(of_h, a.h)
    assert len({t.untyped_storage().data_ptr() for t in (a.h, a.c, *results[1:])}) == 4
    for y in results:
        assert y.requires_grad
        (gradient,) = torch.autograd.grad(y.sum(), weights, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(weights))
    (gradient,) = pull_back(tuple(torch.ones_like(y) for y in results))
    assert torch.equal(gradient, torch.ones_like(a.h))


def test_batch_sizes_per_sample_are_rejected() -> None:
    a = support.packed_arguments((3, 2, 1))
    assert a.batch_sizes is not None

    def run(rows: Tensor, sizes: Tensor) -> Tensor:
        output, _ = lltm.functional.sequence(
            "lltm", rows, (a.h, a.c), a.weights, bias_ih=a.bias, batch_sizes=sizes
        )
        return output.sum()

    sizes = a.batch_sizes.expand(2, -1)
    expected = r"expected the same batch_sizes for all samples of vmap, got batch_sizes per sample"
    with pytest.raises(RuntimeError, match=expected):
        torch.vmap(lambda s: run(a.input, s))(sizes)
    with pytest.raises(RuntimeError, match=expected):
        torch.vmap(lambda s: grad(lambda x: run(x, s))(a.input))(sizes)


def test_prepacked_weights_per_sample_are_rejected() -> None:
    a = support.sequence_arguments((5, 4, 3, 5))
    with pytest.raises(RuntimeError, match=r"lltm::prepack: expected the same weights for all s"):
        torch.vmap(partial(lltm.functional.prepack, "lltm"))(a.weights.expand(2, -1, -1))
    packed = lltm.functional.prepack("lltm", a.weights, dtype=torch.qint8)
    with pytest.raises(RuntimeError, match=r"lltm::sequence: expected the same prepacked weights"):
        torch.vmap(
            lambda weights: lltm.functional.sequence(
                "lltm", a.input, (a.h, a.c), weights, bias_ih=a.bias
            )
        )(packed.expand(2, *packed.shape))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_prepacked_layers_have_no_derivatives(bidirectional: bool) -> None:
    text = "lltm::sequence: expected unpacked weight_ih to compute derivatives, got prepacked weig"
    packed = lltm.LLTM(I, H, bidirectional=bidirectional).prepack(torch.qint8)
    x = torch.randn(5, 4, I)
    output, _ = packed(x.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=text):
        output.sum().backward()
    with pytest.raises(NotImplementedError, match=text):
        grad(lambda x: packed(x)[0].sum())(x)
    with pytest.raises(NotImplementedError, match=text):
        jvp(lambda x: packed(x)[0], (x,), (x,))
    with pytest.raises(NotImplementedError, match=text):
        torch.vmap(grad(lambda x: packed(x)[0].sum()))(torch.stack([x, x]))


def test_other_operations_are_differentiated_next_to_a_prepacked_layer() -> None:
    packed = lltm.LLTM(I, H).prepack()
    x = torch.randn(5, 4, I)
    scale = torch.randn(H)
    expected, _ = packed(x)
    gradient = grad(lambda scale: (packed(x)[0] * scale).sum())(scale)
    torch.testing.assert_close(gradient, expected.sum((0, 1)))
    _, tangent, *_ = jvp(lambda scale: packed(x)[0] * scale, (scale,), (scale,))
    torch.testing.assert_close(tangent, expected * scale)


def test_the_operators_that_autograd_calls_have_no_derivatives() -> None:
    a = support.sequence_arguments((5, 4, 3, 5)).leaves()
    output, *_ = torch.ops.lltm.sequence_forward(*a.operands(), None, False, None, 0, None)
    with pytest.raises(RuntimeError, match="lltm::sequence_forward is not implemented"):
        output.sum().backward()


def test_dropout_under_vmap_requires_a_choice_of_randomness() -> None:
    layer = lltm.LLTM(I, H, num_layers=2, dropout=0.5)
    x = torch.randn(5, 4, I).expand(3, 5, 4, I)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(layer)(x)
    output, _ = torch.vmap(layer, randomness="different")(x)
    assert not torch.equal(output[0], output[1])
