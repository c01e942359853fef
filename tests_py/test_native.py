"""Selection of the native library and of lltm._C."""

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


def native_part(folder: Path) -> list[Path]:
    return [folder / "lib", folder / "include", *folder.glob("_C.*.so")]


def copy_package(site: Path) -> Path:
    """Copies the package, with the native part for this torch only."""
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


def move_native_part(package: Path, tree: Path) -> None:
    tree.mkdir()
    for path in native_part(package):
        path.rename(tree / path.name)


def without_binding(package: Path) -> None:
    for module in package.rglob("_C.*.so"):
        module.unlink()


def broken_binding(package: Path) -> None:
    without_binding(package)
    (package / "_C.py").write_text("import a_module_that_does_not_exist\n")


def built_with_two(package: Path) -> None:
    move_native_part(package, package / f"torch{MINOR}")
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n')


def built_with_others(package: Path) -> None:
    move_native_part(package, package / "torch2.98")
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n')


def damaged(package: Path) -> None:
    (package / "lib" / "liblltm.so").write_bytes(b"damaged")


CHANGES = (without_binding, broken_binding, built_with_two, built_with_others, damaged)
ERRORS = """
import pickle
for call in (
    lambda: lltm.LLTM(3, 4)(torch.zeros(2, 2, 5)),
    lambda: lltm.functional.step("lltm", torch.zeros(2, 3), (torch.zeros(2, 4), torch.zeros(2, 5)),
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
"""
# Forks save importing PyTorch repeatedly. Output goes to the package's folder, without the warning
# of flop_counter if Triton is not installed.
IMPORTS = f"""
import os, sys, traceback, torch, torch.utils.flop_counter
for site in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, site)
        sys.stdout, sys.stderr = (open(f"{{site}}/{{name}}", "w") for name in ("out", "err"))
        try:
            import lltm
            print(lltm.__file__, lltm._C.__file__, lltm.cmake_prefix_path, sep="\\n")
            if site.endswith("without_binding"):
                exec({ERRORS!r})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the changed package, and its import output."""
    folder = tmp_path_factory.mktemp("sites")
    for change in CHANGES:
        change(copy_package(folder / change.__name__))
    run = support.run_python("-c", IMPORTS, *(str(folder / c.__name__) for c in CHANGES))
    assert run.returncode == 0, run.stderr
    return folder


def report(site: Path) -> list[Path]:
    assert (site / "err").read_text() == ""
    return [Path(line) for line in (site / "out").read_text().splitlines()]


def error(site: Path) -> str:
    assert (site / "out").read_text() == ""
    return (site / "err").read_text().strip().splitlines()[-1]


@pytest.mark.xdist_group("native")
class TestImport:
    def test_a_binding_that_cannot_be_loaded_is_an_error(self, sites: Path) -> None:
        """Only a missing binding may be replaced."""
        expected = "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"
        assert error(sites / "broken_binding") == expected

    def test_a_library_for_another_torch_is_found_in_its_folder(self, sites: Path) -> None:
        package = sites / "built_with_two" / "lltm"
        file, binding, prefix = report(sites / "built_with_two")
        assert file == package / "__init__.py"
        assert prefix == package / f"torch{MINOR}"
        if support.COMPILED_BINDING:
            assert binding.parent == prefix

    def test_an_import_error_names_every_supported_torch(self, sites: Path) -> None:
        message = error(sites / "built_with_others")
        assert message.startswith(
            "ImportError: lltm was built against torch 2.98, 2.99.1 and cannot be loaded with"
            f" torch {torch.__version__}: install torch==2.99.*"
        )
        assert "pip install --no-build-isolation" in message

    def test_an_import_error_names_a_library_that_cannot_be_loaded(self, sites: Path) -> None:
        library, message = sites / "damaged/lltm/lib/liblltm.so", error(sites / "damaged")
        assert message.startswith(f"ImportError: lltm: {library} cannot be loaded: ")
        assert message.endswith("file too short")

    def test_without_a_compiled_binding_there_are_operators_and_the_same_errors(
        self, sites: Path
    ) -> None:
        _, binding, _ = report(sites / "without_binding")
        assert binding == sites / "without_binding/lltm/_binding.py"


@pytest.mark.parametrize("name", [n for n in _binding.__all__ if n != "ArgumentError"])
def test_both_bindings_have_the_same_functions(name: str) -> None:
    """The compiled docstring starts with the signature."""
    replacement, doc = getattr(_binding, name), getattr(lltm._C, name).__doc__
    if support.COMPILED_BINDING:
        signature = doc.partition("\n")[0]
        assert re.findall(r"(\w+): ", signature) == [*inspect.signature(replacement).parameters]
    assert (inspect.getdoc(replacement) or "-") in inspect.cleandoc(doc)
    assert lltm._C.ArgumentError is _binding.ArgumentError


def test_the_replaced_binding_names_an_argument_of_another_type() -> None:
    h = torch.zeros(2, 4)
    message = r"lltm::forward: expected weights to be a tensor, got list"
    with pytest.raises(TypeError, match=f"^{message}$"):
        _binding.forward(torch.zeros(2, 3), [h], None, h, h)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["version", "build_info", "cpu_kernels"])
def test_both_bindings_describe_the_same_library(name: str) -> None:
    assert getattr(_binding, name)() == getattr(lltm._C, name)()


def test_both_bindings_change_the_same_setting() -> None:
    assert lltm._C.cuda_persistent()
    try:
        _binding.set_cuda_persistent(False)
        assert not lltm._C.cuda_persistent()
        assert not _binding.cuda_persistent()
    finally:
        lltm._C.set_cuda_persistent(True)
    assert _binding.cuda_persistent()


@pytest.mark.parametrize("value", [None, "yes", 1.0])
def test_both_bindings_reject_a_setting_of_another_type(value: object) -> None:
    for binding in (_binding, lltm._C):
        with pytest.raises(TypeError):
            binding.set_cuda_persistent(value)
    assert lltm._C.cuda_persistent()


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
