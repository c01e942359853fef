"""Which native library the package loads, and which module stands for lltm._C."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest
import support
import torch

import lltm
from lltm import _binding

NATIVE = Path(lltm.cmake_prefix_path)
MINOR = ".".join(str(torch.__version__).split(".")[:2])
REPORT = "import lltm; print(lltm.__file__, lltm._C.__file__, lltm.cmake_prefix_path, sep='\\n')"


def native_part(folder: Path) -> list[Path]:
    return [folder / "lib", folder / "include", *folder.glob("_C.*.so")]


def copy_package(site: Path) -> Path:
    """The installed package in another folder, with the native part for this torch alone."""
    package = site / "lltm"
    source = Path(lltm.__file__).parent
    ignored = shutil.ignore_patterns("lib", "include", "_C.*.so", "torch*", "__pycache__")
    shutil.copytree(source, package, ignore=ignored)
    for path in native_part(NATIVE):
        if path.is_dir():
            shutil.copytree(path, package / path.name)
        else:
            shutil.copy2(path, package)
    (package / "_built_with.py").write_text(f'TORCH = "{MINOR}.0"\n')
    return package


def report(site: Path) -> list[Path]:
    run = support.run_python("-c", REPORT, PYTHONPATH=str(site))
    assert run.returncode == 0, run.stderr
    return [Path(line) for line in run.stdout.splitlines()]


def test_a_binding_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    """Only one that is not there may be replaced."""
    package = copy_package(tmp_path)
    for module in package.rglob("_C.*.so"):
        module.unlink()
    (package / "_C.py").write_text("import a_module_that_does_not_exist\n")
    run = support.run_python("-c", REPORT, PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert "No module named 'a_module_that_does_not_exist'" in run.stderr


def move_native_part(package: Path, tree: Path) -> None:
    tree.mkdir()
    for path in native_part(package):
        path.rename(tree / path.name)


def test_a_library_for_another_torch_is_found_in_its_folder(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    tree = package / f"torch{MINOR}"
    move_native_part(package, tree)
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n')
    file, binding, prefix = report(tmp_path)
    assert file == package / "__init__.py"
    assert prefix == tree
    if support.COMPILED_BINDING:
        assert binding.parent == tree


def test_an_import_error_names_every_torch_that_is_served(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    move_native_part(package, package / "torch2.98")
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n')
    run = support.run_python("-c", "import lltm", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert (
        run.stderr.strip()
        .splitlines()[-1]
        .startswith(
            "ImportError: lltm was built against torch 2.98, 2.99.1 and cannot be loaded with"
            f" torch {torch.__version__}: install torch==2.99.*"
        )
    )


def test_an_import_error_names_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / "lib" / "liblltm.so").write_bytes(b"damaged")
    run = support.run_python("-c", "import lltm", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: lltm: {package}/lib/liblltm.so cannot be loaded: ")
    assert message.endswith("file too short")


FUNCTIONS = [
    "version",
    "build_info",
    "cpu_kernels",
    "cuda_persistent",
    "set_cuda_persistent",
    "forward",
    "backward",
]


def words(doc: str | None) -> list[str]:
    """A docstring without its line breaks, which differ with the length of lines in the source."""
    assert doc is not None
    return doc.split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_bindings_have_the_same_functions(name: str) -> None:
    """The compiled one shows its signature in the first line of its docstring."""
    replacement, doc = getattr(_binding, name), getattr(lltm._C, name).__doc__
    if support.COMPILED_BINDING:
        signature, _, doc = doc.partition("\n")
        assert re.findall(r"(\w+): ", signature) == [*inspect.signature(replacement).parameters]
    assert words(doc) == words(replacement.__doc__)


def test_both_bindings_document_the_same_error() -> None:
    assert words(lltm._C.ArgumentError.__doc__) == words(_binding.ArgumentError.__doc__)


def test_the_replaced_binding_names_the_argument_that_is_no_tensor() -> None:
    h = torch.zeros(2, 4)
    message = r"lltm::forward: expected weights to be a tensor, got list"
    with pytest.raises(TypeError, match=f"^{message}$"):
        _binding.forward(torch.zeros(2, 3), [h], None, h, h)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["version", "build_info", "cpu_kernels"])
def test_both_bindings_describe_the_same_library(name: str) -> None:
    assert getattr(_binding, name)() == getattr(lltm._C, name)()


def test_both_bindings_change_the_same_setting() -> None:
    assert not lltm._C.cuda_persistent()
    try:
        _binding.set_cuda_persistent(True)
        assert lltm._C.cuda_persistent()
        assert _binding.cuda_persistent()
    finally:
        lltm._C.set_cuda_persistent(False)
    assert not _binding.cuda_persistent()


@pytest.mark.parametrize("value", [None, "yes", 1.0])
def test_both_bindings_refuse_a_setting_of_another_type(value: object) -> None:
    for binding in (_binding, lltm._C):
        with pytest.raises(TypeError):
            binding.set_cuda_persistent(value)
    assert not lltm._C.cuda_persistent()


@pytest.mark.parametrize("bias", [True, False])
def test_both_bindings_compute_the_same_pair(bias: bool) -> None:
    torch.manual_seed(0)
    input, h, c = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    weights, b = torch.randn(12, 7), torch.randn(12) if bias else None
    ours = _binding.forward(input, weights, b, h, c)
    theirs = lltm._C.forward(input, weights, b, h, c)
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) == 7
    _, new_cell, i, o, g, X, z = ours
    arguments = (torch.randn(5, 4), torch.randn(5, 4), new_cell, i, o, g, X, z, weights)
    gradients = _binding.backward(*arguments)
    assert all(map(torch.equal, gradients, lltm._C.backward(*arguments)))
    assert len(gradients) == 5


def test_a_python_without_a_compiled_binding_uses_operators_and_raises_the_same_errors(
    tmp_path: Path,
) -> None:
    package = copy_package(tmp_path)
    for module in package.rglob("_C.*.so"):
        module.unlink()
    code = """
import pickle, torch, lltm
for call in (
    lambda: lltm.LLTM(3, 4)(torch.zeros(2, 2, 5)),
    lambda: lltm.functional.cell(torch.zeros(2, 3), (torch.zeros(2, 4), torch.zeros(2, 5)),
                                 torch.zeros(12, 7)),
):
    try:
        call()
    except lltm.ArgumentError as error:
        assert isinstance(error, ValueError) and isinstance(error, RuntimeError)
        assert str(error).startswith("lltm::"), error
        assert type(pickle.loads(pickle.dumps(error))) is lltm.ArgumentError
    else:
        raise SystemExit("no error")
print(lltm._C.__file__)
"""
    run = support.run_python("-c", code, PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == package / "_binding.py"
