# The native module (python/bindings.cpp): these two calls, and the members of _binding.py.

from collections.abc import Sequence
from typing import Any

from ._binding import *  # noqa: F403 (its __all__)

def save_realtime(
    cell: str,
    parameters: Sequence[Any],
    bias: bool,
    num_layers: int,
    hidden_size: int,
    path: str,
) -> None: ...
def layer_step(
    module: Any, input: Any, hx: Any, parameters: tuple[str, ...], options: tuple[str, ...], /
) -> Any: ...
def layer(
    module: Any,
    input: Any,
    hx: Any,
    parameters: Sequence[str],
    options: tuple[str, ...],
    reset: Any,
    /,
) -> Any: ...
