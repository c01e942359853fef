"""Drop-in replacements for torch.nn.LSTM, GRU and RNN that run faster on CPUs, and custom cells.

    lltm.replace_(model)       replaces the recurrent torch.nn modules in a model
    lltm.LSTM, lltm.GRU, lltm.RNN, lltm.LSTMCell, lltm.GRUCell, lltm.RNNCell
                               modules compatible with torch.nn
    lltm.LLTM, lltm.LLTMCell   an LSTM without a forget gate
    lltm.PrepackedLSTM, lltm.PrepackedGRU, lltm.PrepackedRNN, lltm.PrepackedLLTM
                               layers for repeated inference, from prepack()
    @lltm.cell                 creates a custom cell, lltm.Cell, from a function
    lltm.CustomLayer, lltm.CustomCell
                               base classes of its modules
    lltm.cells                 cells from the literature, such as lltm.cells.slstm
    lltm.layer_norm            layer norm of gates in a custom cell's function, also joint
    lltm.scalar                parameter of a custom cell with one value
    lltm.functional            steps and sequences as functions
    lltm.realtime.save(layer, path)
                               for C++ programs without PyTorch, one sample at a time
    lltm.reference             readable definitions in eager PyTorch operations
    lltm.testing               tests of custom cells
    lltm.backends              settings, such as lltm.backends.cuda.persistent
    lltm.ArgumentError         wrong shape or value, a ValueError and RuntimeError
    lltm.decompositions()      for torch.export and compiler backends
    lltm.inductor_decomposed   torch.compile backend that applies the decompositions
    lltm.include_dir           folder of the C++ headers, <lltm/lltm.h>
    lltm.cmake_prefix_path     for find_package(lltm) in CMake
    lltm.build_info()          build configuration of the native library

`python -m lltm` prints a report on this environment.
"""

from __future__ import annotations

import os

from . import _native  # loads the library

# isort: split
from . import _C
from . import backends as backends
from . import cells as cells
from . import functional as functional
from . import modules as modules
from . import realtime as realtime
from . import reference as reference
from . import testing as testing
from ._C import ArgumentError
from ._replace import Replaced, replace_
from .custom.cell import Cell, cell
from .custom.means import layer_norm
from .custom.modules import CustomCell, CustomLayer
from .custom.program import scalar
from .integrations import flops as flops
from .integrations.decompositions import decompositions
from .integrations.inductor import inductor_decomposed
from .integrations.onnx import register
from .modules import *  # noqa: F403 (its __all__)

__all__ = [*modules.__all__, "ArgumentError", "Cell", "CustomCell", "CustomLayer", "Replaced"]
__all__ += ["__version__", "backends", "build_info", "cell", "cells", "cmake_prefix_path"]
__all__ += ["decompositions", "functional", "include_dir", "inductor_decomposed", "layer_norm"]
__all__ += ["realtime", "reference", "replace_", "scalar", "testing"]

register()

__version__: str = _C.version()

include_dir: str = os.path.join(_native.folder, "include")
cmake_prefix_path: str = _native.folder


def build_info() -> str:
    """Returns the build configuration of the native library as lines `name: value`."""
    return _C.build_info()
