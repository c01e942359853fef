# The native module (python/bindings.cpp): these two calls, and the members of _binding.py.

from collections.abc import Sequence
from typing import Any

from ._binding import *  # noqa: F403 (its __all__)

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
