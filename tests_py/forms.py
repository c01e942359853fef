"""Modules of every built-in cell, with sample arguments; test_properties.py tests them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import pytest
import support
import torch
from support import DTYPES
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

Values = dict[str, Tensor]

# Dropout seed of each call.
SEED = 1


def layer_names() -> list[str]:
    """Built-in cells by layer name, in the operators' order."""
    names = [name for name in lltm.reference.__all__ if f"{name}Cell" in lltm.reference.__all__]
    return sorted(names, key=lambda name: support.CELLS.index(getattr(lltm, name)(1, 1)._CELL))


@dataclass(frozen=True)
class Sizes:
    steps: int = 3
    batch: int = 3
    inputs: int = 3
    hidden: int = 4


SIZES = Sizes()


@dataclass(frozen=True)
class Sample:
    name: str
    values: Values
    run: Callable[[Values], list[Tensor]]
    plain: Callable[[Values], list[Tensor]]
    states: tuple[str, ...]
    options: dict[str, Any]  # of the constructor
    module: Any
    arguments: Callable[[Values], tuple[Any, ...]]  # of the call
    fresh: Callable[[], Any]  # the same module with other values
    kind: str
    has_reset: bool

    def __str__(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in self.values.items()}
        return f"{self.name}: {shapes}"

    def call(self, module: Any = None, values: Values | None = None) -> list[Tensor]:
        arguments = self.arguments(self.values if values is None else values)
        torch.default_generator.manual_seed(SEED)
        return tensors((self.module if module is None else module)(*arguments))

    def is_plain(self) -> bool:
        more = ("dropout", "recurrent_dropout", "proj_size")
        return not self.has_reset and not any(name in self.options for name in more)

    def given(self) -> list[str]:
        """Excludes parameters."""
        return [name for name in self.values if name in ("input", *self.states)]

    def parameters(self) -> list[str]:
        return [name for name in self.values if name not in ("input", *self.states)]


@dataclass(frozen=True)
class Form:
    name: str
    samples: Callable[[torch.dtype, Sizes], Iterator[Sample]]
    make: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    trainable: bool = True
    quantized: bool = False
    steps: bool = True
    torch_module: Callable[..., Any] = nn.LSTM
    prepacked: bool = False
    plain: bool = False

    def __str__(self) -> str:
        return self.name

    def each(
        self, dtype: torch.dtype, sizes: Sizes = SIZES, every: bool = True
    ) -> Iterator[Sample]:
        """Returns a few samples per layer, with each option and input kind, or `every`."""
        for sample in self.samples(dtype, sizes):
            if every or not (self.steps and sample.options) or sample.name in SOME:
                print(self.name, sample)  # pytest shows the last sample of a failed test
                # Two threads run two directions concurrently.
                count = 2 if sample.options.get("bidirectional") else torch.get_num_threads()
                with support.threads(count):
                    yield sample


def changed(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Changes all tensors; the data of a PackedSequence."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(change(tree.data), *tree[1:])
    if isinstance(tree, (tuple, list)):
        return tuple(changed(branch, change) for branch in tree)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """Includes a PackedSequence's data."""
    found: list[Tensor] = []
    changed(tree, found.append)
    return found


def lengths(sizes: Sizes) -> list[int]:
    """Lengths, longest first, in steps of 2, at least 1."""
    return [max(sizes.steps - 2 * row, min(1, sizes.steps)) for row in range(sizes.batch)]


class Use(NamedTuple):
    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    kind: str = "batched"  # input kind
    with_state: bool = False
    with_reset: bool = False


STEPS = (
    Use("batch"),
    Use("batch, state", with_state=True),
    Use("batch, state, no bias", {"bias": False}, with_state=True),
    Use("no batch", kind="unbatched"),
    Use("no batch, state", kind="unbatched", with_state=True),
)
DEEP = {"num_layers": 2, "bidirectional": True}
# Each input kind and option at least once.
SOME_LAYERS = (
    Use("packed", kind="packed"),
    Use(
        "batch first, layers and directions, state, no bias",
        {**DEEP, "batch_first": True, "bias": False},
        with_state=True,
    ),
    Use("no batch, one layer", kind="unbatched"),
    Use("packed out of order, layers and directions, state", DEEP, "packed out of order", True),
    Use("resets, layers and directions, state", DEEP, with_state=True, with_reset=True),
    Use("dropout, recurrent dropout", {**DEEP, "dropout": 0.3, "recurrent_dropout": 0.4}),
)
LAYERS = (
    Use("batch"),
    Use("batch, state", with_state=True),
    Use("batch first", {"batch_first": True}),
    Use("layers and directions", DEEP),
    Use("packed, state", {"num_layers": 2, "batch_first": True}, "packed", with_state=True),
    Use("packed out of order, layers and directions", DEEP, "packed out of order"),
    *SOME_LAYERS,
    Use("resets, batch first", {"batch_first": True}, with_reset=True),
    Use("resets, no batch", kind="unbatched", with_reset=True),
    Use("resets, packed out of order", DEEP, "packed out of order", with_reset=True),
    Use("recurrent dropout, packed", {"recurrent_dropout": 0.4}, "packed out of order"),
)
PROJECTIONS = (
    Use("projection, layers and directions, state", {**DEEP, "proj_size": 2}, with_state=True),
    Use(
        "projection, resets, packed out of order",
        {"bidirectional": True, "proj_size": 2},
        "packed out of order",
        with_reset=True,
    ),
)
SOME = {use.name for use in (*SOME_LAYERS, *PROJECTIONS)}


def packed_rows(kind: str, sizes: Sizes) -> PackedSequence:
    rows = lengths(sizes)
    if kind == "packed out of order":
        rows = [*rows[1:], rows[0]]
    if sizes.steps == 0:
        order = torch.arange(sizes.batch).roll(1) if kind == "packed out of order" else None
        inverse = None if order is None else torch.argsort(order)
        return PackedSequence(torch.empty(0, 1), torch.empty(0, dtype=torch.int64), order, inverse)
    return pack_sequence([torch.empty(n, 1) for n in rows], enforce_sorted=kind == "packed")


class Prepacking(nn.Module):
    """Prepacks in every call: results depend on the layer's weights."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype

    def forward(self, *arguments: Any) -> Any:
        return self.layer.prepack(self.dtype)(*arguments)


def as_it_is(module: Any) -> Any:
    return module


evaluated = methodcaller("eval")
prepacked = methodcaller("prepack")
int8 = methodcaller("prepack", torch.qint8)


@dataclass(frozen=True)
class Modules:
    """Samples of `finish(module)`, which may prepack a layer."""

    uses: tuple[Use, ...]
    make: Any
    plain: Any
    finish: Callable[[Any], Any] = as_it_is

    def __call__(self, dtype: torch.dtype, sizes: Sizes) -> Iterator[Sample]:
        for use in self.uses:
            if use.kind == "batched" or sizes.batch > 0:
                yield self._sample(use, dtype, sizes)

    def _sample(self, use: Use, dtype: torch.dtype, sizes: Sizes) -> Sample:
        options = {"input_size": sizes.inputs, "hidden_size": sizes.hidden, **use.options}
        module, plain = (make(**options).to(dtype) for make in (self.make, self.plain))
        if self.finish is not as_it_is:
            plain.eval()
        names = [name for name, _ in module.named_parameters()]
        states = tuple(name.removesuffix("_0") for name in module._STATES)
        is_layer = hasattr(module, "num_layers")

        batch = (sizes.batch,) if use.kind != "unbatched" else ()
        leading = (sizes.steps, *batch) if is_layer else batch
        if use.kind == "batched" and options.get("batch_first"):
            leading = leading[::-1]
        order = packed_rows(use.kind, sizes) if "packed" in use.kind else None
        if order is not None:
            leading = (len(order.data),)
        values = {"input": torch.randn(*leading, sizes.inputs, dtype=dtype)}
        reset = torch.rand(leading) < 0.4 if use.with_reset else None
        if use.with_state:
            directions = 2 if options.get("bidirectional") else 1
            count = (directions * options.get("num_layers", 1),) if is_layer else ()
            for state in states:
                width = options.get("proj_size", 0) if state == "h" else 0
                shape = (*count, *batch, width or sizes.hidden)
                values[state] = torch.randn(shape, dtype=dtype)
        values.update({name: p.detach().clone() for name, p in module.named_parameters()})

        def arguments(values: Values) -> tuple[Any, ...]:
            input: Any = values["input"]
            if order is not None:
                input = PackedSequence(input, *order[1:])
            hx = state_of(values, states) if use.with_state else None
            if reset is not None:
                return input, hx, reset.to(values["input"].device)
            return (input, hx) if use.with_state else (input,)

        def run(module: nn.Module, values: Values) -> list[Tensor]:
            prefix = "layer." if isinstance(module, Prepacking) else ""
            parameters = {prefix + name: values[name] for name in names}
            torch.default_generator.manual_seed(SEED)
            return tensors(torch.func.functional_call(module, parameters, arguments(values)))

        # Packed again from the weights in `values`.
        running = module
        if self.finish in (prepacked, int8):
            running = Prepacking(module, torch.qint8 if self.finish is int8 else None)
        return Sample(
            use.name,
            values,
            partial(run, running),
            partial(run, plain),
            states,
            options,
            self.finish(module),
            arguments,
            lambda: self.finish(self.make(**options).to(dtype)),
            use.kind,
            use.with_reset,
        )


def state_of(values: Values, states: tuple[str, ...]) -> Any:
    """A pair, or one tensor for a cell without c."""
    found = tuple(values[state] for state in states)
    return found if len(found) > 1 else found[0]


def forms() -> Iterator[Form]:
    for k, name in enumerate(layer_names()):
        step, ours = getattr(lltm, f"{name}Cell"), getattr(lltm, name)
        plain_step, plain = getattr(lltm.reference, f"{name}Cell"), getattr(lltm.reference, name)
        # Only the first cell is tested in every dtype.
        dtypes = (torch.float64, torch.float32) if k else DTYPES
        dtypes_of_others = (torch.float32,) if k else DTYPES
        projections = PROJECTIONS if name == "LSTM" else ()
        of_step = partial(Modules, STEPS)
        every = partial(Modules, (*LAYERS, *projections))
        layer = partial(Modules, (*SOME_LAYERS, *projections))
        # torch.nn's strides and repr do not depend on the cell.
        torch_step = getattr(nn, f"{name}Cell", nn.LSTMCell)
        of_layer: dict[str, Any] = {"torch_module": getattr(nn, name, nn.LSTM), "dtypes": dtypes}
        with_checkpoints = partial(ours, checkpoint_steps=2)
        one_step = of_step(step, plain_step)
        yield Form(f"{name}Cell", one_step, step, dtypes, steps=False, torch_module=torch_step)
        yield Form(name, every(ours, plain), make=ours, **of_layer)
        of_layer.update(dtypes=dtypes_of_others)
        saving = layer(with_checkpoints, plain)
        yield Form(f"{name}, checkpoints", saving, with_checkpoints, **of_layer)
        of_layer.update(make=ours, trainable=False)
        yield Form(f"{name}, evaluation", layer(ours, plain, finish=evaluated), **of_layer)
        of_layer.update(prepacked=True)
        yield Form(f"Prepacked{name}", layer(ours, plain, finish=prepacked), **of_layer)
        yield Form(
            f"Prepacked{name}, int8",
            layer(ours, plain, finish=int8),
            quantized=True,
            **{**of_layer, "dtypes": tuple(d for d in dtypes_of_others if d != torch.float64)},
        )
        # Reference modules, compared in the opposite direction: the same code for each cell.
        if k == 0:
            of_plain: dict[str, Any] = {"plain": True, "dtypes": dtypes_of_others}
            plain_steps = of_step(plain_step, step)
            name = f"reference.{name}"
            yield Form(f"{name}Cell", plain_steps, plain_step, steps=False, **of_plain)
            yield Form(name, layer(plain, ours), plain, **of_plain)


FORMS = tuple(forms())


def cases(
    dtypes: tuple[torch.dtype, ...] = DTYPES, where: Callable[[Form], bool] = lambda form: True
) -> list[tuple[Form, torch.dtype]]:
    return [
        (form, dtype) for form in FORMS if where(form) for dtype in dtypes if dtype in form.dtypes
    ]


def each_form(
    dtypes: tuple[torch.dtype, ...] = DTYPES, where: Callable[[Form], bool] = lambda form: True
) -> pytest.MarkDecorator:
    """Parametrizes a test by `form` and `dtype`."""
    return pytest.mark.parametrize(("form", "dtype"), cases(dtypes, where), ids=id_of)


def id_of(value: Any) -> str:
    """The id is the same in every process."""
    return getattr(value, "__name__", str(value).removeprefix("torch."))


class OneState(nn.Module):
    """The reverse operator without a forward direction, which no module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = lltm.LLTMCell(3, 5)

    def forward(self, input: Tensor) -> Any:
        state = input.new_ones(input.shape[1], 5)
        weights, bias = self.cell.weights, self.cell.bias
        return lltm.functional.sequence(
            "lltm", input, (state, state), weights, bias_ih=bias, reverse=True
        )


def custom_layer(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    layer = support.gallery_module(name, 3, 5)
    x = torch.randn(6, 4, layer.input_size)
    with torch.no_grad():
        state = layer(x)[1]
    return layer, (x, state, torch.rand(6, 4) < 0.3)


def sample(make: Any, use: Use, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    (found,) = Modules((use,), make, make)(dtype, Sizes(6, 4, 3, 5))
    return found.module, found.arguments(found.values)


# No GEMM of h; products; means; a custom gradient; derived parameters; several states.
CUSTOM = ("indrnn", "keras_gru", "layernorm_lstm", "lif", "hgrn", "slstm")
# Modules and arguments for compilers and exporters.
MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    f"{name}, {use.name}": partial(sample, make, use, dtype)
    for name, make, uses, dtype in (
        ("LLTMCell", lltm.LLTMCell, STEPS, torch.float32),
        ("GRUCell", lltm.GRUCell, STEPS[1:2], torch.float32),
        ("LLTM", lltm.LLTM, SOME_LAYERS, torch.float32),
        ("GRU", lltm.GRU, SOME_LAYERS, torch.float32),
        ("LSTM", lltm.LSTM, (LAYERS[3], PROJECTIONS[0]), torch.float32),
        ("checkpoints", partial(lltm.LLTM, checkpoint_steps=4), LAYERS[3:4], torch.float32),
        ("float64", lltm.LLTM, LAYERS[:1], torch.float64),
        ("bfloat16", lltm.LLTM, LAYERS[:1], torch.bfloat16),
    )
    for use in uses
}
MODULES["reverse"] = lambda: (OneState(), (torch.randn(6, 4, 3),))
MODULES.update({name: partial(custom_layer, name) for name in CUSTOM})
