"""Selection of the native library and of lltm._C."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import support
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
    (package / "_built_with.py").write_text(f'TORCH = "{MINOR}.0"\n', encoding="utf-8")
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
    (package / "_C.py").write_text("import a_module_that_does_not_exist\n", encoding="utf-8")


def built_with_two(package: Path) -> None:
    move_native_part(package, package / f"torch{MINOR}")
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n', encoding="utf-8")


def built_with_others(package: Path) -> None:
    move_native_part(package, package / "torch2.98")
    (package / "_built_with.py").write_text('TORCH = "2.99.1"\n', encoding="utf-8")


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
        files = (open(f"{{site}}/{{name}}", "w", encoding="utf-8") for name in ("out", "err"))
        sys.stdout, sys.stderr = files
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
    assert (site / "err").read_text(encoding="utf-8") == ""
    return [Path(line) for line in (site / "out").read_text(encoding="utf-8").splitlines()]


def error(site: Path) -> str:
    assert (site / "out").read_text(encoding="utf-8") == ""
    return (site / "err").read_text(encoding="utf-8").strip().splitlines()[-1]


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


@pytest.mark.parametrize("name", _binding.__all__)
def test_both_bindings_have_the_same_functions(name: str) -> None:
    """The compiled docstring starts with the signature."""
    replacement, compiled = getattr(_binding, name), getattr(lltm._C, name)
    if name not in ("forward", "backward"):
        assert compiled is replacement
        return
    if support.COMPILED_BINDING:
        signature = compiled.__doc__.partition("\n")[0]
        assert re.findall(r"(\w+): ", signature) == [*inspect.signature(replacement).parameters]
    assert (inspect.getdoc(replacement) or "-") in inspect.cleandoc(compiled.__doc__)


def test_the_replaced_binding_names_an_argument_of_another_type() -> None:
    h = torch.zeros(2, 4)
    message = r"lltm::forward: expected weights to be a tensor, got list"
    with pytest.raises(TypeError, match=f"^{message}$"):
        _binding.forward(torch.zeros(2, 3), [h], None, h, h)  # type: ignore[arg-type]


def test_a_setting_is_read_and_changed_in_any_mode() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        assert lltm._C.cuda_persistent()
        with lltm.backends.cuda.flags(persistent=False):
            assert not lltm._C.cuda_persistent()
        assert lltm._C.version() == lltm.__version__
        return x + 1

    x = torch.zeros(2)
    graph = torch.jit.trace(call, x).graph
    assert "lltm" not in str(graph).replace(__file__, "")
    torch.func.vmap(call)(x)
    with FakeTensorMode(), torch.inference_mode():
        call(torch.zeros(2))
    assert lltm._C.cuda_persistent()


@pytest.mark.parametrize("value", [None, "yes", 1.0])
def test_a_setting_of_another_type_is_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match="expected enabled to be a bool"):
        lltm._C.set_cuda_persistent(value)


def test_the_precision_of_float32_is_a_setting() -> None:
    cuda = lltm.backends.cuda
    with cuda.flags(float32="tf32"):
        with cuda.flags(persistent=False, float32=None):
            assert (cuda.persistent, cuda.float32) == (False, None)
        assert (cuda.persistent, cuda.float32) == (True, "tf32")
        with pytest.raises(ValueError, match="expected 'ieee', 'tf32x3', 'tf32' or None, got 'b'"):
            cuda.float32 = "b"
    with pytest.raises(TypeError, match="expected float32 to be a str or None, got bool"):
        lltm._C.set_cuda_float32(cast(Any, True))
    assert cuda.float32 is None
