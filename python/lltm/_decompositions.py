"""The operators written in ATen operations, for compilers that have no kernel of ours.

Applied to an exported program they leave Core ATen operators only: for a sequence of a fixed
length T, the operators of T steps. Core ATen has no loop, so a dynamic length becomes the `scan`
higher-order operator, whose body is one step in Core ATen. What they can't express they leave
alone: a packed sequence, whose batch_sizes are data, and prepacked weights, which only our kernels
can read. Training with checkpoints is not decomposed either: it would save every step again.

As in the kernels, only arguments and results are float16 or bfloat16: what is computed in between,
the matrix products included, is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OperatorBase, OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from . import _cell
from ._cell import GATES, SAVED

# A gradient that is not wanted is None.
Gradients = tuple[Tensor | None, ...]


Table = dict[OperatorBase, Callable[..., Any]]


def decompositions() -> Table:
    """Returns PyTorch's default decomposition table with the operators of lltm added.

    Example::

        program = torch.export.export(layer, (input,))
        program = program.run_decompositions(lltm.decompositions())
    """
    return {**dict(torch.export.default_decompositions().items()), **ours()}


def ours() -> Table:
    """Returns the decompositions of lltm's operators alone."""
    ops = torch.ops.lltm
    return {
        ops.cell.default: _cell_inference,
        ops.cell_forward.default: _cell_forward,
        ops.cell_backward.default: _cell_backward,
        ops.sequence.default: _sequence,
        ops.sequence_forward.default: _sequence_forward,
        ops.sequence_backward.default: _sequence_backward,
    }


def register() -> None:
    """Has torch.onnx.export apply the decompositions, whose table it does not ask for.

    Not by torch's own table of decompositions, where it would look: Inductor refuses to call an
    operator with an entry there (in an environment that sets CI), and fake tensors take the entry
    for the operator's Meta kernel, so nothing would check the arguments.
    """
    table: dict[Any, Any] = {**ours(), torch.ops.lltm.sequence_prepacked.default: _prepacked}
    for op, decomposition in table.items():
        torch.library.register_torch_dispatch(
            op, ProxyTorchDispatchMode, partial(_trace, decomposition)
        )


def _trace(
    decomposition: Callable[..., Any],
    mode: ProxyTorchDispatchMode,
    op: OpOverload[..., Any],
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Enters a call of an operator into the graph that is being traced, for ONNX decomposed."""
    if not torch.onnx.is_in_onnx_export():
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode:
        result = decomposition(*args, **kwargs)
    if result is NotImplemented:
        raise NotImplementedError(
            f"{op.name()}: a packed sequence can't be written in ONNX operators, since its"
            " batch_sizes are data; export the model with padded input, (T, B, I)"
        )
    return result


def _prepacked(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "lltm::sequence_prepacked: only lltm's kernels can read prepacked weights, so they can't be"
        " written in ONNX operators; export the layer itself"
    )


def _cell_inference(
    input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    return _cell_forward(input, h, c, weights, bias)[:2]


def _cell_forward(
    input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    dtype = c.dtype
    input, h, c, weights, bias = _wide(input, h, c, weights, bias)
    z = F.linear(torch.cat([h, input], dim=1), weights, bias)
    return tuple(y.to(dtype) for y in _step(z, c))


def _cell_backward(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    activations: Tensor,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype, hidden = h.dtype, h.shape[1]
    dh, dc = _or_zeros(grad_h, h), _or_zeros(grad_c, h)
    dh, dc, input, h, weights, activations = _wide(dh, dc, input, h, weights, activations)
    dz, dc = _step_backward(activations, dh, dc)
    dX = dz @ weights
    return _wanted(
        dtype,
        output_mask,
        lambda: dX[:, hidden:],
        lambda: dX[:, :hidden],
        lambda: dc,
        lambda: dz.t() @ torch.cat([h, input], dim=1),
        lambda: dz.sum(0),
    )


def _sequence(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    checkpoint_steps: int = 0,
) -> Any:
    if batch_sizes is not None:
        return NotImplemented
    return _steps(input, h_0, c_0, weights, bias, reverse, training=False)


def _sequence_forward(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
    checkpoint_steps: int,
) -> Any:
    if batch_sizes is not None or checkpoint_steps != 0:
        return NotImplemented
    output, h_n, c_n, activations = _steps(input, h_0, c_0, weights, bias, reverse, training=True)
    return output, h_n, c_n, activations.flatten(0, 1)


def _steps(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    reverse: bool,
    training: bool,
) -> tuple[Tensor, ...]:
    """Returns output (T, B, H), h_n, c_n and, for training, the activations (T, B, SAVED * H)."""
    dtype, hidden = h_0.dtype, h_0.shape[1]
    input, h_0, c_0, weights, bias = _wide(input, h_0, c_0, weights, bias)

    def step(state: list[Tensor], xs: list[Tensor], weights_h: Tensor) -> Any:
        h, c = state
        h, c, activations = _step(xs[0] + h @ weights_h.t(), c)
        out = [h, activations] if training else [h]
        return [h, c], [y.to(dtype) for y in out]

    from_input = F.linear(input, weights[:, hidden:], bias)
    shapes = [(hidden,), (SAVED * hidden,)] if training else [(hidden,)]
    (h_n, c_n), (output, *activations) = _scan(
        step, [h_0, c_0], [from_input], weights[:, :hidden], shapes, dtype, reverse
    )
    return output, h_n.to(dtype), c_n.to(dtype), *activations


def _sequence_backward(
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
    checkpoint_steps: int,
    output: Tensor,
    saved: Tensor,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    if batch_sizes is not None or checkpoint_steps != 0:
        return NotImplemented
    steps, batch, inputs = input.shape
    dtype, hidden = h_0.dtype, h_0.shape[1]
    dh, dc = _wide(_or_zeros(grad_h_n, h_0), _or_zeros(grad_c_n, h_0))
    input, h_0, weights, output = _wide(input, h_0, weights, output)

    def step(grads: list[Tensor], xs: list[Tensor], weights_h: Tensor) -> Any:
        (dh, dc), (activations, *grad_output) = grads, _wide(*xs)
        if grad_output:
            dh = dh + grad_output[0]
        dz, dc = _step_backward(activations, dh, dc)
        return [dz @ weights_h, dc], [dz]

    xs = [saved.view(steps, batch, SAVED * hidden)]
    xs += [] if grad_output is None else [grad_output]
    weights_h, weights_x = weights[:, :hidden], weights[:, hidden:]
    shapes = [(GATES * hidden,)]
    (dh, dc), (dz,) = _scan(step, [dh, dc], xs, weights_h, shapes, dh.dtype, not reverse)
    dz = dz.flatten(0, 1)
    # The state that each step began with. Without steps h_0 would be one too many.
    before = [output[1:], h_0.unsqueeze(0)] if reverse else [h_0.unsqueeze(0), output[:-1]]
    h = torch.cat(before)[:steps].reshape(steps * batch, hidden)
    x = input.reshape(steps * batch, inputs)
    return _wanted(
        dtype,
        output_mask,
        lambda: (dz @ weights_x).view(steps, batch, inputs),
        lambda: dh,
        lambda: dc,
        lambda: dz.t() @ torch.cat([h, x], dim=1),
        lambda: dz.sum(0),
    )


# From a state, what a step reads and the weights to the next state and what the step puts out.
Step = Callable[[list[Tensor], list[Tensor], Tensor], tuple[list[Tensor], list[Tensor]]]


def _scan(
    step: Step,
    state: list[Tensor],
    xs: list[Tensor],
    weights: Tensor,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs `step` along the first dimension of xs; returns the last state and what was put out.

    A fixed length is unrolled; a dynamic one, of at least one step, becomes torch's scan.
    `shapes` and `dtype` are those of a row of what is put out.
    """
    steps, batch = xs[0].shape[:2]
    if not isinstance(steps, int):
        if reverse:
            xs = [x.flip(0) for x in xs]
        # Inductor allocates in terms of sizes that it finds among the arguments, and a part of
        # the weights, where it lies, has strides that nothing else has.
        weights = weights.contiguous()
        shapes_of_a_step = [*(s.shape for s in state), *(x.shape[1:] for x in xs), weights.shape]
        symbols = {str(n): n for shape in shapes_of_a_step for n in shape}
        sizes = [size for size in symbols.values() if isinstance(size, torch.SymInt)]

        def body(*arguments: Tensor) -> list[Tensor]:
            tensors, weights = arguments[: 2 + len(xs)], arguments[2 + len(xs)]
            state, out = step(list(tensors[:2]), list(tensors[2:]), weights)
            # What a step puts out must not share memory with its state.
            return [*state, *(y.clone() if y is state[0] else y for y in out)]

        # torch.onnx.export names the inputs of the body after these: if both states are one
        # tensor, such as zeros, there would be one input for both.
        h, c = state[0], state[1].clone()
        a, b, *out = torch.ops.higher_order.scan(body, [h, c], xs, (weights, *sizes))
        return [a, b], [y.flip(0) for y in out] if reverse else out
    if steps == 0:  # the results are the initial state; an operator returns copies
        return [s.clone() for s in state], [
            xs[0].new_empty(0, batch, *row, dtype=dtype) for row in shapes
        ]
    put_out: list[list[Tensor]] = []
    for t in range(steps - 1, -1, -1) if reverse else range(steps):
        state, out = step(state, [x[t] for x in xs], weights)
        put_out.append(out)
    if reverse:
        put_out.reverse()
    return state, [torch.stack(outs) for outs in zip(*put_out, strict=True)]


def _step(z: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From pre-activations (B, GATES * H) and c (B, H) to h', c' and activations (B, SAVED * H)."""
    h, c, saved = _cell.forward(z.chunk(GATES, dim=1), c)
    return h, c, torch.cat(saved, dim=1)


def _step_backward(activations: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the pre-activations (B, GATES * H) and of c (B, H)."""
    dz, dc = _cell.backward(activations.chunk(SAVED, dim=1), dh, dc)
    return torch.cat(dz, dim=1), dc


def _wide(*tensors: Tensor | None) -> tuple[Any, ...]:
    """In the dtype that the kernels calculate in: of float16 and bfloat16, float32."""
    return tuple(
        t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t
        for t in tensors
    )


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _wanted(
    dtype: torch.dtype, output_mask: Sequence[bool], *gradients: Callable[[], Tensor]
) -> Gradients:
    return tuple(
        gradient().to(dtype) if wanted else None
        for wanted, gradient in zip(output_mask, gradients, strict=True)
    )
