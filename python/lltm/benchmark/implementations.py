from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import _C, modules, reference
from ..integrations.inductor import inductor_decomposed
from .cases import LOOP_SHAPE, Case

OURS = "lltm"
PREPACKED = "lltm, prepacked"
INT8 = "lltm, int8"
CHECKPOINTED = "lltm, checkpointed"
PLAIN = "PyTorch reference"
TUTORIAL = "tutorial's C++"
COMPILED = "torch.compile, plain"
COMPILED_OURS = "torch.compile, lltm"
COMPILED_DECOMPOSED = "torch.compile, decomposed"
COMPILED_THEIRS = "torch.compile, nn"

# The tutorial's published times of forward and backward, in microseconds.
PUBLISHED = {
    "cpu": {PLAIN: (506, 445), TUTORIAL: (349, 444)},
    "cuda": {PLAIN: (188, 411), TUTORIAL: (150, 393), "tutorial's CUDA": (129, 305)},
}

# Makes a module from (input_size, hidden_size, dtype=). Its arguments are the input and (h, c), or
# h for a GRU.
Make = Callable[..., nn.Module]


class _TutorialFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weights: Tensor, bias: Tensor, *state: Tensor) -> Any:
        new_h, new_c, *saved = _C.forward(input, weights, bias, *state)
        ctx.save_for_backward(new_c, *saved, weights)
        return new_h, new_c

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_c: Tensor) -> Any:
        d_h, d_input, d_weights, d_bias, d_c = _C.backward(
            grad_h.contiguous(), grad_c.contiguous(), *ctx.saved_tensors
        )
        return d_input, d_weights, d_bias, d_h, d_c


class _TutorialCell(modules.LLTMCell):
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return _tutorial_step(input, self.weights, self.bias, *hx)


class _TutorialLoop(modules.LLTM):
    """Supports neither packed input nor the reverse direction."""

    def forward(self, input: Any, hx: Any = None, reset: Any = None) -> Any:
        parameters: Any = self
        outputs, state = [], (hx[0][0], hx[1][0])
        for x in input.unbind(0):
            state = _tutorial_step(x, parameters.weights_l0, parameters.bias_l0, *state)
            outputs.append(state[0])
        return torch.stack(outputs), (state[0].unsqueeze(0), state[1].unsqueeze(0))


_tutorial_step: Any = _TutorialFunction.apply


def compiled(make: Make, decomposed: bool = False, dynamic: bool = False) -> Make:
    backend: Any = inductor_decomposed if decomposed else "inductor"

    def make_compiled(*sizes: int, **dtype: torch.dtype) -> nn.Module:
        module: Any = torch.compile(make(*sizes, **dtype), dynamic=dynamic, backend=backend)
        assert isinstance(module, nn.Module)
        return module

    return make_compiled


def prepacked(make: Make, *sizes: int, weights: torch.dtype | None = None, **dtype: Any) -> Any:
    layer: Any = make(*sizes, **dtype)
    return layer.prepack(weights)


def quantized(make: Make, *sizes: int, **dtype: Any) -> Any:
    """torch.nn's layer with weights in int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, but still part of PyTorch
        model = nn.Sequential(make(*sizes, **dtype)).eval()
        return torch.ao.quantization.quantize_dynamic(model, {type(model[0])})[0]


def implementations(
    case: Case, compile: bool = False, prepack: bool = False, checkpoint_steps: int = 0
) -> dict[str, Make]:
    """Returns the implementations that are compared in a case, lltm's first.

    LSTM and GRU are compared only with the torch.nn layers that they replace. The tutorial's C++
    calls ATen operations.

    Args:
        compile: also compiled by torch.compile
        prepack: also inference of sequences with prepacked weights and, in float32, with int8
        checkpoint_steps: also training of sequences with activation checkpoints, if not 0
    """
    ours, theirs = getattr(modules, case.module), getattr(nn, case.baseline)
    makes: dict[str, Make] = {OURS: ours}
    compilable: dict[str, Make] = {COMPILED_OURS: compiled(ours), COMPILED_THEIRS: compiled(theirs)}
    if case.cell == "lltm":
        makes[PLAIN] = plain = getattr(reference, case.module)
        if not (case.packed or case.layers * case.directions > 1):
            makes[TUTORIAL] = _TutorialCell if case.is_step else _TutorialLoop
        # With dynamic sizes the decomposition of a sequence is a loop. With a fixed length it is
        # unrolled, as in COMPILED.
        decomposed = compiled(ours, decomposed=True, dynamic=not case.is_step)
        compilable = {COMPILED: compiled(plain), COMPILED_OURS: compiled(ours)}
        compilable[COMPILED_DECOMPOSED] = decomposed
    makes[f"nn.{case.baseline}"] = theirs
    loops = case.cell == "lltm" and not case.is_step  # compiling a Python loop takes minutes
    if compile and (not loops or (case.shape == LOOP_SHAPE and case.dtype == torch.float32)):
        torch.compiler.reset()  # before the recompilation limit causes eager mode
        makes |= compilable
    if prepack and not (case.is_step or case.training):
        makes[PREPACKED] = partial(prepacked, ours)
        if case.dtype == torch.float32:
            makes[INT8] = partial(prepacked, ours, weights=torch.qint8)
            makes[f"nn.{case.baseline}, int8"] = partial(quantized, theirs)
    if checkpoint_steps and case.training and not case.is_step:
        makes[CHECKPOINTED] = partial(ours, checkpoint_steps=checkpoint_steps)
    return makes


class Layer:
    """A module with the arguments of a case.

    The input of a sequence requires a gradient, as in the middle of a network. The input of one
    step does not, as in the tutorial.
    """

    def __init__(self, make: Make, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        *leading, input_size, hidden = case.shape
        options: Any = {"dtype": case.dtype, "device": case.device}
        states = case.layers * case.directions
        form = {"num_layers": case.layers, "bidirectional": case.directions == 2}
        module = make(input_size, hidden, dtype=case.dtype, **(form if states > 1 else {}))
        self.module = module.to(case.device).train(case.training)
        rows = leading if case.is_step else (states, leading[1])
        self.batch_sizes: Tensor | None = None
        if case.packed:
            lengths = torch.tensor(case.lengths)
            self.batch_sizes = (lengths > torch.arange(case.steps)[:, None]).sum(1)
            leading = [sum(case.lengths)]
        self.input = torch.randn(*leading, input_size, **options)
        self.input.requires_grad_(case.training and not case.is_step)
        h, c = (torch.randn(*rows, hidden, **options) for _ in "hc")
        self.state: Any = h if case.cell == "gru" else (h, c)
        # Gradient of the output of a sequence.
        outputs = case.directions * hidden
        self.gradient = None if case.is_step else torch.randn(*leading, outputs, **options)

    def forward(self) -> tuple[Tensor, ...]:
        """The results to differentiate: h and c of a step, or a sequence's output."""
        packed = self.batch_sizes is not None
        input = PackedSequence(self.input, self.batch_sizes) if packed else self.input
        results = self.module(input, self.state)
        if isinstance(results, Tensor):
            return (results,)
        if packed:
            return (results[0].data,)
        return tuple(results) if self.case.is_step else results[:1]

    def backward(self, results: Sequence[Tensor]) -> None:
        """Runs backward; for a step from the sum of h and c, as in the tutorial."""
        if self.gradient is None:
            torch.autograd.backward(reduce(add, (result.sum() for result in results)))
        else:
            torch.autograd.backward(results, [self.gradient])

    def forget_gradients(self) -> None:
        self.input.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def run(self) -> None:
        if self.case.training:
            self.forget_gradients()
            self.backward(self.forward())
        else:
            self.forward()
