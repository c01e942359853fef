"""Settings for sequences on a GPU.

    lltm.backends.cuda.persistent = False
    lltm.backends.cuda.float32 = "tf32"

    with lltm.backends.cuda.flags(persistent=False):
        output, state = layer(input)

persistent: whether sequences may use persistent kernels, which keep the recurrent weights on the
chip. Default: True. Calls that the persistent kernels do not support use the per-step engine.

float32: how float32 sequences multiply matrices::

    None        as PyTorch's matmul (default): "tf32x3" for IEEE precision, PyTorch's default;
                "tf32" if torch.set_float32_matmul_precision or
                torch.backends.cuda.matmul.fp32_precision allows TF32.
                torch.backends.cudnn.rnn.fp32_precision has no effect.
    "ieee"      in float32 arithmetic, without persistent kernels
    "tf32x3"    by three TF32 products in persistent kernels, as exact as float32
    "tf32"      in TF32, with 10 mantissa bits

The settings apply to all forward and backward calls that start later, on every thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType, ModuleType

from .. import _C

__all__ = ["flags", "float32", "persistent"]

persistent: bool
float32: str | None


@contextmanager
def flags(
    persistent: bool | EllipsisType = ..., float32: str | EllipsisType | None = ...
) -> Iterator[None]:
    """Context manager that changes settings for calls that start inside the block.

    Args:
        persistent (bool): value inside the block; omitted: unchanged
        float32 (str or None): likewise
    """
    before = _C.cuda_persistent(), _C.cuda_float32()
    try:
        if persistent is not ...:
            _C.set_cuda_persistent(persistent)
        if float32 is not ...:
            _C.set_cuda_float32(float32)
        yield
    finally:
        _C.set_cuda_persistent(before[0])
        _C.set_cuda_float32(before[1])


class _Settings(ModuleType):
    """Module type with attributes that liblltm stores."""

    @property
    def persistent(self) -> bool:
        return _C.cuda_persistent()

    @persistent.setter
    def persistent(self, enabled: bool) -> None:
        _C.set_cuda_persistent(enabled)

    @property
    def float32(self) -> str | None:
        return _C.cuda_float32()

    @float32.setter
    def float32(self, precision: str | None) -> None:
        _C.set_cuda_float32(precision)


sys.modules[__name__].__class__ = _Settings
