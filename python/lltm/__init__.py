"""The Long-Long-Term-Memory unit for PyTorch: an LSTM without a forget gate.

    lltm.LLTMCell, lltm.LLTM   modules, used like torch.nn.LSTMCell and torch.nn.LSTM
    lltm.PrepackedLLTM         a layer for repeated inference, from LLTM.prepack()
    lltm.functional            the same as functions
    lltm.reference             the same in plain PyTorch operations, for reading and comparing
    lltm.backends              settings, such as lltm.backends.cuda.persistent
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

from . import _native  # loads the library

# isort: split
from . import _C
from . import _flops as _flops
from . import backends as backends
from . import functional as functional
from . import reference as reference
from ._C import ArgumentError
from ._decompositions import decompositions, register
from ._inductor import inductor_decomposed
from .modules import LLTM, LLTMCell, PrepackedLLTM

__all__ = [
    "LLTM",
    "ArgumentError",
    "LLTMCell",
    "PrepackedLLTM",
    "__version__",
    "backends",
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

include_dir: str = os.path.join(_native.folder, "include")
cmake_prefix_path: str = _native.folder


def build_info() -> str:
    """Returns how the native library was built, one `name: value` a line."""
    return _C.build_info()
