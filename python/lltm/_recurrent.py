"""Parameters and operator calls shared by the modules of all cells.

Symbols: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from . import _check
from .integrations import fx, schema, sharding

Class = TypeVar("Class", bound=type)

# A docstring's arguments or shapes, and their entries.
_SECTION = re.compile(r"^    (Args|Shape):(?: \.\.\.)?\n((?: {8,}.*\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {8}(?:- )?(\w+).*\n(?: {9,}.*\n)*", re.MULTILINE)


def documented(cls: Class) -> Class:
    """Class decorator that completes the arguments and shapes in the class's docstring.

    In `Args: ...` and `Shape: ...`, the dots stand for the base class's entries. The following
    entries are added, or replace entries with the same name.
    """
    of_bases = (dict(_SECTION.findall(base.__doc__ or "")) for base in cls.__mro__[1:])
    inherited: dict[str, str] = next(filter(None, of_bases), {})

    def complete(section: re.Match[str]) -> str:
        name, lines = section.groups()
        entries = {m[1]: m[0] for m in _ENTRY.finditer(inherited[name] + lines)}
        order = inspect.signature(cls).parameters if name == "Args" else entries
        return f"    {name}:\n{''.join(entries[key] for key in order)}"

    if cls.__doc__:  # None with python -OO
        cls.__doc__ = _SECTION.sub(complete, cls.__doc__)
    return cls


class Recurrent(nn.Module):
    """Subclasses describe their cell, its states and parameters."""

    _CELL: str  # built-in cell name, or serialized custom cell
    _where: str  # prefix in error messages
    # User's state names. With a single state, hx is a tensor, otherwise a tuple.
    _STATES: tuple[str, ...]
    # Names of the values that a layer returns of each step. If empty: h, not in a tuple.
    _OUTPUTS: tuple[str, ...] = ()
    # Parameter names for a direction. In layers, these are stems (names_of).
    _parameter_names: tuple[str, ...] = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    _TORCH: type[nn.Module] | None = None  # the torch.nn class that lltm.replace_ replaces
    # Attributes that only the constructor sets.
    _FIXED: frozenset[str] = frozenset(["heads", "bias"])

    input_size: int
    hidden_size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__orig_bases__" not in vars(cls):  # dill rebuilds a class with an inherited one
            cls.__orig_bases__ = cls.__bases__  # type: ignore[attr-defined]

    def __init__(self) -> None:
        # The torch.nn base of cells would create other parameters.
        skipped: Any = nn.RNNCellBase if isinstance(self, nn.RNNCellBase) else Recurrent
        super(skipped, self).__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        old = vars(self).get(name, value) if name in self._FIXED else value
        if old is not value and old != value:
            raise AttributeError(
                f"lltm::{self._where}: cannot set {name}: the constructor determines it; create"
                " another module"
            )
        super().__setattr__(name, value)

    def _get_name(self) -> str:  # print(model) shows the modules that replace_ replaced
        cls = type(self)
        return "lltm." * (cls.__module__ == "lltm.modules") + cls.__name__

    def _states_of(self, hx: Any) -> list[Tensor]:
        """Checks hx."""
        if hx is None:
            return []
        if isinstance(hx, Proxy):
            return fx.listed(hx, len(self._STATES))  # type: ignore[no-any-return]
        if len(self._STATES) == 1:
            return [_check.tensor(self._where, self._STATES[0], hx)]
        return _check.states(self._where, self._STATES, hx, "hx")

    def _returned(self, states: Sequence[Tensor]) -> Any:
        # By index, because a torch.fx proxy has no length.
        count = len(self._STATES)
        return states[0] if count == 1 else tuple(states[k] for k in range(count))

    def _results(self, output: Any, states: Sequence[Tensor]) -> tuple[Any, Any]:
        """Returns the results of a layer. More outputs follow the states."""
        first, more = len(self._STATES), range(len(self._OUTPUTS) - 1)
        outputs = (output, *(states[first + k] for k in more)) if self._OUTPUTS else output
        return outputs, self._returned(states)

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """A direction's parameter shapes with `columns` input features."""
        hidden = self.hidden_size
        x_blocks, h_blocks, *_ = torch.ops.lltm._cell(self._CELL)
        x, h = ((1 + max(blocks)) * hidden for blocks in (x_blocks, h_blocks))
        of_gates = {
            "weights": (x, hidden + columns),  # [W_hh, W_ih], for the LLTM
            "bias": (x,),
            "weight_ih": (x, columns),
            "weight_hh": (h, hidden),
            "bias_ih": (x,),
            "bias_hh": (h,),
        }
        return {name: of_gates.get(name, (hidden,)) for name in self._parameter_names}

    def _register(
        self, names: Sequence[str], columns: int, bias: bool, device: Any, dtype: Any
    ) -> None:
        """Registers a direction's parameters. Without `bias`, biases are None."""
        for name, (stem, shape) in zip(names, self._shapes(columns).items(), strict=True):
            value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            absent = stem in ("bias", "bias_ih", "bias_hh") and not bias
            self.register_parameter(name, None if absent else value)

    def reset_parameters(self) -> None:
        """Initializes every parameter uniformly in ±1/sqrt(H)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


def calls_kernels() -> bool:
    """True if the call is neither compiled nor traced."""
    return not (torch.compiler.is_dynamo_compiling() or fx.is_tracing())


def in_older_onnx_export() -> bool:
    """Returns True if torch.onnx.export(dynamo=False) traces the call."""
    return torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export()


# Options of layers that are 0 outside training. The attribute _{option}_now has the current value.
IN_TRAINING = ("dropout", "recurrent_dropout")


def torch_form(module: Any, reset: Any = None) -> Callable[..., Any]:
    """Returns torch.nn's forward of a module, for exporters that do not support operators."""
    more = reset is not None or getattr(module, "recurrent_dropout", 0) != 0
    if module._TORCH is None or more:
        raise NotImplementedError(
            f"lltm::{module._where}: torch.onnx.export(dynamo=False) supports only layers and cells"
            " of torch.nn, without reset and recurrent_dropout; export with dynamo=True"
        )
    return functools.partial(module._TORCH.forward, module)


def options_of(name: str) -> tuple[str, ...]:
    """Returns the module attributes that an operator receives after the parameters."""
    other = {option: f"_{option}_now" for option in IN_TRAINING} | {"prepacked": "_prepacked"}
    options = schema.options(getattr(torch.ops.lltm, name).default)
    return tuple(other.get(option, option) for option in options)


def operator(name: str, parameters: Sequence[str], options: Sequence[str]) -> Callable[..., Any]:
    """Returns a function that calls an operator with a module, input, states and other arguments.

    `parameters` and `options` name module attributes, which become arguments.
    """

    def call(
        module: Any, input: Tensor, states: list[Tensor], *rest: Any, **named_rest: Any
    ) -> Any:
        if type(input) is not Tensor:
            sharding.prepare(input)
        named = (getattr(module, name) for name in parameters)
        tensors = [tensor for tensor in named if tensor is not None]
        given = [module._CELL, input, states, tensors, *[getattr(module, n) for n in options]]
        return _check.call(getattr(torch.ops.lltm, name), *given, *rest, **named_rest)

    return call


def step_of(module: Any, input: Tensor, hx: Any, run: Callable[..., Any]) -> Any:
    """Forward of a single-step module by `run(module, input, states)`."""
    where = module._where
    _check.tensor(where, "input", input)
    return module._returned(run(module, input, module._states_of(hx)))


def layer_of(module: Any, input: Any, hx: Any, reset: Any, run: Callable[..., Any]) -> Any:
    """Forward of a layer by `run(module, input, states)`.

    For a PackedSequence, `run` also receives batch_sizes, sorted_indices and unsorted_indices. If
    given, reset is passed by keyword. `run` returns the output, and the states with more outputs.
    """
    where = module._where
    rows: Any = input
    parts: list[Any] = []
    if isinstance(input, PackedSequence):
        rows, *parts = input
        _check.tensor(where, "input", rows)
        if hx is None and torch.compiler.is_compiling():
            hx = module._first_states(rows, _packed_batch(where, input))
    elif _check.is_nested(input):
        raise TypeError(
            f"lltm::{where}: expected input to be a tensor or a PackedSequence, got a nested"
            " tensor; convert it with torch.nn.utils.rnn.pack_sequence(input.unbind(),"
            " enforce_sorted=False)"
        )
    else:
        _check.tensor(where, "input", input, "a tensor or a PackedSequence")
    _check.optional_tensor(where, "reset", reset)
    last = {} if reset is None else {"reset": reset}
    output, states = run(module, rows, module._states_of(hx), *parts, **last)
    outputs, state = module._results(output, states)
    if parts and module._OUTPUTS:
        return tuple(PackedSequence(output, *parts) for output in outputs), state
    return PackedSequence(outputs, *parts) if parts else outputs, state


def names_of(stems: Sequence[str], num_layers: int, bidirectional: bool) -> tuple[str, ...]:
    """Names by layer and direction, in the order of h_0 and h_n."""
    return tuple(
        f"{stem}_l{layer}{suffix}"
        for layer in range(num_layers)
        for suffix in (("", "_reverse") if bidirectional else ("",))
        for stem in stems
    )


def _packed_batch(where: str, packed: PackedSequence) -> int:
    """The batch size in a traced graph.

    It comes from a shape if possible. A size from the batch_sizes tensor is data-dependent, and
    tracers cannot compare it.
    """
    sizes = packed.batch_sizes
    _check.shape(where, "batch_sizes", sizes, (sizes.numel(),))
    if packed.sorted_indices is not None:
        return packed.sorted_indices.shape[0]
    if sizes.dtype != torch.int64:
        raise TypeError(
            f"lltm::{where}: expected batch_sizes of dtype int64, got {_check.dtype(sizes.dtype)};"
            " torch.export can't trace pack_padded_sequence: pack outside and pass data and"
            " batch_sizes"
        )
    if sizes.shape[0] == 0:
        return 0
    batch: int = sizes[0].item()  # type: ignore[assignment]
    return batch
