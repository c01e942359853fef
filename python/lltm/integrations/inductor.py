"""A torch.compile backend that decomposes lltm's operators instead of calling its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .decompositions import ours


def inductor_decomposed(
    graph: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """torch.compile backend: Inductor, with lltm's operators decomposed into ATen operations.

    Code from the default backend calls lltm's kernels. With this backend, Inductor instead fuses
    the element-wise part of a step with the surrounding operations, forward and backward. A
    sequence of fixed length is unrolled, so compile time grows with the number of steps. With
    ``dynamic=True`` it becomes a loop. Packed sequences and training with checkpoint_steps still
    call the kernels.

    Args:
        graph: graph to compile, from torch.compile
        inputs: example inputs, from torch.compile
        mode: the mode argument of torch.compile. Default: None
        options: the options argument of torch.compile. Default: None

    Example::

        compiled = torch.compile(model, backend=lltm.inductor_decomposed)
    """
    from torch._functorch import config
    from torch._guards import detect_fake_mode
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    table: Any = {**select_decomp_table(), **ours()}
    # For calls that are not decomposed. Inductor adds such fallbacks only for operators without a
    # decomposition.
    for op in ours():
        if op not in lowerings:
            make_fallback(op, warn=False, override_decomp=True)
    # Inductor's loop reads its counter, which fake tensors allow only with fullgraph=True.
    fake_mode = detect_fake_mode(inputs)
    if fake_mode is not None:
        fake_mode.allow_scalar_outputs = True
    # AOTAutograd's cache ignores the decomposition table: it would return the default backend's
    # result for the same model. Inductor's own cache uses the decomposed graph.
    with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        compiled: Any = compile_fx(
            graph,
            inputs,
            config_patches={**(list_mode_options(mode) if mode else {}), **(options or {})},
            decompositions=table,
        )
    result: Callable[..., Any] = compiled
    return result
