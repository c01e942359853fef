"""Loads the liblltm that was built for the installed torch.

torch's C++ ABI is stable only within a minor release. So a wheel has the native part (lib/,
include/, lltm._C) for each supported minor release: in the package's folder for _built_with.TORCH,
and in its subfolder `torch<major>.<minor>/` for any other.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .integrations.schema import named

try:
    from . import _built_with
except ImportError:
    raise ImportError(
        f"lltm: expected an installed package, got the sources in {os.path.dirname(__file__)}:"
        " start Python in another folder, and install lltm with"
        " `pip install --no-build-isolation .`"
    ) from None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _find() -> str:
    """Returns the native part's folder for the installed torch, or raises ImportError."""
    # The library is next to _built_with. In an editable install, this file is elsewhere.
    package = os.path.dirname(os.path.abspath(_built_with.__file__))
    built, found = _built_with.TORCH, str(torch.__version__)
    if _minor(found) == _minor(built):
        return package
    other = os.path.join(package, f"torch{_minor(found)}")
    if os.path.isdir(other):
        return other
    others = sorted(name[5:] for name in os.listdir(package) if name.startswith("torch"))
    raise ImportError(
        f"lltm was built against torch {', '.join([*others, built])} and cannot be loaded with"
        f" torch {found}: install torch=={_minor(built)}.*, or build lltm again in this"
        " environment, from its source folder, with"
        " `pip install --no-build-isolation --force-reinstall --no-deps .`"
    )


def _import_binding() -> None:
    """Imports a replacement if lltm._C was compiled for another Python version."""
    try:
        importlib.import_module("lltm._C")
    except ModuleNotFoundError as error:
        if error.name != "lltm._C":
            raise
        sys.modules["lltm._C"] = importlib.import_module("lltm._binding")


def _on_one_device(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Moves batch_sizes from the CPU: PyTorch calls no Meta kernel with two fake devices."""
    given = named(op, args, kwargs)
    input, sizes = given["input"], given["batch_sizes"]
    if sizes is not None and sizes.is_cpu and not input.is_cpu:
        with mode:
            given["batch_sizes"] = torch.empty(sizes.shape, dtype=sizes.dtype, device=input.device)
        args, kwargs = tuple(given.values()), {}
    return mode.__torch_dispatch__(op, types, args, kwargs)


folder = _find()
_library = os.path.join(folder, "lib", f"liblltm.{'dylib' if sys.platform == 'darwin' else 'so'}")
try:
    torch.ops.load_library(_library)  # registers torch.ops.lltm.*
except OSError as error:
    reason = error.__cause__ or error  # torch's message only names the library
    raise ImportError(f"lltm: {_library} cannot be loaded: {reason}") from error
sys.modules["lltm"].__path__.insert(0, folder)  # search path of lltm._C
_import_binding()
if "of_python" in vars(torch.ops.lltm):
    raise ImportError(
        "lltm: its modules were reloaded or removed from sys.modules, but PyTorch keeps what they"
        " registered: restart Python"
    )
vars(torch.ops.lltm)["of_python"] = True
for _op in ("sequence", "sequence_forward", "sequence_backward"):
    torch.library.register_torch_dispatch(f"lltm::{_op}", FakeTensorMode, _on_one_device)
