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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OperatorBase

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
        ops.step.default: _step_inference,
        ops.step_forward.default: _step_forward,
        ops.step_backward.default: _step_backward,
        ops.sequence.default: _sequence,
        ops.sequence_forward.default: _sequence_forward,
        ops.sequence_backward.default: _sequence_backward,
    }


class _Cell:
    """What the library knows of a cell (cpp/src/cell/cell.h), with the parameters of a call.

    Weights are in the order of the cell's slots, the pre-activations of a unit.
    """

    def __init__(
        self,
        name: str,
        weight_ih: Tensor,
        weight_hh: Tensor | None,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
    ) -> None:
        self.name = name
        x_blocks, h_blocks, states, self.reads_h, parameters, self.saved = torch.ops.lltm._cell(
            name
        )
        self.slots = len(x_blocks)
        # What each of the states that step() calls c begins with.
        self.first_c = [0.0] * self.reads_h + states
        self.has_c, self.state_columns = len(states) > 0, len(self.first_c)
        # The slots that x has a part in come first, those of h last.
        self.x = [block for block in x_blocks if block >= 0]
        self.h = [block for block in h_blocks if block >= 0]
        self.joined = weight_hh is None
        self.hidden = weight_ih.shape[0] // max(len(self.x), len(self.h) if self.joined else 0)
        self.parameters: Tensor | None = None
        if weight_hh is None:
            weight_hh = weight_ih[: len(self.h) * self.hidden, : self.hidden]
            weight_ih = weight_ih[: len(self.x) * self.hidden, self.hidden :]
        if parameters:  # behind the biases
            assert bias_ih is not None
            bias_ih, own = bias_ih.split([len(self.x) * self.hidden, parameters * self.hidden])
            self.parameters = _wide(own)[0]
        self.weight_x, self.weight_h, bias_x, bias_h = _wide(
            self._pick(weight_ih, self.x),
            self._pick(weight_hh, self.h),
            None if bias_ih is None else self._pick(bias_ih, self.x),
            None if bias_hh is None else self._pick(bias_hh, self.h),
        )
        self.bias_ih, self.bias_hh = bias_ih is not None, bias_hh is not None
        self.bias_x: Tensor | None = bias_x
        self.bias_h: Tensor | None = bias_h

    def from_x(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_x, self.bias_x)

    def add_h(self, from_x: Tensor, h: Tensor, weight_h: Tensor, bias_h: Tensor | None) -> Tensor:
        """The pre-activations (B, slots * H)."""
        from_h = F.linear(h, weight_h, bias_h)
        alone = self.slots - len(self.h)  # slots of x alone, and as many of h alone
        if alone == 0:
            return from_x + from_h
        first, last = alone * self.hidden, len(self.x) * self.hidden
        both = from_x[:, first:] + from_h[:, : last - first]
        return torch.cat([from_x[:, :first], both, from_h[:, last - first :]], dim=1)

    # The parameters are arguments, since the body of a loop may not refer to tensors around it.

    def step(
        self, z: Tensor, c: Tensor, parameters: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From pre-activations and c (B, H) to h', c' and activations (B, saved * H)."""
        h, c, saved = torch.ops.lltm._elementwise(self.name, z, c, parameters)
        return h, c, saved

    def step_backward(
        self, saved: Tensor, dh: Tensor, dc: Tensor, parameters: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the pre-activations and of c."""
        dz, dc = torch.ops.lltm._elementwise_backward(self.name, saved, dh, dc, parameters)
        return dz, dc

    def dz_x(self, dz: Tensor) -> Tensor:
        end = len(self.x) * self.hidden
        return dz[..., :end] if end < self.grad_size else dz

    def dz_h(self, dz: Tensor) -> Tensor:
        end = self.slots * self.hidden
        begin = end - len(self.h) * self.hidden
        return dz[..., begin:end] if end - begin < self.grad_size else dz

    @property
    def grad_size(self) -> int:
        """Of the gradients of pre-activations and, behind them, of the cell's parameters."""
        own = 0 if self.parameters is None else self.parameters.shape[0]
        return self.slots * self.hidden + own

    def gradients(
        self,
        dtype: torch.dtype,
        output_mask: Sequence[bool],
        dx: Callable[[], Tensor],
        dh: Callable[[], Tensor],
        dc: Tensor,
        dz: Tensor,
        x: Tensor,
        h: Tensor,
    ) -> Gradients:
        """Of input, h, c, weights and biases, from dz, x and h of all rows."""

        def of_h() -> Tensor:
            return dh() + dc[:, : self.hidden] if self.reads_h else dh()

        def of_bias_x() -> Tensor:
            sums = self._unpick(self.dz_x(dz).sum(0), self.x)
            if self.parameters is None:
                return sums
            return torch.cat([sums, dz[:, self.slots * self.hidden :].sum(0)])

        def of_weight_x() -> Tensor:
            return self._unpick(self.dz_x(dz).t() @ x, self.x)

        def of_weight_h() -> Tensor:
            return self._unpick(self.dz_h(dz).t() @ h, self.h)

        def joined() -> Tensor:
            rows = max(len(self.x), len(self.h)) * self.hidden
            parts = (of_weight_h(), of_weight_x())
            return torch.cat([F.pad(w, (0, 0, 0, rows - w.shape[0])) for w in parts], dim=1)

        # What is absent has no gradient.
        given = (True, True, self.has_c, True, not self.joined, self.bias_ih, self.bias_hh)
        return _wanted(
            dtype,
            [wanted and there for wanted, there in zip(output_mask, given, strict=True)],
            dx,
            of_h,
            lambda: dc[:, self.hidden :] if self.reads_h else dc,
            joined if self.joined else of_weight_x,
            of_weight_h,
            of_bias_x,
            # Of its own memory: it may be the same sums.
            lambda: self._unpick(self.dz_h(dz).sum(0), self.h).clone(),
        )

    def c_of(self, h: Tensor, c: Tensor | None) -> Tensor:
        """c as the element-wise part takes it: with h before it where that reads h."""
        if c is None:
            return h
        return torch.cat([h, c], dim=1) if self.reads_h else c

    def grad_of_c(self, grad: Tensor | None, h: Tensor) -> Tensor:
        if grad is None or not self.has_c:
            return h.new_zeros(h.shape[0], self.state_columns * self.hidden)
        return torch.cat([torch.zeros_like(h), grad], dim=1) if self.reads_h else grad

    def restarted(self, c: Tensor, anew: Tensor) -> Tensor:
        """c, but its first values in the rows where `anew` (B, 1) is true."""
        if not any(self.first_c):
            return c.masked_fill(anew, 0)
        parts = zip(c.chunk(self.state_columns, dim=1), self.first_c, strict=True)
        return torch.cat([part.masked_fill(anew, first) for part, first in parts], dim=1)

    def shown_c(self, c: Tensor) -> Tensor:
        """c' as the operator returns it."""
        if not self.has_c:
            return c.new_empty(0)
        return c[:, self.hidden :].contiguous() if self.reads_h else c

    def _pick(self, rows: Tensor, blocks: list[int]) -> Tensor:
        if blocks == sorted(blocks):
            return rows
        parts = rows.chunk(len(blocks))
        return torch.cat([parts[block] for block in blocks])

    def _unpick(self, rows: Tensor, blocks: list[int]) -> Tensor:
        if blocks == sorted(blocks):
            return rows
        parts = rows.chunk(len(blocks))
        return torch.cat([parts[blocks.index(gate)] for gate in range(len(blocks))])


def _step_inference(
    cell: str,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _step_forward(cell, input, h, c, weight_ih, weight_hh, bias_ih, bias_hh)[:2]


def _step_forward(
    cell: str,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, ...]:
    dtype = h.dtype
    of = _Cell(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    input, h, c = _wide(input, h, of.c_of(h, c))
    z = of.add_h(of.from_x(input), h, of.weight_h, of.bias_h)
    h, c, saved = (y.to(dtype) for y in of.step(z, c, of.parameters))
    return h, of.shown_c(c), saved


def _step_backward(
    cell: str,
    input: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    activations: Tensor,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    output_mask: Sequence[bool],
) -> Gradients:
    dtype = h.dtype
    of = _Cell(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    dh, dc = _or_zeros(grad_h, h), of.grad_of_c(grad_c, h)
    dh, dc, input, h, activations = _wide(dh, dc, input, h, activations)
    dz, dc = of.step_backward(activations, dh, dc, of.parameters)
    return of.gradients(
        dtype,
        output_mask,
        lambda: of.dz_x(dz) @ of.weight_x,
        lambda: of.dz_h(dz) @ of.weight_h,
        dc,
        dz,
        input,
        h,
    )


def _sequence(
    cell: str,
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    reset: Tensor | None = None,
    checkpoint_steps: int = 0,
    recurrent_mask: Tensor | None = None,
) -> Any:
    if batch_sizes is not None:
        return NotImplemented
    of = _Cell(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    return _steps(of, input, h_0, c_0, reverse, reset, recurrent_mask, training=False)


def _sequence_forward(
    cell: str,
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
    reset: Tensor | None,
    checkpoint_steps: int,
    recurrent_mask: Tensor | None,
) -> Any:
    if batch_sizes is not None or checkpoint_steps != 0:
        return NotImplemented
    of = _Cell(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    output, h_n, c_n, activations = _steps(
        of, input, h_0, c_0, reverse, reset, recurrent_mask, training=True
    )
    return output, h_n, c_n, activations.flatten(0, 1)


def _steps(
    of: _Cell,
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor | None,
    reverse: bool,
    reset: Tensor | None,
    recurrent_mask: Tensor | None,
    training: bool,
) -> tuple[Tensor, ...]:
    """Returns output (T, B, H), h_n, c_n and, for training, the activations (T, B, saved * H)."""
    dtype, hidden = h_0.dtype, h_0.shape[1]
    input, h_0, c_0 = _wide(input, h_0, of.c_of(h_0, c_0))
    assert c_0 is not None

    def step(state: list[Tensor], xs: list[Tensor], weights: list[Tensor]) -> Any:
        (h, c), (from_x, *anew) = state, xs
        if anew:
            h, c = h.masked_fill(anew[0], 0), of.restarted(c, anew[0])
        weight_h, *rest = weights
        read = h if recurrent_mask is None else h * rest.pop()
        parameters = None if of.parameters is None else rest.pop()
        z = of.add_h(from_x, read, weight_h, rest[0] if rest else None)
        h, c, activations = of.step(z, c, parameters)
        out = [h, activations] if training else [h]
        return [h, c if of.has_c else h.clone()], [y.to(dtype) for y in out]

    shapes = [(hidden,), (of.saved * hidden,)] if training else [(hidden,)]
    weights = [w for w in (of.weight_h, of.bias_h, of.parameters, recurrent_mask) if w is not None]
    xs = [of.from_x(input), *_columns(reset)]
    (h_n, c_n), (output, *activations) = _scan(
        step, [h_0, c_0], xs, weights, shapes, dtype, reverse
    )
    return output, h_n.to(dtype), of.shown_c(c_n.to(dtype)), *activations


def _sequence_backward(
    cell: str,
    input: Tensor,
    h_0: Tensor,
    c_0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor | None,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    batch_sizes: Tensor | None,
    reverse: bool,
    reset: Tensor | None,
    checkpoint_steps: int,
    recurrent_mask: Tensor | None,
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
    of = _Cell(cell, weight_ih, weight_hh, bias_ih, bias_hh)
    dh, dc = _wide(_or_zeros(grad_h_n, h_0), of.grad_of_c(grad_c_n, h_0))
    input, h_0, output = _wide(input, h_0, output)

    def step(grads: list[Tensor], xs: list[Tensor], weights: list[Tensor]) -> Any:
        (dh, dc), (activations, *rest) = grads, _wide(*xs)
        if grad_output is not None:
            dh = dh + rest[0]
        weight_h, *more = weights
        mask = None if recurrent_mask is None else more.pop()
        dz, dc = of.step_backward(activations, dh, dc, more[0] if more else None)
        dh = of.dz_h(dz) @ weight_h
        if mask is not None:
            dh = dh * mask
        if reset is not None:
            dh, dc = dh.masked_fill(rest[-1], 0), dc.masked_fill(rest[-1], 0)
        return [dh, dc], [dz]

    xs = [saved.view(steps, batch, of.saved * hidden)]
    xs += [*([] if grad_output is None else [grad_output]), *_columns(reset)]
    shapes = [(of.grad_size,)]
    weights = [w for w in (of.weight_h, of.parameters, recurrent_mask) if w is not None]
    (dh, dc), (dz,) = _scan(step, [dh, dc], xs, weights, shapes, dh.dtype, not reverse)
    dz = dz.flatten(0, 1)
    # The state that each step began with. Without steps h_0 would be one too many.
    before = [output[1:], h_0.unsqueeze(0)] if reverse else [h_0.unsqueeze(0), output[:-1]]
    h = torch.cat(before)[:steps]
    if recurrent_mask is not None:
        h = h * recurrent_mask
    for anew in _columns(reset):
        h = h.masked_fill(anew, 0)
    h = h.reshape(steps * batch, hidden)
    x = input.reshape(steps * batch, inputs)
    return of.gradients(
        dtype,
        output_mask,
        lambda: (of.dz_x(dz) @ of.weight_x).view(steps, batch, inputs),
        lambda: dh,
        dc,
        dz,
        x,
        h,
    )


def _columns(reset: Tensor | None) -> list[Tensor]:
    """(T, B, 1), of reset (T, B) if there is one."""
    return [] if reset is None else [reset.unsqueeze(-1)]


# From a state, what a step reads and the weights to the next state and what the step puts out.
Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


def _scan(
    step: Step,
    state: list[Tensor],
    xs: list[Tensor],
    weights: list[Tensor],
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
        weights = [w.contiguous() for w in weights]
        shapes_of_a_step = [t.shape for t in (*state, *weights)] + [x.shape[1:] for x in xs]
        symbols = {str(n): n for shape in shapes_of_a_step for n in shape}
        sizes = [size for size in symbols.values() if isinstance(size, torch.SymInt)]

        def body(*arguments: Tensor) -> list[Tensor]:
            end = 2 + len(xs)
            given = list(arguments)
            state, out = step(given[:2], given[2:end], given[end : end + len(weights)])
            # What a step puts out must not share memory with its state.
            return [*state, *(y.clone() if y is state[0] else y for y in out)]

        # torch.onnx.export names the inputs of the body after these: if both states are one
        # tensor, such as zeros, there would be one input for both.
        h, c = state[0], state[1].clone()
        a, b, *out = torch.ops.higher_order.scan(body, [h, c], xs, (*weights, *sizes))
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
