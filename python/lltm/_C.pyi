# The native module (python/bindings.cpp).

from collections.abc import Sequence
from typing import Any

from torch import Tensor

class ArgumentError(ValueError, RuntimeError): ...

def version() -> str: ...
def build_info() -> str: ...
def cpu_kernels() -> str: ...
def cuda_persistent() -> bool: ...
def set_cuda_persistent(enabled: bool) -> None: ...
def forward(
    input: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    old_h: Tensor,
    old_cell: Tensor,
) -> list[Tensor]: ...
def backward(
    grad_h: Tensor,
    grad_cell: Tensor,
    new_cell: Tensor,
    input_gate: Tensor,
    output_gate: Tensor,
    candidate_cell: Tensor,
    X: Tensor,
    gate_weights: Tensor,
    weights: Tensor,
) -> list[Tensor]: ...
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
) -> tuple[Tensor, Any] | None: ...
