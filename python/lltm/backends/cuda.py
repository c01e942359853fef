"""Settings for sequences on a GPU.

    lltm.backends.cuda.persistent = False

    with lltm.backends.cuda.flags(persistent=False):
        output, state = layer(input)

If `persistent` is True, float16 and bfloat16 sequences may use persistent kernels, which keep the
recurrent weights on the chip. The default is True.
The setting applies to all forward and backward calls that start later, on every thread. Calls that
the persistent kernels do not support use the per-step engine.
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
    """Context manager that sets `persistent` for calls that start inside the block.

    Args:
        persistent (bool): value of the setting inside the block
    """
    before = _C.cuda_persistent()
    _C.set_cuda_persistent(persistent)
    try:
        yield
    finally:
        _C.set_cuda_persistent(before)


class _Settings(ModuleType):
    """Module type with an attribute that liblltm stores."""

    @property
    def persistent(self) -> bool:
        return _C.cuda_persistent()

    @persistent.setter
    def persistent(self, enabled: bool) -> None:
        _C.set_cuda_persistent(enabled)


sys.modules[__name__].__class__ = _Settings
