"""TorchScript forms of the modules, which torch.jit.script compiles.

TorchScript needs fixed types and attribute names. So forward accepts tensors here, forward_packed
accepts a PackedSequence, and both name every parameter: they are generated.

torch.jit.script leaves the scriptable form in the parent module. So the form's class is a subclass
of the module's class. It shares all attributes with the module and behaves like it in Python. Its
pickles and copies are the original module.
"""

from __future__ import annotations

import copyreg
import functools
import keyword
import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from .._recurrent import IN_TRAINING
from . import schema

# The names that sources use.
_NAMES: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "is_scripting": is_scripting}
_NAMES["PackedSequence"] = PackedSequence

# The methods of the forms. TorchScript needs the types of hx and output.
_CELL = """
class Form:
    def forward(self, input: Tensor, hx: {State} | None = None) -> {State}:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        states = torch.ops.lltm.layer_step({arguments})
        return {state}
"""

_LAYER = """
class Form:
    def run_operator(
        self,
        input: Tensor,
        hx: {State} | None,
        batch_sizes: Tensor | None,
        sorted_indices: Tensor | None,
        unsorted_indices: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[{Output}, {State}]:
        output, states = torch.ops.lltm.layer({arguments})
        return {output}, {state}

    def forward(
        self, input: Tensor, hx: {State} | None = None, reset: Tensor | None = None
    ) -> tuple[{Output}, {State}]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        return self.run_operator(input, hx, None, None, None, reset)

    @torch.jit.export
    def forward_packed(
        self, input: PackedSequence, hx: {State} | None = None, reset: Tensor | None = None
    ) -> tuple[{PackedOutput}, {State}]:
        if not is_scripting():
            return self(input, hx, reset)
        rows, sizes, order, inverse = input
        output, state = self.run_operator(rows, hx, sizes, order, inverse, reset)
        return {packed}, state
"""


@functools.cache
def _form(operator: str, parameters: tuple[str, ...], states: int, outputs: int = 0) -> type:
    """Returns a form for these parameters and numbers of states and outputs (0: not a tuple)."""

    def of_type(kind: str, count: int, is_tuple: bool) -> str:
        return f"tuple[{', '.join([kind] * count)}]" if is_tuple else kind

    def made_of(values: Sequence[str], is_tuple: bool) -> str:
        return f"({', '.join(values)},)" if is_tuple else values[0]

    more = [f"states[{states + k}]" for k in range(outputs - 1)]
    results = [f"output[{k}]" for k in range(outputs)] or ["output"]
    packed = [f"PackedSequence({name}, sizes, order, inverse)" for name in results]
    source = (_CELL if operator == "layer_step" else _LAYER).format(
        State=of_type("Tensor", states, states > 1),
        Output=of_type("Tensor", outputs, outputs > 0),
        PackedOutput=of_type("PackedSequence", outputs, outputs > 0),
        arguments=_arguments(operator, parameters, states),
        state=made_of([f"states[{k}]" for k in range(states)], states > 1),
        output=made_of(["output", *more], outputs > 0),
        packed=made_of(packed, outputs > 0),
    )
    values = ", ".join(parameters)
    named = f"{operator} of {states} states, {outputs} outputs from {values}"
    made: type = _compiled(named, source)["Form"]
    return made


def _arguments(name: str, parameters: Sequence[str], states: int) -> str:
    """Returns a module operator's arguments, as source."""
    operator: Any = getattr(torch.ops.lltm, name).default
    given = "hx" if states == 1 else ", ".join(f"hx[{k}]" for k in range(states))
    values = {
        "cell": "self._CELL",
        "states": f"[] if hx is None else [{given}]",
        "parameters": f"[{', '.join(parameters)}]",
        **{name: f"self.{name}" for name in schema.options(operator)},
        **{name: f"self.{name} if self.training else 0.0" for name in IN_TRAINING},
        "prepacked": "self._prepacked",
    }
    return ", ".join(values.get(a.name, a.name) for a in operator._schema.arguments)


def _compiled(name: str, source: str) -> dict[str, Any]:
    """Returns the names that a source defines. TorchScript reads the source from linecache."""
    file = f"<lltm {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": __name__, **_NAMES}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace


def cell(module: Any) -> nn.Module:
    """Returns the scriptable form of a single-step module."""
    tensors = _tensors(module, module._parameter_names)
    form = _form("layer_step", tensors, len(module._STATES))
    return _sharing(module, form, ["_CELL"])


def layer(module: Any, constants: Sequence[str] = (), saved: tuple[Any, ...] = ()) -> nn.Module:
    """Returns the scriptable form of a layer."""
    sizes = len(module._STATES), len(module._OUTPUTS)
    form = _form("layer", _tensors(module, module._names), *sizes)
    # TorchScript finds class attributes, such as defaults, only if they are constants.
    options = schema.options(torch.ops.lltm.layer.default)
    defaults = (name for name in options if hasattr(type(module), name))
    return _sharing(module, form, ["_CELL", "_prepacked", *defaults, *constants], saved)


def prepacked(module: Any) -> nn.Module:
    """Returns the scriptable form of a prepacked layer."""
    buffers = tuple(
        (packed, _present(module, others)) for packed, _, others in module._directions()
    )
    options = [name for name in vars(module) if name in module._FIXED]
    return layer(module, options, (buffers, len(module._saved_matrices)))


def _tensors(module: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the source of the operator's parameters."""
    if parametrize.is_parametrized(module):
        raise NotImplementedError(
            f"lltm::{type(module).__name__}: torch.jit.script can't compile parametrizations;"
            " torch.nn.utils.parametrize.remove_parametrizations leaves plain parameters"
        )
    held = {*module._parameters, *module._buffers, *vars(module)}
    if once := [name for name in names if name not in held]:
        raise NotImplementedError(
            f"lltm::{module._where}: torch.jit.script can't compile functions of parameters"
            f" ({', '.join(once)}); use torch.export, or script prepack() of a layer, which holds"
            " their values"
        )
    return tuple(f"self.{name}" for name in _present(module, names))


def _present(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of tensors, which become source."""
    for name in names:
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise ValueError(f"lltm: expected the name of a tensor, got {name!r}")
    return tuple(name for name in names if getattr(module, name) is not None)


def _sharing(
    module: nn.Module, form: type, constants: list[str], saved: tuple[Any, ...] = ()
) -> nn.Module:
    base: Any = type(module)
    cls = _subclass(base, form, tuple(constants), saved)
    scriptable: nn.Module = cls.__new__(cls)
    object.__setattr__(scriptable, "__dict__", vars(module))
    return scriptable


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    # Like copyreg.__newobj__, which pickle rejects for other classes.
    return cls.__new__(cls, *args)


@functools.cache
def _subclass(base: Any, form: type, constants: tuple[str, ...], saved: tuple[Any, ...]) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        original = base.__new__(base)
        object.__setattr__(original, "__dict__", vars(self))
        make, *rest = original.__reduce_ex__(protocol)
        return _new if make is copyreg.__newobj__ else make, *rest  # type: ignore[attr-defined]

    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward_in_python": base.forward,
        "__reduce_ex__": reduce,
        "__constants__": list(constants),
        # Otherwise TorchScript would read the base's annotations, which are strings.
        "__annotations__": {"_CELL": str},
        # TorchScript would compile properties, too.
        "__jit_unused_properties__": [
            name for name in dir(base) if isinstance(getattr(base, name), property)
        ],
    }
    if saved:
        namespace.update(
            _unpacked_state(*saved),
            getstate_in_python=base.__getstate__,
            setstate_in_python=base.__setstate__,
        )
    return type(base.__name__, (form, base), namespace)


def _unpacked_state(buffers: Sequence[tuple[str, Sequence[str]]], matrices: int) -> dict[str, Any]:
    """Compiles the methods with which TorchScript saves and loads a prepacked layer.

    Packed weights depend on the CPU. So a file has unpacked weights, which loading packs.
    """
    get, load = [], []
    for k, (packed, others) in enumerate(buffers):
        values = ", ".join(f"self.{name}" for name in others)
        get.append(f"torch.ops.lltm._unpack(self._CELL, self.{packed}) + [{values}]")
        unpacked = ", ".join(f"saved[{k}][{n}]" for n in range(matrices))
        prepack = "_prepack_int8" if matrices == 4 else "prepack"
        load.append(f"self.{packed} = torch.ops.lltm.{prepack}(self._CELL, {unpacked})")
        load += [f"self.{name} = saved[{k}][{matrices + n}]" for n, name in enumerate(others)]
    source = _STATE.format(saved=", ".join(get), load="\n        ".join(load))
    methods = _compiled(f"state of {buffers} from {matrices} matrices", source)
    return {name: torch.jit.export(methods[name]) for name in ("__getstate__", "__setstate__")}


_STATE = """
def __getstate__(self) -> tuple[list[list[Tensor]], bool]:
    if not is_scripting():
        return self.getstate_in_python()
    return [{saved}], self.training

def __setstate__(self, state: tuple[list[list[Tensor]], bool]) -> None:
    if not is_scripting():
        self.setstate_in_python(state)
    else:
        saved, training = state
        {load}
        self.training = training
"""
