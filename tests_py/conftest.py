"""Seeds every test, and reports seed and library."""

from __future__ import annotations

import os
from collections.abc import Generator

# Workers and their child processes share the CPUs. libgomp reads these variables when torch loads.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lltm

# Inductor's cache key is the graph, without the operator schemas and the vector width: code for
# AVX2, compiled for AVX-512, writes beyond its buffers.
LIBRARY = Path(lltm.__file__).parent / "lib" / "liblltm.so"
if LIBRARY.exists():
    digest = hashlib.sha256(LIBRARY.read_bytes()).hexdigest()[:16]
    name = f"lltm_inductor_{os.getuid()}_{torch.backends.cpu.get_cpu_capability()}_{digest}"
    cache = Path(tempfile.gettempdir()) / name
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

SEED = int(os.environ.get("LLTM_TEST_SEED", "0"))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A worker imports the packages of its test group only once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadgroup"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Appends the group to a test's id, where the controller reads it.

    pytest-xdist 3.8 only does so if its arguments contain --dist=loadgroup, and before pytest 9.2.
    """
    for item in items if workers else ():
        group = item.get_closest_marker("xdist_group")
        if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
            name = f"{item.nodeid}@{group.args[0]}"
            if hasattr(item, "_id"):  # pytest 9.2
                item._id = type(item._id).parse(name)
            else:
                item._nodeid = name


def pytest_report_header() -> list[str]:
    return [
        f"lltm {lltm.__version__} in {lltm.cmake_prefix_path}, CPU kernels {lltm._C.cpu_kernels()}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, LLTM_TEST_SEED={SEED}",
    ]


@pytest.fixture(autouse=True)
def seed() -> None:
    # torch.manual_seed takes milliseconds without a GPU: it formats the stack for each device type.
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("reproduce", f"LLTM_TEST_SEED={SEED} pytest '{item.nodeid}'"))
    return report
