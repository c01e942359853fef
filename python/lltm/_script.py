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

import copyreg
import functools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils import parametrize


class _Cell:
    """With h and one more state."""

    _CELL: str
    input_size: int
    hidden_size: int
    forward_in_python: Callable[..., Any]
    scripted_parameters: Any

    def run_operator(
        self, input: Tensor, h: Tensor | None, c: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h: Tensor | None = None
        c: Tensor | None = None
        if hx is not None:
            h, c = hx
        return self.run_operator(input, h, c)


class _CellOfOneState(_Cell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h_next, _ = self.run_operator(input, hx, None)
        return h_next


# The operators take states besides h side by side.


class _CellOfThreeStates(_Cell):
    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h: Tensor | None = None
        c: Tensor | None = None
        if hx is not None:
            h, c_1, c_2 = hx
            c = torch.cat([c_1, c_2], -1)
        h_next, c_next = self.run_operator(input, h, c)
        next_1, next_2 = c_next.chunk(2, -1)
        return h_next, next_1, next_2


class _CellOfFourStates(_Cell):
    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        h: Tensor | None = None
        c: Tensor | None = None
        if hx is not None:
            h, c_1, c_2, c_3 = hx
            c = torch.cat([c_1, c_2, c_3], -1)
        h_next, c_next = self.run_operator(input, h, c)
        next_1, next_2, next_3 = c_next.chunk(3, -1)
        return h_next, next_1, next_2, next_3


class _Layer:
    """With h and one more state."""

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
    _has_biases: bool
    forward_in_python: Callable[..., Any]
    scripted_parameters: Any

    def run_operator(
        self, input: Tensor, h_0: Tensor | None, c_0: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, h_n, c_n = torch.ops.lltm.layer(
            self._CELL,
            input,
            h_0,
            c_0,
            self.scripted_parameters(),
            self._has_biases,
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
        return output, h_n, c_n

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
        output, h_n, c_n = self.run_operator(input, h_0, c_0, reset)
        return output, (h_n, c_n)


class _LayerOfOneState(_Layer):
    def forward(
        self, input: Tensor, hx: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        output, h_n, _ = self.run_operator(input, hx, None, reset)
        return output, h_n


class _LayerOfThreeStates(_Layer):
    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor, Tensor] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        h_0: Tensor | None = None
        c_0: Tensor | None = None
        if hx is not None:
            h_0, c_1, c_2 = hx
            c_0 = torch.cat([c_1, c_2], -1)
        output, h_n, c_n = self.run_operator(input, h_0, c_0, reset)
        last_1, last_2 = c_n.chunk(2, -1)
        return output, (h_n, last_1, last_2)


class _LayerOfFourStates(_Layer):
    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        if not is_scripting():
            return self.forward_in_python(input, hx, reset)
        h_0: Tensor | None = None
        c_0: Tensor | None = None
        if hx is not None:
            h_0, c_1, c_2, c_3 = hx
            c_0 = torch.cat([c_1, c_2, c_3], -1)
        output, h_n, c_n = self.run_operator(input, h_0, c_0, reset)
        last_1, last_2, last_3 = c_n.chunk(3, -1)
        return output, (h_n, last_1, last_2, last_3)


# By the number of states, h among them.
_CELLS = {1: _CellOfOneState, 2: _Cell, 3: _CellOfThreeStates, 4: _CellOfFourStates}
_LAYERS = {1: _LayerOfOneState, 2: _Layer, 3: _LayerOfThreeStates, 4: _LayerOfFourStates}


def given(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Operands: those of the module's parameters that it has."""
    return [f"self.{name}" for name in names if getattr(module, name) is not None]


def cell(module: nn.Module, operands: Sequence[str], states: int) -> nn.Module:
    """`operands` are expressions of the operator's parameters; `states` counts h."""
    return _sharing(module, _CELLS[states], operands, ["_CELL"])


_CONSTANTS = ["_CELL", "checkpoint_steps", "recurrent_dropout", "_prepacked", "_has_biases"]


def layer(module: nn.Module, operands: Sequence[str], states: int, has_biases: bool) -> nn.Module:
    """`operands` are those of all directions, in the order of h_0; else as cell."""
    return _sharing(module, _LAYERS[states], operands, _CONSTANTS, has_biases)


def _sharing(
    module: nn.Module,
    forward: type,
    operands: Sequence[str],
    constants: list[str],
    has_biases: bool = False,
) -> nn.Module:
    if parametrize.is_parametrized(module):
        raise NotImplementedError(
            f"lltm::{module._get_name()}: torch.jit.script can't compile parametrizations;"
            " torch.nn.utils.parametrize.remove_parametrizations leaves plain parameters"
        )
    base: Any = type(module)
    cls = _subclass(base, forward, tuple(operands), tuple(constants), has_biases)
    scriptable: nn.Module = cls.__new__(cls)
    object.__setattr__(scriptable, "__dict__", vars(module))
    return scriptable


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    # As copyreg.__newobj__, which pickle refuses to record for an instance of another class.
    return cls.__new__(cls, *args)


@functools.cache
def _subclass(
    base: Any,
    forward: type,
    operands: tuple[str, ...],
    constants: tuple[str, ...],
    has_biases: bool,
) -> Any:
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
        "scripted_parameters": _parameters(operands),
        "_has_biases": has_biases,
        "__constants__": list(constants),  # attributes of the class
        # TorchScript would take the annotations of the base, which are text.
        "__annotations__": {},
        # It would compile properties too.
        "__jit_unused_properties__": [
            name for name in dir(base) if isinstance(getattr(base, name), property)
        ],
    }
    return type(base.__name__, (forward, base), namespace)


def _parameters(operands: tuple[str, ...]) -> Any:
    """Compiles the method that returns the parameters."""
    values = ", ".join(operands)
    source = f"def scripted_parameters(self) -> list[Tensor]:\n    return [{values}]\n"
    # TorchScript reads the source again, from where tracebacks find it.
    name = f"<lltm parameters {values}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Tensor": Tensor, "torch": torch}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace["scripted_parameters"]
