from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lltm
from lltm.custom.explanation import assignments
from lltm.custom.values import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]

GALLERY_CELLS = lltm.cells._NAMES


def gallery_module(name: str, inputs: int, hidden: int, kind: str = "Layer", **options: Any) -> Any:
    """A module of lltm.cells. `inputs` does not count the columns of gates that read the input.

    With such gates, there is a single layer.
    """
    cell = getattr(lltm.cells, name)
    if given := len(cell.Layer._HEADER.gates_input):
        options.pop("num_layers", None)
    return getattr(cell, kind)(inputs + given * hidden, hidden, **options)


# Minor release of PyTorch, such as (2, 13).
TORCH = tuple(int(part) for part in str(torch.__version__).split(".")[:2])

# True if lltm._C is the compiled module, not lltm._binding.
COMPILED_BINDING = lltm._C.__name__ == "lltm._C"

needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None, reason="builds a program with CMake"
)


def program_without_python(folder: str, name: str) -> Callable[..., str]:
    """Builds a program, checked not to link Python; returns a function from arguments to output."""
    # Kept for the next run.
    build = ROOT / "build" / folder / f"torch-{torch.__version__}"
    prefix = f"-DCMAKE_PREFIX_PATH={lltm.cmake_prefix_path}"
    run(["cmake", "-S", ROOT / folder, "-B", build, prefix])
    run(["cmake", "--build", build])
    linked = run(["ldd", build / name]).stdout
    assert "liblltm.so" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return lambda *arguments: run([build / name, *arguments], env=env).stdout


ARM = platform.machine() in ("aarch64", "arm64")
BASELINE = "NEON" if ARM else "DEFAULT"

# Otherwise, as without AVX2, the engines call PyTorch's GEMMs, and prepack copies the weights.
HAS_OWN_GEMM = "micro-kernel: float32" in lltm.build_info()
needs_packed_weights = pytest.mark.skipif(not HAS_OWN_GEMM, reason="prepack copies weights here")


def cannot_run(capability: str) -> str:
    """Why not: the kernels of an ATEN_CPU_CAPABILITY need features of the CPU and of the build."""
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    if missing := {"avx2": avx2, "avx512": avx512}.get(capability, set()) - cpu_flags():
        return f"this CPU has no {', '.join(sorted(missing))}"
    kernels = BASELINE if capability == "default" else capability.upper()
    (built,) = re.findall(r"^CPU kernels: (.*)", lltm.build_info(), re.MULTILINE)
    return "" if kernels in built.split(", ") else f"this build has no kernels for {kernels}"


def cpu_flags() -> set[str]:
    file = Path("/proc/cpuinfo")
    found = re.search(
        r"^flags\s*:(.*)", file.read_text(encoding="utf-8") if file.exists() else "", re.MULTILINE
    )
    return set(found[1].split()) if found else set()


def usable_cpus() -> int:
    """The affinity and the quota of the container."""
    file = Path("/sys/fs/cgroup/cpu.max")
    quota, period = file.read_text(encoding="utf-8").split() if file.exists() else ("max", "")
    cpus = len(os.sched_getaffinity(0))
    return cpus if quota == "max" else min(cpus, round(int(quota) / int(period)))


# Operator names; test_errors.py compares them with the registry.
CELLS = tuple(lltm.reference._EQUATIONS)

GATES: int = len(torch.ops.lltm._cell("lltm")[0])

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def needs_extra(extra: str, *modules: str) -> pytest.MarkDecorator:
    """Skips a test if packages of an extra are missing, except in `make test-slow`."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing) and "LLTM_REQUIRE_EXTRAS" not in os.environ,
        reason=f"needs the extra `{extra}`: no {', '.join(missing)}",
    )


# Tensors of Arguments, in the order of the operators.
ARGUMENTS = ("input", "h", "c", "weights", "weight_hh", "bias", "bias_hh")


@dataclass(frozen=True)
class Arguments:
    """`weights` and `bias` are weight_ih and bias_ih."""

    input: Tensor
    h: Tensor
    c: Tensor  # ignored by cells without c
    weights: Tensor
    bias: Tensor | None
    batch_sizes: Tensor | None = None
    reverse: bool = False
    cell: str = "lltm"
    weight_hh: Tensor | None = None
    bias_hh: Tensor | None = None
    # Sequences only; not differentiated here.
    reset: Tensor | None = None
    recurrent_mask: Tensor | None = None

    def operands(self) -> tuple[Any, ...]:
        has_c = len(lltm.functional._names(self.cell)[0]) > 1
        c = self.c if has_c else None
        return (self.cell, self.input, self.h, c, *self.parameters())

    def parameters(self) -> tuple[Tensor | None, ...]:
        return self.weights, self.weight_hh, self.bias, self.bias_hh

    def states(self) -> Any:
        """States as lltm.functional accepts them."""
        _, _, h, c, *_ = self.operands()
        return h if c is None else (h, *c.split(h.shape[1], 1))

    def names(self) -> list[str]:
        operands = self.operands()[1:]
        return [name for name, t in zip(ARGUMENTS, operands, strict=True) if t is not None]

    def tensors(self) -> list[Tensor]:
        """Differentiable tensors, in gradient order."""
        return [operand for operand in self.operands() if isinstance(operand, Tensor)]

    def wanted(self, mask: Sequence[bool] = (True,) * 7) -> list[bool]:
        """output_mask for gradients of the given arguments."""
        operands = self.operands()[1:]
        return [want and operand is not None for want, operand in zip(mask, operands, strict=True)]

    def rest(self) -> dict[str, Any]:
        return {
            "batch_sizes": self.batch_sizes,
            "reverse": self.reverse,
            "reset": self.reset,
            "recurrent_mask": self.recurrent_mask,
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> Arguments:
        tensors = {name: getattr(self, name) for name in ARGUMENTS}
        changed: dict[str, Any] = {k: change(t) for k, t in tensors.items() if t is not None}
        return replace(self, **changed)

    def with_argument(self, name: str, value: Tensor) -> Arguments:
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    def leaves(self) -> Arguments:
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())

    def to(self, dtype: torch.dtype) -> Arguments:
        return self.map(lambda tensor: tensor.detach().to(dtype))


def cell_arguments(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, bias: bool = True
) -> Arguments:
    batch, inputs, hidden = shape
    rows, columns = GATES * hidden, hidden + inputs
    return Arguments(
        input=torch.randn(batch, inputs, dtype=dtype),
        h=torch.randn(batch, hidden, dtype=dtype).tanh(),
        c=torch.randn(batch, hidden, dtype=dtype),
        # Scaled for pre-activations of order 1.
        weights=torch.randn(rows, columns, dtype=dtype) / math.sqrt(columns),
        bias=torch.randn(rows, dtype=dtype) if bias else None,
    )


def of_cell(cell: str, a: Arguments) -> Arguments:
    """The call has two matrices and biases, except the LLTM's, which is unchanged."""
    if cell == "lltm":
        return a
    (batch, hidden), inputs, dtype = a.h.shape, a.input.shape[-1], a.h.dtype
    x_blocks, h_blocks, states, _, parameters, *_ = torch.ops.lltm._cell(cell)
    of_x, of_h = (sum(block >= 0 for block in blocks) * hidden for blocks in (x_blocks, h_blocks))
    scale = 1 / (2 * math.sqrt(hidden + inputs))
    biases = (of_x + parameters * hidden, of_h)
    bias, bias_hh = (None if a.bias is None else torch.randn(n, dtype=dtype) / 2 for n in biases)
    return replace(
        a,
        cell=cell,
        c=torch.randn(batch, max(1, len(states)) * hidden, dtype=dtype),
        weights=torch.randn(of_x, inputs, dtype=dtype) * scale,
        weight_hh=torch.randn(of_h, hidden, dtype=dtype) * scale,
        bias=bias,
        bias_hh=bias_hh,
    )


def sequence_arguments(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    reverse: bool = False,
) -> Arguments:
    steps, batch, inputs, hidden = shape
    arguments = _steady(cell_arguments((batch, inputs, hidden), dtype, bias))
    return replace(arguments, input=torch.randn(steps, batch, inputs, dtype=dtype), reverse=reverse)


def packed_arguments(
    lengths: Sequence[int],
    inputs: int = 5,
    hidden: int = 7,
    dtype: torch.dtype = torch.float32,
    reverse: bool = False,
) -> Arguments:
    sizes = [sum(n > t for n in lengths) for t in range(max(lengths))]
    batch_sizes = torch.tensor(sizes, dtype=torch.int64)
    arguments = _steady(cell_arguments((len(lengths), inputs, hidden), dtype))
    return replace(
        arguments,
        input=torch.randn(sum(lengths), inputs, dtype=dtype),
        batch_sizes=batch_sizes,
        reverse=reverse,
    )


def _steady(a: Arguments) -> Arguments:
    # Larger weights amplify early rounding errors in long sequences: chance decides the ratio.
    return replace(a, weights=a.weights / 2, bias=None if a.bias is None else a.bias / 2)


def with_masks(a: Arguments) -> Arguments:
    """Adds random resets, and a mask of the h that the next step reads."""
    reset = torch.rand(a.input.shape[:-1]) < 0.3
    return replace(a, reset=reset, recurrent_mask=torch.rand_like(a.h))


def cell_outputs(implementation: Any, a: Arguments) -> tuple[Tensor, ...]:
    """(h', c') of lltm.functional or lltm.reference; (h',) without c."""
    cell, x, *_ = a.operands()
    return _listed(implementation.step(cell, x, a.states(), *a.parameters()))


def sequence_outputs(
    implementation: Any, a: Arguments, weights: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """(output, h_n, c_n), without c_n if the cell has no c."""
    cell, x, *_ = a.operands()
    parameters = a.parameters() if weights is None else (weights, None, a.bias, a.bias_hh)
    output, states = implementation.sequence(
        cell, x, a.states(), *parameters, **a.rest(), **options
    )
    return output, *_listed(states)


def _listed(states: Any) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


def checkpointed_outputs(steps: int, implementation: Any, a: Arguments) -> tuple[Tensor, ...]:
    return sequence_outputs(implementation, a, checkpoint_steps=steps)


NAMES = ("input", "h", "c", "weights", "bias")
Outputs = Callable[[Any, Arguments], tuple[Tensor, ...]]


def results_and_gradients(
    outputs: Outputs, implementation: Any, arguments: Arguments, grads: Sequence[Tensor]
) -> dict[str, Tensor]:
    leaves = arguments.leaves()
    results = outputs(implementation, leaves)
    gradients = torch.autograd.grad(results, leaves.tensors(), list(grads))
    named = {f"output {k}": y.detach() for k, y in enumerate(results)}
    named.update({f"grad of {name}": y for name, y in zip(leaves.names(), gradients, strict=True)})
    return named


def exact_results_and_gradients(
    arguments: Arguments, grads: Sequence[Tensor]
) -> dict[str, oracle.Array]:
    """A cell is a sequence of one step, without the first output."""
    a = arguments
    if a.batch_sizes is not None:
        batch_sizes = a.batch_sizes.tolist()
    else:
        batch_sizes = [len(a.h)] * (a.input.numel() // (a.input.shape[-1] * len(a.h)))
    hidden, is_joined = a.h.shape[1], a.weight_hh is None
    weights = [oracle.array(w) for w in (a.weights, a.weight_hh) if w is not None]
    if is_joined:
        weights = [weights[0][:, hidden:], weights[0][:, :hidden]]
    zeros = torch.zeros(len(weights[0]))
    biases = [oracle.array(zeros if b is None else b) for b in (a.bias, a.bias_hh)]
    # State gradients are last; an omitted state or gradient is 0.
    rows = [oracle.array(g).reshape(-1, hidden) for g in grads]
    states = 2 if a.operands()[3] is not None else 1
    x = oracle.array(a.input).reshape(-1, a.input.shape[-1])
    d_output = rows[0] if len(rows) > states else np.zeros((len(x), hidden), x.dtype)
    d_states = [*rows[-states:], np.zeros_like(rows[-1])][:2]
    results, gradients = oracle.sequence(
        a.cell,
        x,
        oracle.array(a.h),
        oracle.array(a.c),
        (weights[0], weights[1]),
        (biases[0], biases[1]),
        batch_sizes,
        a.reverse,
        (d_output, d_states[0], d_states[1]),
    )
    dx, dh, dc, d_w_x, d_w_h, d_b_x, d_b_h = gradients
    present = results[: 1 + states][-len(rows) :]
    named = {f"output {k}": y for k, y in enumerate(present)}
    of_arguments = {"input": dx, "h": dh, "c": dc, "weights": d_w_x, "bias": d_b_x}
    if is_joined:
        of_arguments["weights"] = np.concatenate([d_w_h, d_w_x], axis=1)
    else:
        of_arguments |= {"weight_hh": d_w_h, "bias_hh": d_b_h}
    return named | {f"grad of {name}": y for name, y in of_arguments.items()}


class Errors:
    """Largest e(y) = max|y - exact| / max|exact| of all added results, by name."""

    def __init__(self) -> None:
        self._difference: dict[str, float] = {}
        self._scale: dict[str, float] = {}

    def add(self, name: str, y: Tensor, exact: oracle.Array) -> None:
        difference = np.abs(oracle.array(y).reshape(exact.shape) - exact).max(initial=0)
        scale = np.abs(exact).max(initial=0)
        self._difference[name] = max(self._difference.get(name, 0.0), float(difference))
        self._scale[name] = max(self._scale.get(name, 0.0), float(scale))

    def names(self) -> Iterable[str]:
        return self._difference

    def relative(self, name: str) -> float:
        difference, scale = self._difference[name], self._scale[name]
        return difference / scale if scale > 0 else difference


# Suffix of outputs computed without gradients, by other code.
INFERENCE = " without gradients"


def errors(outputs: Outputs, problems: Iterable[Arguments]) -> tuple[Errors, Errors]:
    ours, plain = Errors(), Errors()
    for arguments in problems:
        with torch.no_grad():
            results = outputs(lltm.functional, arguments)
        grads = [torch.randn_like(y) for y in results]
        exact = exact_results_and_gradients(arguments, grads)
        for k, y in enumerate(results):
            ours.add(f"output {k}{INFERENCE}", y, exact[f"output {k}"])
        for name, y in results_and_gradients(outputs, lltm.functional, arguments, grads).items():
            assert y.dtype == arguments.input.dtype, name
            ours.add(name, y, exact[name])
        for name, y in results_and_gradients(outputs, lltm.reference, arguments, grads).items():
            plain.add(name, y, exact[name])
    return ours, plain


def relative_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Errors relative to the largest elements."""
    return [
        ((y.detach().to(e) - e).abs().max() / e.abs().max().clamp_min(1e-30)).item()
        for y, e in zip(results, exact, strict=True)
        if e.numel() > 0
    ]


class Operators(TorchDispatchMode):
    """Records operators below autograd, autocast and transforms."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        self.called.append((str(func._overloadpacket), shape))
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        """Without the queries of cells, whose answers Python keeps."""
        names = [name.removeprefix("lltm.") for name, _ in self.called if name.startswith("lltm.")]
        return [name for name in names if not name.startswith("_")]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def saved_and_loaded(value: Any, package: Any = torch.jit, **options: Any) -> Any:
    """Another module or program, by `save` and `load` of a package."""
    file = io.BytesIO()
    package.save(value, file)
    file.seek(0)
    return package.load(file, **options)


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Cached decompositions: PyTorch's table is slow."""
    return lltm.decompositions()


Done = subprocess.CompletedProcess[str]


def run(command: Sequence[str | Path], check: bool = True, **options: Any) -> Done:
    """Captures the output. Unless `check` is false, a failed command fails the test."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return checked(done) if check else done


def checked(done: Done) -> Done:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    **environment: str,
) -> Done:
    """Runs outside the source tree."""
    command, env = [sys.executable, *arguments], {**os.environ, **environment}
    return run(command, check, env=env, cwd=cwd or Path(__file__).parent, timeout=timeout_s)


def run_forked(*arguments: str, cwd: Path, check: bool = True) -> Done:
    """Saves importing PyTorch by a single-threaded fork; not for compilers or import tests."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "out"), Path(folder, "err")
        with warnings.catch_warnings():
            for category in (DeprecationWarning, RuntimeWarning):  # other threads are not forked
                warnings.simplefilter("ignore", category)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _run_as_main(arguments, cwd, output, errors)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        done = Done(arguments, code, *(x.read_text(encoding="utf-8") for x in (output, errors)))
        return checked(done) if check else done


def _run_as_main(arguments: Sequence[str], cwd: Path, output: Path, errors: Path) -> int:
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    os.chdir(cwd)
    warnings.resetwarnings()
    torch.set_num_threads(1)  # pool threads are not forked
    status = 0
    try:
        if arguments[0] == "-m":
            sys.argv = [*arguments[1:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, str(cwd))
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [*arguments]
            sys.path.insert(0, str(Path(cwd, arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def flat(results: Any) -> list[Tensor]:
    """Tensors in the results."""
    leaves: list[Tensor] = torch.utils._pytree.tree_leaves(results)
    return leaves


def save_outputs(rank: int, layers: Sequence[torch.nn.Module], x: Tensor, file: Path) -> None:
    """Target of torch.multiprocessing.spawn."""
    torch.save([layer(x)[0] for layer in layers], file)


def evaluate(
    text: str,
    section: str,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Evaluates forward or backward with tensors by name. Returns the assigned values.

    weights are the recurrent weights (H, H) of gates that are products. Forward adds the products
    to the z of these gates in inputs.
    """
    values, assigned = dict(inputs), dict[str, Tensor]()
    shape = torch.broadcast_shapes(*(x.shape for x in inputs.values()))
    dtype = next(iter(inputs.values())).dtype
    for name, op, words in assignments(text, section):
        operands = [
            values[w] if w in values else torch.tensor(float(w), dtype=dtype) for w in words
        ]
        if op == "mean":
            result = operands[0].mean(-1, keepdim=True)
        elif op == "product" and section == "forward":
            result = values[name] + operands[0] @ (weights or {})[name.removeprefix("z.")].T
        elif op == "product":
            of = [(weights or {})[word.removeprefix("d.z.")] for word in words]
            result = torch.stack([x @ u for x, u in zip(operands, of, strict=True)]).sum(0)
        else:
            result = OPERATIONS[op](*operands)
        values[name] = assigned[name] = result.to(dtype).expand(shape)
    return assigned
