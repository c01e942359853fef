"""torch.jit.script of layers, cells and models."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from support import saved_and_loaded
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm
from lltm.cells import indrnn, lif, slstm

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 3, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.5, "recurrent_dropout": 0.5},
]
DEEP = {"num_layers": 2, "bidirectional": True}


def script(module: nn.Module) -> Any:
    return torch.jit.script(module)


same = torch.testing.assert_close


@lltm.cell(gates=2, parameters={"p": 0.5, "q": 0.25}, states=3)
def three_states(z: Any, a: Tensor, p: Tensor, b: Tensor, q: Tensor, c: Tensor) -> Any:
    c_next = torch.tanh(q * c + z[0])
    return torch.tanh(a + p * b) * z[1], 0.5 * a + c_next, torch.tanh(z[1] * b), c_next


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = lltm.LLTM(3, 5, num_layers=2, dropout=0.5)
        self.cell = lltm.LLTMCell(5, 5)
        self.head = nn.Linear(5, 2)

    # TorchScript cannot resolve "Tensor" here.
    def forward(self, x):  # type: ignore[no-untyped-def]
        output, (h, c) = self.rnn(x)
        h, c = self.cell(output[-1], (h[0], c[0]))
        return self.head(h)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((lltm.LLTM, options) for options in OPTIONS),
        *((make, OPTIONS[-1]) for make in (lltm.LSTM, lltm.GRU, lltm.RNN)),
        (lltm.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
        *((make, {}) for make in (lltm.LSTMCell, lltm.GRUCell, lltm.RNNCell)),
        *((lltm.LLTMCell, {"bias": bias}) for bias in (True, False)),
        *((cell.Layer, DEEP) for cell in (three_states, indrnn, lif)),
        *((cell.Cell, {"bias": bias}) for cell in (three_states, lif) for bias in (True, False)),
    ],
    ids=str,
)
def test_a_scripted_module_equals_the_module_before_and_after_saving(
    make: Any, options: dict[str, Any]
) -> None:
    module = make(3, 5, **options)
    scripted = script(module)
    is_layer = hasattr(module, "num_layers")
    sizes: list[tuple[int, ...]] = [(4, 6, 3), (6, 3), (0, 4, 3)] if is_layer else [(6, 3), (3,)]
    forms = (scripted, saved_and_loaded(scripted))
    for run, training, size in itertools.product(forms, (True, False), sizes):
        x, reset = torch.randn(size), torch.rand(size[:-1]) < 0.3
        result = module(x)
        last = result[1] if is_layer else result
        state = torch.utils._pytree.tree_map(torch.randn_like, last)
        for arguments in ((x,), (x, state), *[(x, state, reset)] * is_layer):
            results = []
            for form in (run, module):
                torch.manual_seed(1)  # dropout
                results.append(form.train(training)(*arguments))
            same(*results)


class Tagger(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x, lengths):  # type: ignore[no-untyped-def]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        output, state = self.rnn.forward_packed(packed)
        again, _ = self.rnn.forward_packed(packed, state)
        return nn.utils.rnn.pad_packed_sequence(again)[0], output.data, state


@pytest.mark.parametrize("kind", ["LLTM", "LSTM", "GRU", "prepacked GRU", "sLSTM"])
def test_a_scripted_layer_has_a_method_for_packed_sequences(kind: str) -> None:
    make = slstm.Layer if kind == "sLSTM" else getattr(lltm, kind.split()[-1])
    layer = make(3, 5, num_layers=2, bidirectional=True)
    model = Tagger(layer.prepack() if "prepacked" in kind else layer)
    x, lengths = torch.randn(6, 4, 3), torch.tensor([2, 6, 1, 6])
    expected = model(x, lengths)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    same(expected[1], layer(rows)[0].data)
    scripted = script(model)
    for run in (scripted, saved_and_loaded(scripted), model):
        same(run(x, lengths), expected)
    calls: list[nn.Module] = []
    model.rnn.register_forward_hook(lambda module, *_: calls.append(module))
    model(x, lengths)
    assert len(calls) == 2
    with pytest.raises(Exception, match=r"expected batch_sizes"):
        scripted.rnn.forward_packed(PackedSequence(rows.data, rows.batch_sizes.int()))


@pytest.mark.parametrize("weights", [None, torch.qint8], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        lltm.LLTM(3, 5, num_layers=2, bidirectional=True),
        lltm.LSTM(3, 5, bias=False),
        lltm.LSTM(3, 5, proj_size=2),
        slstm.Layer(3, 5, bias=False),
    ],
    ids=str,
)
def test_a_scripted_prepacked_layer_is_saved_as_the_weights(
    layer: Any, weights: torch.dtype | None
) -> None:
    packed = layer.prepack(weights)
    scripted = script(packed)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x = torch.randn(6, 4, 3)
    for module in (scripted, loaded):
        same(dict(module.named_buffers()), dict(packed.named_buffers()), rtol=0, atol=0)
        same(module(x), packed(x))
    assert b"LTMPACK" not in file.getvalue()
    # In the parent, script stores a replacement module, which can be copied.
    parent = nn.Sequential(packed)
    script(parent)
    for other in (
        copy.copy(parent[0]),
        copy.deepcopy(parent[0]),
        pickle.loads(pickle.dumps(parent[0])),
    ):
        same(other(x), packed(x))


@pytest.mark.parametrize("module", [lltm.LLTM(3, 5, 2, bidirectional=True), lltm.LLTMCell(3, 5)])
def test_a_scripted_module_has_the_state_dict_and_shares_the_parameters(module: nn.Module) -> None:
    scripted = script(module)
    expected = module.state_dict()
    assert list(saved_and_loaded(scripted).state_dict()) == list(expected)
    for name, value in scripted.state_dict().items():
        assert value.data_ptr() == expected[name].data_ptr(), name
    other = type(module)(3, 5) if isinstance(module, lltm.LLTMCell) else copy.deepcopy(module)
    other.reset_parameters()  # type: ignore[operator]
    assert not any(scripted.load_state_dict(other.state_dict()))
    x = torch.randn(4, 3)
    torch.testing.assert_close(scripted(x), other(x))


def test_a_scripted_model_trains() -> None:
    model = Model()
    scripted = script(model)
    x = torch.randn(6, 4, 3)
    assert not torch.equal(scripted(x), scripted(x))
    scripted.eval()
    model.eval()
    for _ in range(3):  # TorchScript optimizes after profiling runs
        torch.testing.assert_close(scripted(x), model(x))
        scripted.zero_grad()
        scripted(x).square().sum().backward()
        gradients = [p.grad.clone() for p in scripted.parameters() if p.grad is not None]
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, list(expected))


@pytest.mark.xdist_group("compilers")
def test_scripting_does_not_change_the_model() -> None:
    model = Model()
    script(model)
    rows = pack_sequence([torch.randn(3, 3), torch.randn(1, 3)])
    assert isinstance(model.rnn, lltm.LLTM)
    assert isinstance(model.rnn(rows)[0], PackedSequence)
    torch.testing.assert_close(model.rnn.eval().prepack()(rows)[1], model.rnn(rows)[1])
    assert repr(model.rnn) == "lltm.LLTM(3, 5, num_layers=2, dropout=0.5)"
    for other in (copy.deepcopy(model.rnn), pickle.loads(pickle.dumps(model.rnn))):
        assert type(other) is lltm.LLTM
        torch.testing.assert_close(other(rows)[1], model.rnn(rows)[1])
    x = torch.randn(6, 4, 3)
    torch.testing.assert_close(script(model.eval())(x), model(x))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_subclass_with_another_forward_is_scripted_as_it_is() -> None:
    class Doubled(lltm.LLTMCell):
        def forward(self, input: Tensor, hx: Any = None) -> Any:
            return super().forward(2 * input, hx)

    cell = Doubled(3, 5)
    assert cell.__prepare_scriptable__() is cell


def test_modules_that_cannot_be_scripted_raise_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"supports lltm\.LLTM, which loads the same"):
        script(lltm.reference.LLTM(3, 5))
    with pytest.raises(NotImplementedError, match=r"supports lltm\.LLTMCell, which"):
        script(nn.Sequential(lltm.reference.LLTMCell(3, 5)))
    layer = nn.utils.parametrizations.weight_norm(lltm.LLTM(3, 5), "weights_l0")
    with pytest.raises(NotImplementedError, match=r"script can't compile parametrizations"):
        script(layer)
