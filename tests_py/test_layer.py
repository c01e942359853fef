"""lltm.LLTM: layers, directions, batches and packing, beside torch.nn.LSTM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import support
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import lltm

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 3},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "batch_first": True, "bidirectional": True},
]


def by_hand(layer: lltm.LLTM, x: Tensor, h_0: Tensor, c_0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence x (T, I), a cell at a time; h_0, c_0 (L*D, H)."""
    names = [name for name, _ in layer.named_parameters() if name.startswith("weights")]
    per_layer = 2 if layer.bidirectional else 1
    last_h, last_c = [], []
    for first in range(0, len(names), per_layer):
        directions = []
        for k in range(first, first + per_layer):
            weights = getattr(layer, names[k])
            bias = getattr(layer, names[k].replace("weights", "bias"))
            h, c = h_0[k : k + 1], c_0[k : k + 1]
            outputs = {}
            is_reverse = names[k].endswith("_reverse")
            for t in reversed(range(len(x))) if is_reverse else range(len(x)):
                h, c = lltm.reference.cell(x[t : t + 1], (h, c), weights, bias)
                outputs[t] = h
            directions.append(torch.cat([outputs[t] for t in range(len(x))]))
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(directions, dim=1)
    return x, torch.cat(last_h), torch.cat(last_c)


def make(options: dict[str, Any]) -> lltm.LLTM:
    return lltm.LLTM(3, 5, dtype=torch.float64, **options)


def states(layer: lltm.LLTM, *batch: int) -> tuple[Tensor, Tensor]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (count, *batch, layer.hidden_size)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_row_is_what_cells_give_by_hand(options: dict[str, Any]) -> None:
    layer = make(options)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    h_0, c_0 = states(layer, 4)
    output, (h_n, c_n) = layer(x.transpose(0, 1) if layer.batch_first else x, (h_0, c_0))
    for row in range(4):
        expected, h, c = by_hand(layer, x[:, row], h_0[:, row], c_0[:, row])
        ours = output[row] if layer.batch_first else output[:, row]
        torch.testing.assert_close((ours, h_n[:, row], c_n[:, row]), (expected, h, c))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_sequence_without_a_batch_is_what_cells_give_by_hand(options: dict[str, Any]) -> None:
    layer = make(options)
    x = torch.randn(6, 3, dtype=torch.float64)
    h_0, c_0 = states(layer)
    output, (h_n, c_n) = layer(x, (h_0, c_0))
    torch.testing.assert_close((output, h_n, c_n), by_hand(layer, x, h_0, c_0))


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_packed_row_is_what_cells_give_by_hand(options: dict[str, Any], order: str) -> None:
    layer = make(options)
    lengths = [5, 3, 3, 1] if order == "sorted" else [3, 1, 5, 3]
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    h_0, c_0 = states(layer, 4)
    packed, (h_n, c_n) = layer(pack_sequence(rows, enforce_sorted=order == "sorted"), (h_0, c_0))
    output, output_lengths = pad_packed_sequence(packed)
    assert output_lengths.tolist() == lengths
    for row, x in enumerate(rows):
        expected, h, c = by_hand(layer, x, h_0[:, row], c_0[:, row])
        torch.testing.assert_close(
            (output[: len(x), row], h_n[:, row], c_n[:, row]), (expected, h, c)
        )


@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("kind", ["batched", "unbatched", "packed", "packed unsorted"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shapes_and_types_are_those_of_nn_lstm(
    options: dict[str, Any], kind: str, with_state: bool
) -> None:
    ours, lstm = make(options), nn.LSTM(3, 5, dtype=torch.float64, **options)
    x: Tensor | PackedSequence
    if kind == "unbatched":
        x, state = torch.randn(6, 3, dtype=torch.float64), states(ours)
    else:
        shape = (4, 6, 3) if ours.batch_first else (6, 4, 3)
        x, state = torch.randn(shape, dtype=torch.float64), states(ours, 4)
        if kind.startswith("packed"):
            lengths = [6, 3, 3, 1] if kind == "packed" else [3, 1, 6, 3]
            x = pack_padded_sequence(
                x, torch.tensor(lengths), ours.batch_first, enforce_sorted=kind == "packed"
            )
    output, (h_n, c_n) = ours(x, state if with_state else None)
    expected, (h, c) = lstm(x, state if with_state else None)
    assert type(output) is type(expected)
    if isinstance(output, PackedSequence):
        for mine, theirs in zip(output[1:], expected[1:], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
        output, expected = output.data, expected.data
    assert output.shape == expected.shape
    assert (h_n.shape, c_n.shape) == (h.shape, c.shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_the_reference(options: dict[str, Any]) -> None:
    ours = make(options)
    plain = lltm.reference.LLTM(3, 5, dtype=torch.float64, **options)
    plain.load_state_dict(ours.state_dict())
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (3, 1, 5, 3)]
    for x in (torch.randn(6, 4, 3, dtype=torch.float64), pack_sequence(rows, False)):
        gradients = []
        for layer in (ours, plain):
            output, (h_n, c_n) = layer(x)
            data = output.data if isinstance(output, PackedSequence) else output
            loss = data.square().sum() + h_n.sum() - c_n.square().sum()
            gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
        torch.testing.assert_close(*gradients)


# ----- dropout ---------------------------------------------------------------


def test_dropout_of_everything_leaves_the_next_layer_its_bias() -> None:
    layer = make({"num_layers": 2, "dropout": 1.0})
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    assert torch.equal(layer(x)[0], layer(torch.randn_like(x))[0])
    # The states of the first layer are not dropped.
    assert not torch.equal(layer(x)[1][0][0], layer(torch.randn_like(x))[1][0][0])


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_dropout_acts_between_layers_when_training(kind: str) -> None:
    layer = make({"num_layers": 2, "dropout": 0.5})
    x: Any = torch.randn(6, 4, 3, dtype=torch.float64)
    if kind == "packed":
        x = pack_padded_sequence(x, torch.tensor([6, 4, 2, 1]))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        output = layer(x)[0]
        runs.append(output.data if kind == "packed" else output)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_dropout_does_nothing_in_evaluation() -> None:
    layer = make({"num_layers": 2, "dropout": 0.5}).eval()
    plain = make({"num_layers": 2})
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))


def test_dropout_with_one_layer_warns() -> None:
    with pytest.warns(UserWarning, match=r"lltm::LLTM: dropout .* num_layers=1"):
        lltm.LLTM(3, 5, dropout=0.5)


# ----- the module ------------------------------------------------------------


def test_parameters_have_the_documented_names_shapes_and_range() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2, bidirectional=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "weights_l0": (15, 8),
        "bias_l0": (15,),
        "weights_l0_reverse": (15, 8),
        "bias_l0_reverse": (15,),
        "weights_l1": (15, 15),
        "bias_l1": (15,),
        "weights_l1_reverse": (15, 15),
        "bias_l1_reverse": (15,),
    }
    values = nn.utils.parameters_to_vector(layer.parameters()).detach()
    assert float(values.abs().max()) <= 5**-0.5
    assert float(values.max()) > 0.9 * 5**-0.5
    assert float(values.min()) < -0.9 * 5**-0.5


def test_reset_parameters_draws_all_anew() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2)
    before = [p.detach().clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert not any(torch.equal(x, y) for x, y in zip(before, layer.parameters(), strict=True))


def test_all_weights_lists_parameters_by_layer_and_direction() -> None:
    layer = lltm.LLTM(3, 5, num_layers=2, bidirectional=True)
    assert [[id(p) for p in ps] for ps in layer.all_weights] == [
        [id(layer.weights_l0), id(layer.bias_l0)],
        [id(layer.weights_l0_reverse), id(layer.bias_l0_reverse)],
        [id(layer.weights_l1), id(layer.bias_l1)],
        [id(layer.weights_l1_reverse), id(layer.bias_l1_reverse)],
    ]
    assert [len(ps) for ps in lltm.LLTM(3, 5, bias=False).all_weights] == [1]


def test_flatten_parameters_changes_nothing() -> None:
    layer = lltm.LLTM(3, 5)
    x = torch.randn(6, 4, 3)
    before = layer(x)
    layer.flatten_parameters()
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


def test_repr_names_what_is_not_the_default() -> None:
    assert repr(lltm.LLTM(3, 5)) == "LLTM(3, 5)"
    assert repr(
        lltm.LLTM(3, 5, 2, bias=False, batch_first=True, dropout=0.5, bidirectional=True)
    ) == ("LLTM(3, 5, num_layers=2, bias=False, batch_first=True, dropout=0.5, bidirectional=True)")


def test_takes_the_arguments_of_nn_lstm_by_position() -> None:
    arguments = (3, 5, 2, False, True, 0.25, True)
    ours, lstm = lltm.LLTM(*arguments), nn.LSTM(*arguments)
    for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first"):
        assert getattr(ours, name) == getattr(lstm, name)
    assert (ours.dropout, ours.bidirectional) == (lstm.dropout, lstm.bidirectional)


def test_learns_the_parity_of_a_sequence() -> None:
    # A task that needs the state: it fails if a step's gradient is lost on the way back.
    layer = lltm.LLTM(1, 8, batch_first=True)
    head = nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.03)
    bits = torch.tensor([[(k >> t) & 1 for t in range(4)] for k in range(16)]).float()
    parity = bits.sum(1) % 2
    for _ in range(400):
        output, _ = layer(bits.unsqueeze(2))
        logits = head(output[:, -1]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, parity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(logits > 0, parity == 1), f"loss {loss.item()}"


def test_cells_by_hand_and_the_oracle_agree() -> None:
    # What this file and the others compare with; they share no code.
    a = support.sequence_arguments((6, 1, 3, 5), torch.float64)
    layer = make({})
    layer.load_state_dict({"weights_l0": a.weights, "bias_l0": a.bias})
    output, _, _ = by_hand(layer, a.input[:, 0], a.h, a.c)
    grads = [torch.zeros(6, 1, 5), torch.zeros(1, 5), torch.zeros(1, 5)]
    exact = support.exact_results_and_gradients(a, grads)["output 0"]
    assert abs(oracle.array(output) - exact).max() < 1e-14


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TestDirectionsSideBySide:
    """With two threads each direction may run on one of its own, in training too."""

    @pytest.fixture(autouse=True)
    def _two_threads(self) -> Iterator[None]:
        with threads(2):
            yield

    @pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
    @pytest.mark.parametrize("make", [lltm.LLTM, lltm.LSTM, lltm.GRU])
    def test_results_are_the_same(self, make: Any, dtype: torch.dtype) -> None:
        # Prepacked, in other blocks of units, sums are rounded in another order.
        tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-2 if dtype.itemsize == 2 else 1e-5}
        for batch in (1, 40):
            layer = make(9, 33, num_layers=2, bidirectional=True).to(dtype)
            for input in inputs(batch, dtype):
                with threads(1):  # one after the other
                    expected = flat(layer(input))
                with torch.no_grad():
                    results = flat(layer(input))
                with torch.inference_mode():
                    inferred = flat(layer(input))
                recorded = flat(layer(input))
                of_packed = flat(layer.prepack()(input))
                every = zip(expected, results, inferred, recorded, of_packed, strict=True)
                for y, a, b, c, d in every:
                    assert torch.equal(a, y)
                    assert torch.equal(b, y)
                    assert torch.equal(c, y)
                    assert b.is_inference()
                    assert (a.requires_grad, c.requires_grad) == (False, True)
                    torch.testing.assert_close(d, y, **tolerance)

    @pytest.mark.parametrize(
        "options",
        [{}, {"checkpoint_steps": 5}, {"bias": False, "recurrent_dropout": 0.3, "dropout": 0.2}],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
    @pytest.mark.parametrize("make", [lltm.LLTM, lltm.LSTM, lltm.GRU])
    def test_gradients_are_the_same(
        self, make: Any, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        for batch in (1, 40):
            layer = make(9, 33, num_layers=2, bidirectional=True, **options).to(dtype)
            for input in inputs(batch, dtype):
                gradients = []
                for count in (1, 2):
                    torch.manual_seed(1)
                    with threads(count):
                        results = flat(layer(input))
                        loss = torch.stack([(y * torch.randn_like(y)).sum() for y in results]).sum()
                        gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
                assert all(map(torch.equal, *gradients))

    def test_gradients_of_one_direction_alone(self) -> None:
        layer = lltm.LSTM(3, 5, bidirectional=True)
        x = torch.randn(4, 2, 3, requires_grad=True)
        state = (torch.randn(2, 2, 5), torch.randn(2, 2, 5, requires_grad=True))
        choices: list[list[Any]] = [
            [x],
            [state[1]],
            [layer.weight_hh_l0_reverse],
            [layer.bias_hh_l0, layer.weight_ih_l0_reverse],
        ]
        for wanted in choices:
            gradients = []
            for count in (1, 2):
                with threads(count):
                    output, (h_n, _) = layer(x, state)
                    loss = output.square().sum() + h_n[1].sum()
                    gradients.append(torch.autograd.grad(loss, wanted))
            assert all(map(torch.equal, *gradients))
        layer.weight_ih_l0.requires_grad_(False)
        layer.bias_hh_l0_reverse.requires_grad_(False)
        layer(x)[0].sum().backward()
        assert [name for name, p in layer.named_parameters() if p.grad is None] == [
            "weight_ih_l0",
            "bias_hh_l0_reverse",
        ]

    @pytest.mark.parametrize("make", [lltm.LLTM, lltm.LSTM, lltm.GRU])
    def test_second_derivatives(self, make: Any) -> None:
        layer = make(2, 3, bidirectional=True).double()
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

        def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            return tuple(flat(layer(x)))

        arguments = (x, *layer.parameters())
        assert torch.autograd.gradcheck(run, arguments, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, arguments, fast_mode=True)

    def test_hooks_of_saved_tensors_and_a_graph_kept_for_two_backwards(self) -> None:
        layer = lltm.GRU(3, 5, bidirectional=True)
        x = torch.randn(4, 2, 3)
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = layer(x)[0].square().sum()
        assert any(tensor is layer.weight_hh_l0_reverse for tensor in packed)
        first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(layer.parameters()))
        assert all(map(torch.equal, first, second))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, list(layer.parameters()))

    def test_batched_gradients(self) -> None:
        layer = lltm.LSTM(3, 5, bidirectional=True).double()
        output, _ = layer(torch.randn(4, 2, 3, dtype=torch.float64))
        parameters = list(layer.parameters())
        many = torch.randn(3, *output.shape, dtype=torch.float64)
        batched = torch.autograd.grad(
            output, parameters, many, retain_graph=True, is_grads_batched=True
        )
        for k, of_one in enumerate(many):
            one = torch.autograd.grad(output, parameters, of_one, retain_graph=True)
            for a, b in zip(batched, one, strict=True):
                torch.testing.assert_close(a[k], b)

    def test_errors_are_the_same(self) -> None:
        layer = lltm.LSTM(3, 5, bidirectional=True)
        layer.weight_hh_l0_reverse = nn.Parameter(torch.zeros(20, 4))
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(
                    lltm.ArgumentError, match=r"expected weight_hh of shape \(20, 5\), got"
                ),
            ):
                layer(torch.randn(4, 2, 3))

    def test_a_profiler_sees_both(self) -> None:
        layer = lltm.LSTM(64, 64, bidirectional=True)
        with torch.profiler.profile() as profile:
            with torch.no_grad():
                layer(torch.randn(5, 3, 64))
            layer(torch.randn(5, 3, 64))[0].sum().backward()
        for operator in ("sequence", "sequence_forward", "sequence_backward"):
            events = [e for e in profile.events() or [] if e.name == f"lltm::{operator}"]
            assert len({e.thread for e in events}) == len(events) == 2, operator


def inputs(batch: int, dtype: torch.dtype) -> list[Tensor | PackedSequence]:
    x = torch.randn(12, batch, 9).to(dtype)
    lengths = torch.arange(batch) % 12 + 1
    return [x, pack_padded_sequence(x, lengths, enforce_sorted=False)]


def flat(results: Any) -> list[torch.Tensor]:
    output, state = results
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    return [output.data if isinstance(output, PackedSequence) else output, *states]
