"""The Long-Long-Term-Memory unit for PyTorch: an LSTM without a forget gate.

    lltm.LLTMCell, lltm.LLTM   modules, used like torch.nn.LSTMCell and torch.nn.LSTM
    lltm.PrepackedLLTM         a layer for repeated inference, from LLTM.prepack()
    lltm.functional            the same as functions
    lltm.reference             the same in plain PyTorch operations, for reading and comparing
    lltm.ArgumentError         a wrong shape or value: a ValueError and a RuntimeError
    lltm.decompositions()      for torch.export and compiler backends
    lltm.inductor_decomposed   a backend of torch.compile that applies them
    lltm.include_dir           C++ headers, <lltm/lltm.h>
    lltm.cmake_prefix_path     for find_package(lltm) in CMake
    lltm.build_info()          how the native library was built

`python -m lltm` prints a report on this environment.
"""

from __future__ import annotations

import os

import torch

from . import _built_with


def _check_torch() -> None:
    """Refuses a torch that the native library can't be loaded with, before the linker does.

    torch's C++ ABI holds for one minor release.
    """
    built, found = _built_with.TORCH, str(torch.__version__)
    minor = ".".join(built.split(".")[:2])
    if found.split(".")[:2] != minor.split("."):
        raise ImportError(
            f"lltm was built against torch {built} and cannot be loaded with torch {found}:"
            f" install torch=={minor}.*, or build lltm again in this environment, from its source"
            " folder, with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )


_check_torch()

# Registers torch.ops.lltm.*, so it stands before what uses them.
from . import _C  # noqa: E402
from . import _flops as _flops  # noqa: E402
from . import functional as functional  # noqa: E402
from . import reference as reference  # noqa: E402
from ._C import ArgumentError  # noqa: E402
from ._decompositions import decompositions, register  # noqa: E402
from ._inductor import inductor_decomposed  # noqa: E402
from .modules import LLTM, LLTMCell, PrepackedLLTM  # noqa: E402

__all__ = [
    "LLTM",
    "ArgumentError",
    "LLTMCell",
    "PrepackedLLTM",
    "__version__",
    "build_info",
    "cmake_prefix_path",
    "decompositions",
    "functional",
    "include_dir",
    "inductor_decomposed",
    "reference",
]

register()

__version__: str = _C.version()

# Beside _C, which in an editable install is not where this file is.
_prefix = os.path.dirname(os.path.abspath(_C.__file__))

include_dir: str = os.path.join(_prefix, "include")
cmake_prefix_path: str = _prefix


def build_info() -> str:
    """Returns how the native library was built, one `name: value` a line."""
    return _C.build_info()
