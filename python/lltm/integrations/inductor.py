"""The switch between our kernels and the decomposition in code that Inductor generates."""

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
    """A backend of torch.compile: Inductor, with lltm's operators written in ATen operations.

    The default backend calls the kernels of this library from the code that it generates. With this
    one there is nothing of them left, forward and backward: Inductor fuses the element-wise part of
    a step with what stands around it. A sequence of fixed length is unrolled, so compiling it takes
    the longer the more steps there are; with ``dynamic=True`` it becomes a loop. A packed sequence
    keeps our kernels, and so does training with checkpoint_steps. `mode` and `options` are those of
    torch.compile.

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
    # Calls that keep our kernels. Inductor would do this itself, but not for an operator that has
    # a decomposition.
    for op in ours():
        if op not in lowerings:
            make_fallback(op, warn=False, override_decomp=True)
    # Inductor's loop reads its counter, which fake tensors allow only where fullgraph is asked for.
    fake_mode = detect_fake_mode(inputs)
    if fake_mode is not None:
        fake_mode.allow_scalar_outputs = True
    # The cache of AOTAutograd does not tell decomposition tables apart: it would return what the
    # default backend has made of the same model. Inductor's own cache sees the decomposed graph.
    with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        compiled: Any = compile_fx(
            graph,
            inputs,
            config_patches={**(list_mode_options(mode) if mode else {}), **(options or {})},
            decompositions=table,
        )
    result: Callable[..., Any] = compiled
    return result
