"""Forms of the modules that torch.jit.script compiles.

TorchScript has no values of several types, so no PackedSequence beside a tensor, and no attribute
whose name is put together. So what it compiles here takes tensors, and a method that names every
parameter is written out for the layer at hand.

The parent of a module keeps what torch.jit.script was given in its place. So that nothing changes
for the parent, it is of a subclass of the module's class, shares its attributes, all of them, and
does in Python what the module did; pickled or copied it is the module again.
"""

# Not `from __future__ import annotations`: TorchScript reads types, not their names.
# What it reads of a cell without c differs from that of one with c.
# mypy: disable-error-code="no-any-return,override"

import functools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils import parametrize


class _Cell:
    _CELL: str
    input_size: int
    hidden_size: int
    forward_in_python: Callable[..., Any]
    scripted_parameters: Any

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h: Tensor | None = None
        c: Tensor | None = None
        if hx is not None:
            h, c = hx
        h_next, c_next = torch.ops.lltm.layer_step(
            self._CELL,
            input,
            h,
            c,
            self.scripted_parameters(),
            self.input_size,
            self.hidden_size,
        )
        return h_next, c_next


class _CellWithoutC(_Cell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h_next, _ = torch.ops.lltm.layer_step(
            self._CELL,
            input,
            hx,
            None,
            self.scripted_parameters(),
            self.input_size,
            self.hidden_size,
        )
        return h_next


class _Layer:
    _CELL: str
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    recurrent_dropout: float
    bidirectional: bool
    training: bool
    checkpoint_steps: int
    _prepacked: bool
    forward_in_python: Callable[..., Any]
    bias: bool
    scripted_parameters: Any

    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        h_0: Tensor | None = None
        c_0: Tensor | None = None
        if hx is not None:
            h_0, c_0 = hx
        output, h_n, c_n = torch.ops.lltm.layer(
            self._CELL,
            input,
            h_0,
            c_0,
            self.scripted_parameters(),
            self.bias,
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.batch_first,
            self.bidirectional,
            self.dropout if self.training else 0.0,
            self.recurrent_dropout if self.training else 0.0,
            self.checkpoint_steps,
            self._prepacked,
            reset=reset,
        )
        return output, (h_n, c_n)


class _LayerWithoutC(_Layer):
    def forward(
        self, input: Tensor, hx: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        output, h_n, _ = torch.ops.lltm.layer(
            self._CELL,
            input,
            hx,
            None,
            self.scripted_parameters(),
            self.bias,
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.batch_first,
            self.bidirectional,
            self.dropout if self.training else 0.0,
            self.recurrent_dropout if self.training else 0.0,
            self.checkpoint_steps,
            self._prepacked,
            reset=reset,
        )
        return output, h_n


def cell(module: nn.Module, names: Sequence[str], states: int) -> nn.Module:
    """`names` are those of the parameters; `states` is 2, or 1 of a cell without c."""
    return _sharing(module, _Cell if states == 2 else _CellWithoutC, names, ["_CELL"])


_CONSTANTS = ["_CELL", "checkpoint_steps", "recurrent_dropout", "_prepacked"]


def layer(module: nn.Module, names: Sequence[str], states: int) -> nn.Module:
    """`names` are those of weights and biases, in the order of h_0; `states` as of cell."""
    forward = _Layer if states == 2 else _LayerWithoutC
    return _sharing(module, forward, names, _CONSTANTS)


def _sharing(
    module: nn.Module, forward: type, names: Sequence[str], constants: list[str]
) -> nn.Module:
    if parametrize.is_parametrized(module):
        raise NotImplementedError(
            f"lltm::{module._get_name()}: torch.jit.script can't compile parametrizations;"
            " torch.nn.utils.parametrize.remove_parametrizations leaves plain parameters"
        )
    given = tuple(name for name in names if getattr(module, name) is not None)
    base: Any = type(module)
    cls = _subclass(base, forward, given, tuple(constants))
    scriptable: nn.Module = cls.__new__(cls)
    object.__setattr__(scriptable, "__dict__", vars(module))
    return scriptable


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    # As copyreg.__newobj__, which pickle refuses to record for an instance of another class.
    return cls.__new__(cls, *args)


@functools.cache
def _subclass(base: Any, forward: type, names: tuple[str, ...], constants: tuple[str, ...]) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        original = base.__new__(base)
        object.__setattr__(original, "__dict__", vars(self))
        _, args, *rest = original.__reduce_ex__(protocol)
        return _new, args, *rest

    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward_in_python": base.forward,
        "__reduce_ex__": reduce,
        "scripted_parameters": _parameters(names),
        "__constants__": list(constants),  # attributes of the class
        # TorchScript would take the annotations of the base, which are text.
        "__annotations__": {},
        # It would compile properties too.
        "__jit_unused_properties__": [
            name for name in dir(base) if isinstance(getattr(base, name), property)
        ],
    }
    return type(base.__name__, (forward, base), namespace)


def _parameters(names: tuple[str, ...]) -> Any:
    """Compiles the method that returns the parameters."""
    values = ", ".join(f"self.{name}" for name in names)
    source = f"def scripted_parameters(self) -> list[Tensor]:\n    return [{values}]\n"
    # TorchScript reads the source again, from where tracebacks find it.
    name = f"<lltm parameters {' '.join(names)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Tensor": Tensor}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace["scripted_parameters"]
