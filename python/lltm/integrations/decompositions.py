"""Decompositions of the operators into ATen operations, for compilers without our kernels.

They reduce an exported program to Core ATen operators. A sequence of fixed length T becomes T
steps. A dynamic length becomes the `scan` higher-order operator over one step, because Core ATen
has no loop. Not decomposed are packed sequences (their batch_sizes are data), prepacked weights
(only our kernels read them) and training with checkpoint_steps (it would save every step).

As in the kernels, only arguments and results are float16 or bfloat16. Intermediate values and
GEMMs are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OperatorBase

from .schema import batch_dim, call, is_step, with_arguments

Table = dict[OperatorBase, Callable[..., Any]]


def decompositions() -> Table:
    """Returns PyTorch's default decomposition table, with the operators of lltm added.

    Example::

        program = torch.export.export(layer, (input,))
        program = program.run_decompositions(lltm.decompositions())
    """
    return {**dict(torch.export.default_decompositions().items()), **ours()}


def ours() -> Table:
    """Returns only the decompositions of lltm's operators."""
    ops = torch.ops.lltm
    loops: dict[Any, Callable[[Any], Any]] = {
        ops.sequence.default: partial(_sequence, training=False),
        ops.sequence_forward.default: partial(_sequence, training=True),
        ops.sequence_backward.default: _sequence_backward,
    }
    return {op: partial(with_arguments, op, partial(_run, op, loop)) for op, loop in loops.items()}


def _run(op: Any, loop: Callable[[Any], Any], a: Any) -> Any:
    """Runs a single step as the ATen fallback (cpp/src/aten/fallback.cpp). Loops over its steps."""
    if not is_step(a):
        return loop(a)
    return op._op_dk(DispatchKey.CompositeExplicitAutograd, *vars(a).values())


def _read_by_steps(a: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that steps read unchanged: with a row for each step, and others."""
    rows: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for argument in torch.ops.lltm._sequence_step.default._schema.arguments[1:]:
        value = getattr(a, argument.name, None)
        if value is not None:
            by_step = batch_dim(argument.name, value.dim(), value.dtype) == 1
            (rows if by_step else others)[argument.name] = value
    return rows, others


def _sequence(a: Any, training: bool) -> Any:
    """Returns output, h_n, c_n and, in training, the activations (T * B, saved * H)."""
    if a.batch_sizes is not None or (training and a.checkpoint_steps != 0):
        return NotImplemented
    if a.weight_ih.dtype == torch.uint8:  # prepacked
        return NotImplemented
    ops, dtype = torch.ops.lltm, a.h_0.dtype
    weight_x, weight_h, bias_x, bias_h, parameters = _operands(a)
    rows, others = _read_by_steps(a)

    def step(state: list[Tensor], inputs: dict[str, Tensor]) -> Any:
        h, c, activations = ops._sequence_step(a.cell, h=state[0], c=state[1], **inputs)
        states = c.split(h.shape[1], 1)
        output = torch.cat([h, *(states[k] for k in ops._cell(a.cell)[6])], 1)
        out = [output, activations] if training else [output]
        # Without c, the second state is h. States must not share memory.
        return [h, h.clone() if a.c_0 is None else c], [y.to(dtype) for y in out]

    (h_n, c_n), (output, *activations) = _scan(
        step,
        [_wide(a.h_0), _wide(_state_c(a.cell, a.h_0, a.c_0))],
        {"z_x": _projected(_wide(a.input), weight_x, bias_x), **rows},
        {"weight_h": weight_h, "bias_h": bias_h, "parameters": parameters, **others},
        a.reverse,
    )
    h_n, c_n = h_n.to(dtype), c_n.to(dtype)
    if a.c_0 is None:
        c_n = c_n.new_empty(0)
    elif c_n.shape[1] != a.c_0.shape[1]:  # its first columns are h
        c_n = c_n[:, h_n.shape[1] :].contiguous()
    return output, h_n, c_n, *(y.flatten(0, 1) for y in activations)


def _sequence_backward(a: Any) -> Any:
    if a.batch_sizes is not None or a.checkpoint_steps != 0:
        return NotImplemented
    ops = torch.ops.lltm
    _, weight_h, _, _, parameters = _operands(a)
    rows, others = _read_by_steps(a)
    dh = torch.zeros_like(a.h_0) if a.grad_h_n is None else a.grad_h_n
    dc = None
    if a.c_0 is not None:
        dc = torch.zeros_like(a.c_0) if a.grad_c_n is None else a.grad_c_n

    def step(state: list[Tensor], inputs: dict[str, Tensor]) -> Any:
        dh, dc = state
        if "grad_output" in inputs:
            of_h, *of_states = inputs.pop("grad_output").split(dh.shape[1], 1)
            dh, columns = dh + of_h, [*dc.split(dh.shape[1], 1)]
            for k, gradient in zip(ops._cell(a.cell)[6], of_states, strict=True):
                columns[k] = columns[k] + gradient
            dc = torch.cat(columns, 1)
        dz, dh, dc = ops._sequence_step_backward(a.cell, dh=dh, dc=dc, **inputs)
        return [dh, dc], [dz]

    (dh, dc), (dz,) = _scan(
        step,
        [_wide(dh), _wide(_state_c(a.cell, torch.zeros_like(a.h_0), dc))],
        {
            "activations": a.saved.view(*a.input.shape[:2], a.saved.shape[1]),
            "grad_output": a.grad_output,
            **rows,
        },
        {"weight_h": weight_h, "parameters": parameters, **others},
        not a.reverse,
    )
    return call(ops._sequence_gradients.default, a, dz=dz, dh=dh, dc=dc)


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, and after it the columns of gates that read the input."""
    columns = weight.shape[1]
    if x.shape[-1] == columns:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(x[..., :columns], weight, bias), x[..., columns:]], -1)


def _operands(a: Any) -> tuple[Tensor, ...]:
    """Returns weight_x, weight_h, bias_x, bias_h and the cell's parameters for the steps."""
    operands: tuple[Tensor, ...] = call(torch.ops.lltm._sequence_operands.default, a)
    return operands


def _state_c(cell: str, h: Tensor, c: Tensor | None) -> Tensor:
    """Returns c for the steps: after h, if the element-wise part reads h."""
    if c is None:
        return h
    reads_h = torch.ops.lltm._cell(cell)[3]
    return torch.cat([h, c], dim=1) if reads_h else c


def _wide(tensor: Tensor) -> Tensor:
    """Converts float16 and bfloat16 to float32, the dtype of the computation."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


# Maps a state and a step's inputs to the next state and the step's outputs.
Step = Callable[[list[Tensor], dict[str, Tensor]], tuple[list[Tensor], list[Tensor]]]


def _scan(
    step: Step,
    state: list[Tensor],
    rows: dict[str, Tensor | None],
    operands: dict[str, Tensor | None],
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs `step` along the first dimension of `rows`. Returns the last state and the outputs.

    A fixed length is unrolled. A dynamic length, at least 1, becomes torch's scan. Rows and
    operands that are None are omitted.
    """
    xs = {name: x for name, x in rows.items() if x is not None}
    weights = {name: w for name, w in operands.items() if w is not None}
    steps = next(iter(xs.values())).shape[0]
    if not isinstance(steps, int):
        if reverse:
            xs = {name: x.flip(0) for name, x in xs.items()}
        # Inductor allocates in terms of sizes among the arguments. Views of the weights have
        # other strides.
        weights = {name: w.contiguous() for name, w in weights.items()}
        shapes = [t.shape for t in (*state, *weights.values())]
        shapes += [x.shape[1:] for x in xs.values()]
        symbols = {str(n): n for shape in shapes for n in shape}
        sizes = [size for size in symbols.values() if isinstance(size, torch.SymInt)]

        def body(h: Tensor, c: Tensor, *others: Tensor) -> list[Tensor]:
            # The body must not capture tensors. The sizes are the last arguments.
            names = (*xs, *weights)
            state, out = step([h, c], dict(zip(names, others, strict=False)))
            # Outputs must not share memory with the state.
            return [*state, *(y.clone() if y is state[0] else y for y in out)]

        # torch.onnx.export names the body's inputs after these tensors. If both states were
        # the same tensor, such as zeros, they would become a single input.
        h, c = state[0], state[1].clone()
        a, b, *out = torch.ops.higher_order.scan(
            body, [h, c], list(xs.values()), (*weights.values(), *sizes)
        )
        return [a, b], [y.flip(0) for y in out] if reverse else out
    if steps == 0:  # returns copies of the initial state, as operators do
        _, out = step(state, {n: x.new_zeros(x.shape[1:]) for n, x in xs.items()} | weights)
        return [s.clone() for s in state], [y.new_empty(0, *y.shape) for y in out]
    put_out: list[list[Tensor]] = []
    for t in range(steps - 1, -1, -1) if reverse else range(steps):
        state, out = step(state, {name: x[t] for name, x in xs.items()} | weights)
        put_out.append(out)
    if reverse:
        put_out.reverse()
    return state, [torch.stack(outs) for outs in zip(*put_out, strict=True)]
