"""Forms of the modules that torch.jit.script compiles.

TorchScript has no values of several types, so no PackedSequence beside a tensor, and no attribute
whose name is put together. So what it compiles here takes tensors, and the one method that names
every parameter is written out for the layer at hand.

The parent of a module keeps what torch.jit.script was given in its place. So that nothing changes
for the parent, it is of a subclass of the module's class, shares its attributes, all of them, and
does in Python what the module did; pickled or copied it is the module again.
"""

# Not `from __future__ import annotations`: TorchScript reads types, not their names.

import functools
import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils import parametrize


class _Cell:
    input_size: int
    hidden_size: int
    weights: Tensor
    bias: Tensor | None
    forward_in_python: Callable[..., tuple[Tensor, Tensor]]

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        if input.dim() < 1 or input.dim() > 2 or input.size(-1) != self.input_size:
            raise ValueError(
                f"lltm::LLTMCell: expected input of shape (B, {self.input_size}) or"
                f" ({self.input_size},), got {input.shape}"
            )
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            h = torch.zeros(x.size(0), self.hidden_size, dtype=x.dtype, device=x.device)
            c = h
        else:
            h, c = hx
            if not batched:
                h, c = h.unsqueeze(0), c.unsqueeze(0)
        h, c = torch.ops.lltm.cell(x, h, c, self.weights, self.bias)
        if not batched:
            h, c = h.squeeze(0), c.squeeze(0)
        return h, c


class _Layer:
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool
    forward_in_python: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]
    scripted_direction: Any

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not is_scripting():
            return self.forward_in_python(input, hx)
        if input.dim() < 2 or input.dim() > 3 or input.size(-1) != self.input_size:
            raise ValueError(
                "lltm::LLTM: expected input of 3 dimensions, or 2 without a batch, the last of"
                f" size {self.input_size}, got shape {input.shape}"
            )
        batched = input.dim() == 3
        x = input
        if not batched:
            x = input.unsqueeze(1)
        elif self.batch_first:
            x = input.transpose(0, 1)
        directions = 2 if self.bidirectional else 1
        shape = [self.num_layers * directions, x.size(1), self.hidden_size]
        if hx is None:
            h_0 = torch.zeros(shape, dtype=x.dtype, device=x.device)
            c_0 = h_0
        else:
            h_0, c_0 = hx
            if not batched:
                h_0, c_0 = h_0.unsqueeze(1), c_0.unsqueeze(1)
            if list(h_0.shape) != shape:
                raise ValueError(f"lltm::LLTM: expected h_0 of shape {shape}, got {hx[0].shape}")
            if list(c_0.shape) != shape:
                raise ValueError(f"lltm::LLTM: expected c_0 of shape {shape}, got {hx[1].shape}")
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0.0:
                x = nn.functional.dropout(x, self.dropout, self.training)
            outputs: list[Tensor] = []
            for _ in range(directions):
                k = len(hs)
                output, h, c = self.scripted_direction(k, x, h_0[k], c_0[k])
                outputs.append(output)
                hs.append(h)
                cs.append(c)
            x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
        h_n, c_n = torch.stack(hs), torch.stack(cs)
        if not batched:
            return x.squeeze(1), (h_n.squeeze(1), c_n.squeeze(1))
        if self.batch_first:
            x = x.transpose(0, 1)
        return x, (h_n, c_n)


def cell(module: nn.Module) -> nn.Module:
    cls: Any = type(module)
    return _sharing(module, _subclass(cls, _Cell, "", ()))


def layer(module: nn.Module, op: str, names: list[tuple[str, str]], options: str = "") -> nn.Module:
    """`op` takes weights and bias of these `names`, which are in the order of h_0, and `options`,
    the text of keyword arguments."""
    cls: Any = type(module)
    return _sharing(module, _subclass(cls, _Layer, op, tuple(names), options))


def _sharing(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    if parametrize.is_parametrized(module):
        raise NotImplementedError(
            f"lltm::{module._get_name()}: torch.jit.script can't compile parametrizations;"
            " torch.nn.utils.parametrize.remove_parametrizations leaves plain parameters"
        )
    scriptable: nn.Module = cls.__new__(cls)
    object.__setattr__(scriptable, "__dict__", vars(module))
    return scriptable


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    # As copyreg.__newobj__, which pickle refuses to record for an instance of another class.
    return cls.__new__(cls, *args)


@functools.cache
def _subclass(
    base: Any, forward: type, op: str, names: tuple[tuple[str, str], ...], options: str = ""
) -> Any:
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
        # TorchScript would take the annotations of the base, which are text.
        "__annotations__": {},
        # It would compile properties too.
        "__jit_unused_properties__": [
            name for name in dir(base) if isinstance(getattr(base, name), property)
        ],
    }
    if names:
        namespace["scripted_direction"] = _direction(op, names, options)
    return type(base.__name__, (forward, base), namespace)


def _direction(op: str, names: tuple[tuple[str, str], ...], options: str) -> Any:
    """Compiles the method that runs the k-th direction."""
    lines = [
        "def scripted_direction(",
        "    self, k: int, x: Tensor, h_0: Tensor, c_0: Tensor",
        ") -> tuple[Tensor, Tensor, Tensor]:",
    ]
    for k, (weights, bias) in enumerate(names):
        reverse = weights.endswith("_reverse")
        call = (
            f"return torch.ops.lltm.{op}(x, h_0, c_0, self.{weights}, self.{bias},"
            f" {options}batch_sizes=None, reverse={reverse})"
        )
        is_last = k == len(names) - 1
        lines += [f"    {call}"] if is_last else [f"    if k == {k}:", f"        {call}"]
    source = "\n".join([*lines, ""])
    # TorchScript reads the source again, from where tracebacks find it.
    name = f"<lltm.{op} {options}{' '.join(weights for weights, _ in names)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Tensor": Tensor, "torch": torch}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace["scripted_direction"]
