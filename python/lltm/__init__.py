"""Faster torch.nn.LSTM and torch.nn.GRU on CPUs, and the Long-Long-Term-Memory unit.

    lltm.LSTM, lltm.GRU, lltm.RNN
                               torch.nn's, with their parameters and results
    lltm.LSTMCell, lltm.GRUCell, lltm.RNNCell
    lltm.replace_(model)       makes them of torch.nn's in a model
    @lltm.cell                 makes a cell of your own of a function, lltm.Cell; its modules
    lltm.CustomLayer, lltm.CustomCell
    lltm.LLTM, lltm.LLTMCell   an LSTM without a forget gate, used like torch.nn.LSTM
    lltm.PrepackedLSTM, lltm.PrepackedGRU, lltm.PrepackedRNN, lltm.PrepackedLLTM
                               layers for repeated inference, from prepack()
    lltm.functional            the LLTM as functions
    lltm.reference             the same in plain PyTorch operations, for reading and comparing
    lltm.testing               the check of such a cell against its function
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
from . import backends as backends
from . import functional as functional
from . import modules as modules
from . import reference as reference
from . import testing as testing
from ._C import ArgumentError
from ._replace import Replaced, replace_
from .custom.cell import Cell, cell
from .custom.modules import CustomCell, CustomLayer
from .integrations import flops as flops
from .integrations.decompositions import decompositions
from .integrations.inductor import inductor_decomposed
from .integrations.onnx import register
from .modules import *  # noqa: F403 (its __all__)

__all__ = [
    *modules.__all__,
    "ArgumentError",
    "Cell",
    "CustomCell",
    "CustomLayer",
    "Replaced",
    "__version__",
    "backends",
    "build_info",
    "cell",
    "cmake_prefix_path",
    "decompositions",
    "functional",
    "include_dir",
    "inductor_decomposed",
    "reference",
    "replace_",
    "testing",
]

register()

__version__: str = _C.version()

include_dir: str = os.path.join(_native.folder, "include")
cmake_prefix_path: str = _native.folder


def build_info() -> str:
    """Returns how the native library was built, one `name: value` a line."""
    return _C.build_info()
