"""Every form in which a cell is called, and samples of arguments for each.

test_properties.py checks every property of every form here. A cell of another kind is one more
row of CELLS: its modules, those that say what they must compute, and the names of its states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import support
import torch
from support import DTYPES, Arguments
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lltm

# Whatever the results depend on, by name: "input", the states, the parameters.
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """Our modules, and the modules with the same parameters that they must agree with."""

    step: Callable[..., Any]
    layer: Callable[..., Any]
    plain_step: Callable[..., Any]
    plain_layer: Callable[..., Any]
    # torch.nn's, for what is theirs whatever the cell: strides, and the text of a module.
    torch_step: Callable[..., Any] = nn.LSTMCell
    torch_layer: Callable[..., Any] = nn.LSTM
    states: tuple[str, ...] = ("h", "c")
    # Of its modules, and of those without derivatives or whose values others have already. What is
    # a matter of the dtype alone, the forms of the LLTM show for all cells.
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    dtypes_of_others: tuple[torch.dtype, ...] = (torch.float32,)


REFERENCE = lltm.reference
CELLS = {
    "LLTM": Cell(
        lltm.LLTMCell,
        lltm.LLTM,
        REFERENCE.LLTMCell,
        REFERENCE.LLTM,
        dtypes=DTYPES,
        dtypes_of_others=DTYPES,
    ),
    "LSTM": Cell(lltm.LSTMCell, lltm.LSTM, REFERENCE.LSTMCell, REFERENCE.LSTM),
    "GRU": Cell(
        lltm.GRUCell,
        lltm.GRU,
        REFERENCE.GRUCell,
        REFERENCE.GRU,
        nn.GRUCell,
        nn.GRU,
        states=("h",),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Of the arguments of a sample: T, B, I, H."""

    steps: int = 3
    batch: int = 3
    inputs: int = 3
    hidden: int = 4


SIZES = Sizes()


@dataclass(frozen=True)
class Sample:
    name: str
    values: Values
    # The tensors of the results, and what they must be, both from such values.
    run: Callable[[Values], list[Tensor]]
    plain: Callable[[Values], list[Tensor]]
    states: tuple[str, ...] = ("h", "c")
    # Of a module: what it was made with; it, and how it is called, whole.
    options: dict[str, Any] = field(default_factory=dict)
    module: Any = None
    arguments: Callable[[Values], tuple[Any, ...]] = lambda values: ()
    # Another module as `module` was made, with other values.
    fresh: Callable[[], Any] = lambda: None
    kind: str = "batched"

    def __str__(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in self.values.items()}
        return f"{self.name}: {shapes}"

    def call(self, module: Any = None, values: Values | None = None) -> list[Tensor]:
        """The results of the module as it is, or of another."""
        arguments = self.arguments(self.values if values is None else values)
        return tensors((self.module if module is None else module)(*arguments))

    def given(self) -> list[str]:
        """The names of the arguments, without the parameters."""
        return [name for name in self.values if name in ("input", *self.states)]

    def parameters(self) -> list[str]:
        return [name for name in self.values if name not in ("input", *self.states)]


@dataclass(frozen=True)
class Form:
    name: str
    samples: Callable[[torch.dtype, Sizes], Iterator[Sample]]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    trainable: bool = True
    quantised: bool = False
    # Whether it runs over steps, rather than to take one.
    steps: bool = True
    # What makes such a module; none is made of a function.
    make: Callable[..., Any] | None = None
    # The module of torch.nn that is used in the same way.
    torch_module: Callable[..., Any] = nn.LSTM
    prepacked: bool = False
    plain: bool = False

    def __str__(self) -> str:
        return self.name

    def each(
        self, dtype: torch.dtype, sizes: Sizes = SIZES, every: bool = True
    ) -> Iterator[Sample]:
        """Its samples; without `every`, less the combinations of options that PyTorch tries."""
        for sample in self.samples(dtype, sizes):
            if every or not sample.name.startswith("as PyTorch"):
                print(self.name, sample)  # captured: where a test fails, the last one is shown
                yield sample


def changed(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The tree with `change` applied to its tensors, of a PackedSequence to the rows."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, PackedSequence):
        return PackedSequence(change(tree.data), *tree[1:])
    if isinstance(tree, (tuple, list)):
        return tuple(changed(branch, change) for branch in tree)
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """Its tensors that carry values: of a PackedSequence the rows."""
    found: list[Tensor] = []
    changed(tree, found.append)
    return found


# ----- functions -------------------------------------------------------------


def of_function(outputs: support.Outputs, name: str, a: Arguments) -> Sample:
    def run(implementation: Any, values: dict[str, Any]) -> list[Tensor]:
        return list(outputs(implementation, replace(a, **values)))

    values = dict(zip(support.NAMES, a.tensors(), strict=False))
    return Sample(
        name,
        values,
        partial(run, lltm.functional),
        partial(run, lltm.reference),
        kind="packed" if a.batch_sizes is not None else "batched",
    )


def of_cell(dtype: torch.dtype, sizes: Sizes) -> Iterator[Sample]:
    shape = sizes.batch, sizes.inputs, sizes.hidden
    for bias in (True, False):
        a = support.cell_arguments(shape, dtype, bias)
        yield of_function(support.cell_outputs, "bias" if bias else "no bias", a)


def of_sequence(outputs: support.Outputs, dtype: torch.dtype, sizes: Sizes) -> Iterator[Sample]:
    shape = sizes.steps, sizes.batch, sizes.inputs, sizes.hidden
    dense, packed = partial(support.sequence_arguments, shape, dtype), support.packed_arguments
    yield of_function(outputs, "forward", dense())
    yield of_function(outputs, "reverse", dense(reverse=True))
    yield of_function(outputs, "no bias", dense(bias=False))
    if sizes.batch > 0:
        for reverse in (False, True):
            a = packed(lengths(sizes), sizes.inputs, sizes.hidden, dtype, reverse)
            yield of_function(outputs, "packed, reverse" if reverse else "packed", a)


def lengths(sizes: Sizes) -> list[int]:
    """Of the rows of a batch, longest first: in steps of 2, and none shorter than 1."""
    return [max(sizes.steps - 2 * row, min(1, sizes.steps)) for row in range(sizes.batch)]


# ----- modules ---------------------------------------------------------------

# name, options, kind of input, whether a state is given
Use = tuple[str, dict[str, Any], str, bool]

STEPS: tuple[Use, ...] = (
    ("batch", {}, "batched", False),
    ("batch, state", {}, "batched", True),
    ("batch, state, no bias", {"bias": False}, "batched", True),
    ("no batch", {}, "unbatched", False),
    ("no batch, state", {}, "unbatched", True),
)
DEEP = {"num_layers": 2, "bidirectional": True}
SOME_LAYERS: tuple[Use, ...] = (
    ("batch", {}, "batched", False),
    ("batch, state", {}, "batched", True),
    ("batch first", {"batch_first": True}, "batched", False),
    ("layers and directions", DEEP, "batched", False),
    (
        "batch first, layers and directions, state, no bias",
        {**DEEP, "batch_first": True, "bias": False},
        "batched",
        True,
    ),
    ("no batch, one layer", {}, "unbatched", False),
    ("packed", {}, "packed", False),
    ("packed, state", {"num_layers": 2, "batch_first": True}, "packed", True),
    ("packed out of order, layers and directions, state", DEEP, "packed out of order", True),
    ("packed out of order, layers and directions", DEEP, "packed out of order", False),
)
LAYERS: tuple[Use, ...] = (
    *SOME_LAYERS,
    *(
        (
            "as PyTorch tests nn.LSTM",
            {"num_layers": 2, "bias": bias, "batch_first": first, "bidirectional": both},
            "unbatched",
            state,
        )
        for bias, first, both, state in itertools.product((False, True), repeat=4)
    ),
)


def packed_rows(kind: str, sizes: Sizes) -> PackedSequence:
    """The order of a packed sequence."""
    rows = lengths(sizes)
    if kind == "packed out of order":
        rows = [*rows[1:], rows[0]]
    if sizes.steps == 0:
        order = torch.arange(sizes.batch).roll(1) if kind == "packed out of order" else None
        inverse = None if order is None else torch.argsort(order)
        return PackedSequence(torch.empty(0, 1), torch.empty(0, dtype=torch.int64), order, inverse)
    return pack_sequence([torch.empty(n, 1) for n in rows], enforce_sorted=kind == "packed")


class Prepacking(nn.Module):
    """Prepacks its layer in every call, so that results are a function of the layer's weights."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype

    def forward(self, *arguments: Any) -> Any:
        return self.layer.prepack(self.dtype)(*arguments)


def as_it_is(module: Any) -> Any:
    return module


def evaluated(module: Any) -> Any:
    return module.eval()


def prepacked(module: Any) -> Any:
    return module.prepack()


def int8(module: Any) -> Any:
    return module.prepack(torch.qint8)


@dataclass(frozen=True)
class Modules:
    """The samples of a module. What is called is `finish` of it: of a layer, the prepacked one."""

    uses: tuple[Use, ...]
    make: Callable[..., Any]
    plain: Callable[..., Any]
    states: tuple[str, ...]
    finish: Callable[[Any], Any] = as_it_is

    def __call__(self, dtype: torch.dtype, sizes: Sizes) -> Iterator[Sample]:
        for name, options, kind, with_state in self.uses:
            if kind == "batched" or sizes.batch > 0:
                yield self._sample(name, options, kind, with_state, dtype, sizes)

    def _sample(
        self,
        name: str,
        options: dict[str, Any],
        kind: str,
        with_state: bool,
        dtype: torch.dtype,
        sizes: Sizes,
    ) -> Sample:
        options = {"input_size": sizes.inputs, "hidden_size": sizes.hidden, **options}
        module, plain = (make(**options).to(dtype) for make in (self.make, self.plain))
        names = [name for name, _ in module.named_parameters()]
        is_layer = self.uses is not STEPS

        batch = (sizes.batch,) if kind != "unbatched" else ()
        leading = (sizes.steps, *batch) if is_layer else batch
        if kind == "batched" and options.get("batch_first"):
            leading = leading[::-1]
        order = packed_rows(kind, sizes) if "packed" in kind else None
        if order is not None:
            leading = (len(order.data),)
        values = {"input": torch.randn(*leading, sizes.inputs, dtype=dtype)}
        if with_state:
            directions = 2 if options.get("bidirectional") else 1
            count = (directions * options.get("num_layers", 1),) if is_layer else ()
            for state in self.states:
                values[state] = torch.randn(*count, *batch, sizes.hidden, dtype=dtype)
        values.update({name: p.detach().clone() for name, p in module.named_parameters()})

        def arguments(values: Values) -> tuple[Any, ...]:
            input: Any = values["input"]
            if order is not None:
                input = PackedSequence(input, *order[1:])
            return (input, state_of(values, self.states)) if with_state else (input,)

        def run(module: nn.Module, values: Values) -> list[Tensor]:
            prefix = "layer." if isinstance(module, Prepacking) else ""
            parameters = {prefix + name: values[name] for name in names}
            return tensors(torch.func.functional_call(module, parameters, arguments(values)))

        # Of a prepacked layer, one that is packed again from the weights in `values`.
        running = module
        if self.finish in (prepacked, int8):
            running = Prepacking(module, torch.qint8 if self.finish is int8 else None)
        return Sample(
            name,
            values,
            partial(run, running),
            partial(run, plain),
            self.states,
            options,
            self.finish(module),
            arguments,
            lambda: self.finish(self.make(**options).to(dtype)),
            kind,
        )


def state_of(values: Values, states: tuple[str, ...]) -> Any:
    """As a module takes it: a pair, or the one state of a cell without c."""
    found = tuple(values[state] for state in states)
    return found if len(found) > 1 else found[0]


WITH_FLOAT32 = tuple(dtype for dtype in DTYPES if dtype != torch.float64)


def forms() -> Iterator[Form]:
    checkpoints = partial(support.checkpointed_outputs, 2)
    yield Form("functional.cell", of_cell, steps=False, torch_module=nn.LSTMCell)
    yield Form("functional.sequence", partial(of_sequence, support.sequence_outputs))
    yield Form("functional.sequence, checkpoints", partial(of_sequence, checkpoints))
    function = partial(of_sequence, partial(support.prepacked_outputs, None))
    yield Form("functional.sequence_prepacked", function, trainable=False, prepacked=True)
    function = partial(of_sequence, partial(support.prepacked_outputs, torch.qint8))
    yield Form(
        "functional.sequence_prepacked, int8",
        function,
        WITH_FLOAT32,
        trainable=False,
        quantised=True,
        prepacked=True,
    )
    for name, cell in CELLS.items():
        step = partial(Modules, STEPS, states=cell.states)
        uses = LAYERS if name == "LLTM" else SOME_LAYERS
        layer = partial(Modules, uses, states=cell.states)
        of_step: dict[str, Any] = {"steps": False, "torch_module": cell.torch_step}
        of_step.update(dtypes=cell.dtypes)
        of_layer: dict[str, Any] = {"torch_module": cell.torch_layer, "dtypes": cell.dtypes}
        ours, plain = cell.layer, cell.plain_layer
        with_checkpoints = partial(ours, checkpoint_steps=2)
        yield Form(f"{name}Cell", step(cell.step, cell.plain_step), make=cell.step, **of_step)
        yield Form(name, layer(ours, plain), make=ours, **of_layer)
        of_layer.update(dtypes=cell.dtypes_of_others)
        yield Form(
            f"{name}, checkpoints",
            layer(with_checkpoints, plain),
            make=with_checkpoints,
            **of_layer,
        )
        of_layer.update(make=ours, trainable=False)
        yield Form(f"{name}, evaluation", layer(ours, plain, finish=evaluated), **of_layer)
        of_layer.update(prepacked=True)
        yield Form(f"Prepacked{name}", layer(ours, plain, finish=prepacked), **of_layer)
        yield Form(
            f"Prepacked{name}, int8",
            layer(ours, plain, finish=int8),
            quantised=True,
            **{**of_layer, "dtypes": tuple(d for d in cell.dtypes_of_others if d in WITH_FLOAT32)},
        )
        # What the others are compared with: in the opposite direction.
        of_plain: dict[str, Any] = {"plain": True, "dtypes": cell.dtypes_of_others}
        yield Form(
            f"reference.{name}Cell",
            step(cell.plain_step, cell.step),
            make=cell.plain_step,
            steps=False,
            **of_plain,
        )
        yield Form(f"reference.{name}", layer(plain, ours), make=plain, **of_plain)


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
    """Gives a test `form` and `dtype`."""
    return pytest.mark.parametrize(("form", "dtype"), cases(dtypes, where), ids=id_of)


def id_of(value: Any) -> str:
    """Of a parameter of a test: the same in every process."""
    return getattr(value, "__name__", str(value).removeprefix("torch."))
