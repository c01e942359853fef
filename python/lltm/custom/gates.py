"""The argument z of a cell's function while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._C import ArgumentError
from .program import expect


class NoSuchGate(ArgumentError, AttributeError):
    """Raised by z.i and z["i"] for an unknown gate."""


class NoProgram(Exception):
    """Becomes a TypeError. Operators of tensors would treat a TypeError as NotImplemented."""


def name_of(x: Any) -> str:
    """Returns the name of z or of a gate, otherwise of the type."""
    return x._name if isinstance(x, NoTensor) else type(x).__name__


def not_a_tensor(x: NoTensor, *_: Any) -> NoReturn:
    raise NoProgram(f"expected {x._expected()}")


class NoTensor:
    """An object that users may take for a tensor."""

    _name = "z"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = not_a_tensor
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = not_a_tensor
    __matmul__ = __lt__ = __le__ = __gt__ = __ge__ = not_a_tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        return not_a_tensor(next(x for x in leaves if isinstance(x, NoTensor)))

    def _expected(self) -> str:
        raise NotImplementedError


class ProductGate(NoTensor):
    """A gate that reads a product, such as z.n. Call it once, with the value that its recurrent
    weights multiply: z.n(v) is the pre-activation."""

    def __init__(self, gate: str, function: Callable[[Tensor], Tensor]) -> None:
        self._name, self.function, self.got = f"z.{gate}", function, "no call"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        values = [*args, *kwargs.values()]
        if len(values) != 1:
            self.got = f"a call with {len(values) or 'no'} values"
        if self.got != "no call":
            not_a_tensor(self)
        self.got = "a second call"
        return self.function(*values)

    __iter__ = __getitem__ = not_a_tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return not_a_tensor(self)

    def _expected(self) -> str:
        return (
            f"one call of {self._name}, which reads a product, such as {self._name}(v) with the"
            f" value v that its recurrent weights multiply, got {self.got}"
        )


class Gates(NoTensor):
    """The argument z of the function: z[0], z["i"] and z.i, and `i, o, g = z`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def _expected(self) -> str:
        first = next(iter(self._tensors))
        return f"a gate, such as z[0] or z.{first}, got z, the tuple of all gates"

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.__getattr__(key)
        try:
            return tuple(self._tensors.values())[key]
        except IndexError:
            raise self._no(f"z[{key}]") from None

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["_tensors"]:
            raise self._no(f"z.{name}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def _no(self, got: str) -> NoSuchGate:
        return NoSuchGate(f"expected one of z's {', '.join(self._tensors)}, got {got}")


def check_gates(where: str, gates: Iterable[str]) -> None:
    """Checks that z has no other attributes with the names of gates."""
    expected = "gate names that are not attributes of z"
    for gate in gates:
        expect(gate not in dir(Gates({})), where, expected, repr(gate))
