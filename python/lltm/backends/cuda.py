"""How sequences run on a GPU.

    lltm.backends.cuda.persistent = True

    with lltm.backends.cuda.flags(persistent=True):
        output, state = layer(input)

`persistent` says whether sequences in float16 and bfloat16 may run by persistent kernels, which
keep the recurrent weights on the chip. The default is False: these kernels have been compiled and
tested on a CPU, and not yet run on a GPU. It holds for calls that begin from then on, forward or
backward, on every thread. What the kernels cannot take runs step by step in any case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from .. import _C

__all__ = ["flags", "persistent"]

persistent: bool


@contextmanager
def flags(persistent: bool) -> Iterator[None]:
    """Sets `persistent` for the calls that begin inside of the block."""
    before = _C.cuda_persistent()
    _C.set_cuda_persistent(persistent)
    try:
        yield
    finally:
        _C.set_cuda_persistent(before)


class _Settings(ModuleType):
    """A module with an attribute that belongs to the library."""

    @property
    def persistent(self) -> bool:
        return _C.cuda_persistent()

    @persistent.setter
    def persistent(self, enabled: bool) -> None:
        _C.set_cuda_persistent(enabled)


sys.modules[__name__].__class__ = _Settings
