"""Modules that torch.nn has too, and lltm.replace_.

Other modules: test_properties.py; test_compile.py and test_export.py use support.MODULES.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import support
import torch
from forms import tensors as values
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close

import lltm
from lltm.cells import cifg

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")

T, B, I, H = 5, 3, 3, 4  # noqa: E741
P = 2  # features of a projected h

BOTH: dict[str, tuple[Any, Any]] = {
    name: (getattr(lltm, name), getattr(nn, name))
    for name in lltm.reference.__all__
    if hasattr(nn, name)
}
CELLS = [name for name in BOTH if name.endswith("Cell")]
LAYERS = [name for name in BOTH if name not in CELLS]

each_layer = pytest.mark.parametrize("name", LAYERS)
each_module = pytest.mark.parametrize("name", BOTH)


def pair(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """lltm's and torch's module with equal parameters."""
    ours, theirs = (make(I, H, **options, dtype=dtype) for make in BOTH[name])
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def states(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Any:
    h, c = torch.randn(2, *shape, H, dtype=dtype)
    return (h, c) if len(BOTH[name][0]._STATES) > 1 else h


def input_of(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*([B] if name in CELLS else [T, B]), I, dtype=dtype)


def results_and_gradients(module: nn.Module, *arguments: Any) -> list[Tensor]:
    """Results, and all gradients."""
    leaves = [*values(arguments), *module.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    results = values(module(*arguments))
    total = sum(((k + 1) * y.sin().sum() for k, y in enumerate(results)), torch.zeros(()))
    found = torch.autograd.grad(total, leaves)
    return [*(y.detach() for y in results), *found]


# ----- structure --------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in itertools.product(
        (1, 2), (False, True), (False, True), (True, False)
    )
]


@each_module
def test_they_have_the_parameters_of_torch_nn_s_initialized_alike(name: str) -> None:
    for options in OPTIONS if name in LAYERS else [{}, {"bias": False}]:
        made = []
        for make in BOTH[name]:
            torch.manual_seed(1)
            made.append(make(I, H, **options))
        ours, theirs = made
        named = [(key, p.shape) for key, p in theirs.named_parameters()]
        assert [(key, p.shape) for key, p in ours.named_parameters()] == named
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
        assert isinstance(ours, nn.RNNBase if name in LAYERS else nn.RNNCellBase)
        assert repr(ours) == f"lltm.{theirs!r}"
        if name in LAYERS:
            assert ours.mode == theirs.mode
            assert ours._flat_weights_names == theirs._flat_weights_names
            of_ours: Any = ours.all_weights
            of_theirs: Any = theirs.all_weights
            assert [len(weights) for weights in of_ours] == [len(weights) for weights in of_theirs]


# ----- values and derivatives --------------------------------------------------


def arguments(name: str, kind: str, options: dict[str, Any]) -> tuple[Any, ...]:
    if "packed" in kind:
        lengths = (T, 3, 1) if kind == "packed, sorted" else (3, 1, T)
        rows = [torch.randn(n, I, dtype=torch.float64) for n in lengths]
        x: Any = pack_sequence(rows, enforce_sorted=kind == "packed, sorted")
    else:
        leading = (B, T) if options["batch_first"] else (T, B)
        x = torch.randn(*([T] if kind == "unbatched" else leading), I, dtype=torch.float64)
    if kind == "no state":
        return (x,)
    count = options["num_layers"] * (2 if options["bidirectional"] else 1)
    hx = states(name, *([count] if kind == "unbatched" else [count, B]))
    return x, (hx[0][..., :P].contiguous(), hx[1]) if options.get("proj_size") else hx


KINDS = ("no state", "state", "unbatched", "packed", "packed, sorted")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*LAYERS, "LSTM with proj_size"])
def test_a_layer_is_torch_nn_s_in_every_combination_of_options(name: str, kind: str) -> None:
    name, *projected = name.split(" with ")
    for options in OPTIONS:
        options = {**options, **dict.fromkeys(projected, P)}
        ours, theirs = pair(name, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        given = arguments(name, kind, options)
        expected = results_and_gradients(theirs, *given)
        assert_close(results_and_gradients(ours, *given), expected)
        with torch.no_grad():
            assert_close(values(ours(*given)), values(theirs(*given)))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_torch_nn_s(name: str, bias: bool) -> None:
    ours, theirs = pair(name, bias=bias)
    for rows in ([], [B]):
        x = torch.randn(*rows, I, dtype=torch.float64)
        for given in ((x,), (x, states(name, *rows))):
            expected = results_and_gradients(theirs, *given)
            assert_close(results_and_gradients(ours, *given), expected)


@pytest.mark.parametrize("name", ["RNN", "RNNCell"])
def test_the_nonlinearity_of_an_rnn_is_tanh_or_relu(name: str) -> None:
    ours, theirs = pair(name, nonlinearity="relu")
    x = input_of(name)
    expected = results_and_gradients(theirs, x)
    assert_close(results_and_gradients(ours, x), expected)
    assert "nonlinearity=relu" in repr(ours)
    for same in (torch.jit.script(ours), copy.deepcopy(ours)):
        assert_close(results_and_gradients(same, x), expected)
    assert lltm.replace_(theirs).replaced == [""]
    assert_close(results_and_gradients(theirs, x), expected)
    make, _ = BOTH[name]
    text = rf"^lltm::{name}: expected nonlinearity to be 'tanh' or 'relu', got 'gelu'$"
    with pytest.raises(lltm.ArgumentError, match=text):
        make(I, H, nonlinearity="gelu")


@pytest.mark.parametrize("kind", ["state", "packed"])
@each_layer
def test_dropout_samples_the_mask_of_torch_nn_s(name: str, kind: str) -> None:
    options: dict[str, Any] = {"num_layers": 3, "bidirectional": True, "batch_first": False}
    ours, theirs = pair(name, **options, dropout=0.5)
    given = arguments(name, kind, options)
    found = []
    for module in (ours, theirs):
        torch.manual_seed(2)
        found.append(results_and_gradients(module, *given))
    assert_close(*found)
    assert_close(ours.eval()(*given), theirs.eval()(*given))
    assert not torch.equal(values(ours(*given))[0], found[0][0])


# ----- an LSTM whose h is projected -------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3])  # PyTorch kernels for two, lltm engines for three
def test_with_a_projection_a_short_call_gives_the_same(steps: int) -> None:
    ours, theirs = (
        make(I, 40, proj_size=P, bidirectional=True, dtype=torch.float64) for make in BOTH["LSTM"]
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(steps, B, I, dtype=torch.float64)
    hx = (torch.randn(2, B, P).double(), torch.randn(2, B, 40).double())
    assert_close(results_and_gradients(ours, x, hx), results_and_gradients(theirs, x, hx))
    assert_close(results_and_gradients(ours, x), results_and_gradients(theirs, x))
    single = ours.float()(x.float())[0]  # avoids PyTorch's oneDNN warning
    assert_close(single, theirs(x)[0].float(), rtol=0, atol=1e-5)


def test_with_a_projection_a_prepacked_form_in_int8_is_close() -> None:
    layer = lltm.LSTM(24, 64, proj_size=16)
    x, hx = torch.randn(12, 5, 24), (0.1 * torch.randn(1, 5, 16), torch.randn(1, 5, 64))
    packed = layer.prepack(torch.qint8)
    with torch.no_grad():
        found, expected = values(packed(x, hx)), values(layer(x, hx))
    for y, z in zip(found, expected, strict=True):
        assert not torch.equal(y, z)
        assert float((y - z).abs().max()) <= 0.03
    # docs/inference.md: a call quantizes the projected h of the call before.
    first, state = packed(x[:5], hx)
    assert_close(torch.cat([first, packed(x[5:], state)[0]]), found[0], rtol=0, atol=5e-3)
    row = [s[:, 2:3] for s in hx]
    assert_close(packed(x[:, 2:3], row)[0], found[0][:, 2:3])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_with_a_projection_it_is_as_accurate_as_torch_nn_s(dtype: torch.dtype) -> None:
    theirs = nn.LSTM(32, 64, proj_size=24, dtype=dtype)
    ours = lltm.LSTM(32, 64, proj_size=24, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    exact = nn.LSTM(32, 64, proj_size=24, dtype=torch.float64)
    exact.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 8, 32, dtype=dtype)
    expected = results_and_gradients(exact, x.double())
    errors = [
        [float((y - z).norm() / z.norm()) for y, z in zip(found, expected, strict=True)]
        for found in (results_and_gradients(module, x.clone()) for module in (ours, theirs))
    ]
    rounding = torch.finfo(dtype).eps / 2  # of exact results
    for of_ours, of_theirs in zip(*errors, strict=True):
        assert of_ours <= 2 * max(of_theirs, rounding)


def test_errors_of_a_projection_are_named() -> None:
    """test_errors.py has those of the arguments of a call."""
    bad_options: list[tuple[dict[str, Any], str]] = [
        ({"recurrent_dropout": 0.5}, "recurrent_dropout to be 0 with proj_size, got 0.5"),
        ({"proj_size": H}, rf"proj_size to be in \[0, hidden_size\), got {H}"),
    ]
    for options, text in bad_options:
        with pytest.raises(lltm.ArgumentError, match=f"^lltm::LSTM: expected {text}"):
            lltm.LSTM(I, H, **{"proj_size": P, **options})


# ----- graphs -------------------------------------------------------------------


class Model(nn.Module):
    """Has both kinds of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"gru": nn.GRU(I, H, num_layers=2, bidirectional=True)})
        self.lstm = nn.LSTM(2 * H, H)
        self.cells = nn.ModuleList([nn.LSTMCell(H, H), nn.GRUCell(H, H)])
        self.head = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(self.encoder["gru"](x)[0])
        h, _ = self.cells[0](output[-1])
        logits: Tensor = self.head(self.cells[1](h))
        return logits


@pytest.mark.parametrize("keep_class", [False, True], ids=["ours", "keep_class"])
def test_replace_changes_only_the_classes_of_modules(keep_class: bool) -> None:
    model = Model().double()
    x = torch.randn(T, B, I, dtype=torch.float64)
    expected = results_and_gradients(model, x)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    texts, seen = str(model), []
    model.lstm.register_forward_hook(lambda *_: seen.append("lstm"))
    model.cells[0].eval()
    result = lltm.replace_(model, keep_class=keep_class)
    assert result.replaced == ["encoder.gru", "lstm", "cells.0", "cells.1"]
    assert result.left == {}
    assert str(result) == "replaced: 'encoder.gru', 'lstm', 'cells.0', 'cells.1'"
    assert {name: id(m) for name, m in model.named_modules()} == {
        name: id(m) for name, m in modules.items()
    }
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    with support.Operators() as operators:
        assert_close(results_and_gradients(model, x), expected)
    assert operators.ours()[:7] == ["sequence_forward"] * 7
    assert seen == ["lstm"]
    assert not model.cells[0].training
    for module in (model.lstm, *model.cells, model.encoder["gru"]):
        theirs = getattr(nn, type(module).__name__.strip("_"))
        assert isinstance(module, theirs) == keep_class
        assert isinstance(module, getattr(lltm, theirs.__name__))
    assert str(model) == re.sub(r": (?=(LSTM|GRU|RNN)(Cell)?\()", ": lltm.", texts)
    assert lltm.replace_(model).replaced == []


class Own(nn.GRU):
    pass


def with_replaced_forward() -> nn.Module:
    module = nn.LSTM(I, H)
    vars(module)["forward"] = module.forward
    return module


def sharded() -> nn.Module:
    """Changes the module's class like fully_shard."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    module = nn.LSTM(I, H)
    module.__class__ = type("FSDPLSTM", (fsdp.FSDPModule, nn.LSTM), {})
    return module


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_hh = nn.Parameter(torch.zeros(4 * H, H))


class NotRecurrent(nn.Linear):
    def __init__(self) -> None:
        super().__init__(I, H)
        self.weight_hh_scale = nn.Parameter(torch.zeros(H))
        self.register_parameter("weight_hh", None)
        self.weight_hh_l0 = nn.UninitializedParameter()


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "base": (lambda: nn.RNNBase("LSTM", I, H), "lltm has no RNNBase"),
    "subclass": (
        lambda: Own(I, H),
        "Own is a subclass, whose forward may differ: pass subclasses=True",
    ),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.GRU(I, H), "weight_hh_l0"),
        "it is parametrized; call replace_ before parametrizing it",
    ),
    "sharded": (sharded, "it is sharded by fully_shard; call replace_ before fully_shard"),
    "quantizable": (
        lambda: torch.ao.nn.quantizable.LSTM(I, H),
        "it is a quantization module; replace the float module and prepack it in int8",
    ),
    "brevitas": (
        type("QuantLSTM", (nn.Module,), {"__module__": "brevitas.nn"}),
        "it is a quantization module",
    ),
    "loop": (Loop, "Loop is no torch.nn module; write its step as a custom cell"),
    "TorchScript": (lambda: torch.jit.script(nn.LSTMCell(I, H)), "it is compiled by TorchScript"),
    "forward": (with_replaced_forward, "its forward is replaced on the instance"),
    "dtype": (lambda: nn.GRU(I, H, dtype=torch.complex64), "its dtype is complex64"),
}


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", LEFT)
def test_replace_reports_modules_that_it_left_and_the_reasons(name: str) -> None:
    make, reason = LEFT[name]
    module = make()
    cls = type(module)
    model = nn.Sequential(module, nn.GRU(I, H), NotRecurrent())
    result = lltm.replace_(model)
    assert type(module) is cls
    assert result.replaced == ["1"]
    assert [*result.left] == ["0"]
    assert result.left["0"].startswith(reason)
    assert str(result).splitlines()[1].startswith(f"left: '0': {reason}")


class _Scaled:
    """Has another argument, and a method that calls forward."""

    def forward(self, input: Any, hx: Any = None, scale: Any = 1.0) -> Any:
        return self.run(scale * input, hx)

    @torch.enable_grad()
    def run(self, *arguments: Any) -> Any:
        return super().forward(*arguments)  # type: ignore[misc]


SCALED: dict[str, Any] = {
    name: type(name, (_Scaled, nn_class), {}) for name, (_, nn_class) in BOTH.items()
}
for _name, _cls in SCALED.items():
    globals()[_cls.__qualname__] = _cls  # for pickle


@each_module
def test_replace_takes_subclasses_that_call_super_forward(name: str) -> None:
    module = SCALED[name](I, H, dtype=torch.float64)
    x, scale = input_of(name), torch.tensor(0.5, dtype=torch.float64)
    expected = results_and_gradients(module, x, None, scale)
    text, state = repr(module), module.state_dict()
    assert lltm.replace_(module, subclasses=True).replaced == [""]
    assert lltm.replace_(module, subclasses=True) == lltm.Replaced()
    assert isinstance(module, SCALED[name])
    assert isinstance(module, BOTH[name][0])
    assert repr(module) == text
    assert_close(module.state_dict(), state, rtol=0, atol=0)
    copies = [pickle.loads(pickle.dumps(module, protocol)) for protocol in (0, 2, 5)]
    for other in (module, copy.copy(module), copy.deepcopy(module), *copies):
        assert type(other) is type(module)
        with support.Operators() as operators:
            assert_close(results_and_gradients(other, x, None, scale), expected)
        assert operators.ours()


def test_a_replaced_subclass_may_have_its_own_reduction() -> None:
    class Reduced(nn.GRU):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return Reduced, (self.input_size, self.hidden_size)

    module = Reduced(I, H)
    assert lltm.replace_(module, subclasses=True).replaced == [""]
    assert type(copy.copy(module)) is Reduced


class WithoutSuper(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return nn.GRU.forward(self, input, hx)


class WithMask(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        self._flat_weights[1] = torch.zeros(4 * H, H)
        return super().forward(input, hx)


class WithDropout(nn.LSTM):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.recurrent_dropout = 0.5


class Registered(nn.GRU):
    def __init_subclass__(cls) -> None:
        raise ValueError("registered twice")


class OfBase(nn.RNNBase):
    pass


class OfGeneric(Generic[TypeVar("Any")], nn.GRU):  # type: ignore[misc]  # noqa: PYI059
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (WithoutSuper, "WithoutSuper.forward does not call super().forward"),
        (WithMask, "WithMask uses _flat_weights of torch.nn"),
        (WithDropout, "it has an attribute recurrent_dropout, a name that lltm uses"),
        (Registered, "lltm's forward cannot be inherited by Registered: registered twice"),
        (partial(OfBase, "LSTM"), "lltm has no base class of OfBase"),
        (OfGeneric, "lltm's forward cannot be inherited by OfGeneric: Cannot create a consistent"),
        (partial(Own, dtype=torch.complex64), "its dtype is complex64"),
    ],
    ids=str,
)
def test_replace_leaves_subclasses_that_compute_otherwise(make: Any, reason: str) -> None:
    module = make(I, H)
    cls = type(module)
    result = lltm.replace_(module, subclasses=True)
    assert (type(module), result.replaced) == (cls, [])
    assert result.left[""].startswith(reason)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@each_module
def test_replace_supports_modules_whose_weights_a_hook_computes(name: str) -> None:
    module = BOTH[name][1](I, H, dtype=torch.float64)
    weight = "weight_hh_l0" if name in LAYERS else "weight_hh"
    model = nn.Sequential(nn.utils.weight_norm(module, weight))
    x = input_of(name)
    expected = results_and_gradients(model, x)
    assert lltm.replace_(model).replaced == ["0"]
    assert_close(results_and_gradients(model, x), expected)


def test_replace_accepts_a_layer_itself_and_only_modules() -> None:
    layer = nn.GRU(I, H)
    assert lltm.replace_(layer).replaced == [""]
    cls: type = type(layer)
    assert cls is lltm.GRU
    assert lltm.replace_(nn.Linear(I, H)).replaced == []
    text = "^lltm::replace_: expected model to be a torch.nn.Module, got list$"
    with pytest.raises(TypeError, match=text):
        lltm.replace_([layer])  # type: ignore[arg-type]
    algorithm: Any = SimpleNamespace(name="ppo", policy=layer, critic=layer)
    with pytest.raises(TypeError, match=r"got SimpleNamespace; pass its attribute policy or crit"):
        lltm.replace_(algorithm)


# ----- calls for which torch.nn's layers fail (docs/drop-in.md) -------------------


OURS = [*(ours for ours, _ in BOTH.values()), lltm.LLTM, lltm.LLTMCell, cifg.Layer, cifg.Cell]
each_of_ours = pytest.mark.parametrize("make", OURS)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@each_of_ours
def test_a_parametrized_module_can_be_copied(make: Any, norm: str) -> None:
    x = torch.randn(*([B] if "Cell" in make.__name__ else [T, B]), I, dtype=torch.float64)
    changes: Any = (lambda m: m(x), nn.Module.double, nn.Module.share_memory)
    for change in changes:
        module = make(I, H, dtype=torch.float64)
        weight = next(key for key, _ in module.named_parameters() if "ih" not in key)
        getattr(nn.utils.parametrizations, norm)(module.eval(), weight)
        change(module)
        copied = copy.deepcopy(module)
        assert type(copied) is type(module)
        assert_close(copied(x), module(x))
        assert not {*map(id, copied.parameters())} & {*map(id, module.parameters())}


class Mixin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Identity()


MIXED: Any = {make: type(f"Mixed{make.__name__}", (make, Mixin), {}) for make in OURS}
globals().update((cls.__name__, cls) for cls in MIXED.values())  # for pickle


@each_of_ours
def test_a_subclass_with_a_mixin_is_initialized_and_copied(make: Any) -> None:
    module = MIXED[make](I, H)
    assert repr(module).startswith(f"{MIXED[make].__name__}(\n  {I}, {H}\n  (mixed): Identity()")
    module.compile(backend="eager")
    for other in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is MIXED[make]
        assert other._compiled_call_impl is None
        assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_fewer_threads_than_set_train_equally_well() -> None:
    code = """
import torch, lltm
torch.manual_seed(0)
torch.set_num_threads(8)
single, exact = lltm.LSTM(32, 128), torch.nn.LSTM(32, 128, dtype=torch.float64)
exact.load_state_dict(single.state_dict())
for layer in (single, exact):
    x = torch.linspace(-1, 1, 20 * 16 * 32).view(20, 16, 32)
    layer(x.to(layer.weight_ih_l0.dtype))[0].square().sum().backward()
for p, q in zip(single.parameters(), exact.parameters()):
    assert (p.grad - q.grad).norm() <= 1e-6 * q.grad.norm()
    print(p.grad.view(torch.int32).sum().item())  # differs if any bit does
"""
    with support.threads(8), redirect_stdout(StringIO()) as shown:
        exec(code, {})
    limits = [("1", "false")]
    limits += [] if support.ARM else [("2", "true")]  # there, torch.nn.LSTM itself aborts
    for limit, dynamic in limits:
        result = support.run_python("-c", code, OMP_THREAD_LIMIT=limit, OMP_DYNAMIC=dynamic)
        assert result.stdout == shown.getvalue() or not support.HAS_OWN_GEMM
