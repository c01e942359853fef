"""Builds the extension just in time, with torch.utils.cpp_extension.load, and tests it.

    python examples/jit/build.py

Compiles the sources of the library (listed in CMakeLists.txt) and of the Python module to one
shared object. Unlike the installed package, it has a single set of compiler flags, so only the
baseline CPU kernels, and no Python modules. The first build takes minutes, later builds seconds.
A process cannot load both this module and an installed lltm, because both register the operators.

Needs: pip install torch ninja nlohmann_json setuptools, and a C++20 compiler.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import nlohmann_json
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")


def sources() -> list[str]:
    """All sources in CMakeLists.txt except CUDA and the check of the loaded libtorch, and the
    bindings."""
    listed = re.findall(
        r"(?:^ +|lltm_dispatch )(cpp/src/(?!cuda/|op/cuda)\S+\.cpp)\b", PROJECT, re.MULTILINE
    )
    bindings = ["python/bindings.cpp", "python/module_calls.cpp"]
    return [str(ROOT / source) for source in [*dict.fromkeys(listed), *bindings]]


def write_version_header(include_dir: Path) -> None:
    """Writes lltm/version.h from version.h.in, as CMake does."""
    match = re.search(r"project\(\s*lltm\s+VERSION ([\d.]+)", PROJECT)
    assert match is not None
    text = (ROOT / "cpp/include/lltm/version.h.in").read_text(encoding="utf-8")
    parts = dict(zip(("MAJOR", "MINOR", "PATCH"), match[1].split("."), strict=True))
    for name, part in parts.items():
        text = text.replace(f"@PROJECT_VERSION_{name}@", part)
    text = text.replace("@PROJECT_VERSION@", match[1])
    header = include_dir / "lltm" / "version.h"
    # Written only if it changed; otherwise every build would compile everything.
    if not header.exists() or header.read_text(encoding="utf-8") != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text, encoding="utf-8")


def load() -> ModuleType:
    """Compiles outdated files under build/jit and loads the module."""
    # The module reads its docstrings from lltm._binding. The package itself would load liblltm.
    sys.modules["lltm"] = package = ModuleType("lltm")
    package.__path__ = [str(ROOT / "python/lltm")]
    build_dir = ROOT / "build" / "jit" / f"torch-{torch.__version__}"
    build_dir.mkdir(parents=True, exist_ok=True)
    write_version_header(build_dir / "include")
    return cpp_extension.load(  # type: ignore[no-any-return]
        name="lltm_jit",
        sources=sources(),
        extra_include_paths=[
            str(build_dir / "include"),
            str(ROOT / "cpp/include"),
            str(ROOT / "cpp/src"),
            str(Path(nlohmann_json.__file__).parent / "include"),
        ],
        extra_cflags=["-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
        extra_ldflags=["-fopenmp"],
        build_directory=str(build_dir),
        with_cuda=False,
    )


def plain_step(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    i, o, g = F.linear(torch.cat([h, x], dim=1), weights, bias).chunk(3, dim=1)
    c = c + torch.sigmoid(i) * F.elu(g)
    return torch.tanh(c) * torch.sigmoid(o), c


def main() -> None:
    module = load()
    print(module.build_info())

    torch.manual_seed(0)
    steps, batch, inputs, hidden = 7, 16, 32, 128
    x = torch.randn(steps, batch, inputs)
    h, c = torch.randn(2, batch, hidden)
    weights = (torch.randn(3 * hidden, hidden + inputs) / hidden**0.5).requires_grad_()
    bias = torch.randn(3 * hidden).requires_grad_()

    ours = torch.ops.lltm.step("lltm", x[0], h, c, weights, bias_ih=bias)
    plain = plain_step(x[0], h, c, weights, bias)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours[0].sum() + ours[1].sum(), (weights, bias)),
        torch.autograd.grad(plain[0].sum() + plain[1].sum(), (weights, bias)),
    )

    new_h, new_c, *_ = module.forward(x[0], weights, bias, h, c)
    torch.testing.assert_close((new_h, new_c), plain)

    output, h_n, c_n = torch.ops.lltm.sequence("lltm", x, h, c, weights, bias_ih=bias)
    for t in range(steps):
        h, c = plain_step(x[t], h, c, weights, bias)
        torch.testing.assert_close(output[t], h)
    torch.testing.assert_close((h_n, c_n), (h, c))
    print("values and gradients agree with the PyTorch reference")


if __name__ == "__main__":
    main()
