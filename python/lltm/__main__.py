"""`python -m lltm`: a report on this environment, to go with a bug report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

import torch

import lltm
from lltm import _C


def report() -> str:
    """Returns the report, one `name: value` a line."""
    here = "\n".join(f"{name}: {value}" for name, value in _environment())
    return f"Library\n{lltm.build_info().rstrip()}\n\nEnvironment\n{here}"


def _environment() -> Iterator[tuple[str, str]]:
    yield "lltm in", os.path.dirname(_C.__file__)
    yield "CPU kernels chosen", _C.cpu_kernels()
    yield "CUDA devices", _cuda_devices()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    yield "threads", str(torch.get_num_threads())
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "processor", _processor()
    for variable in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS"):
        if variable in os.environ:
            yield variable, os.environ[variable]


def _cuda_devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(
        "{} sm_{}{}".format(torch.cuda.get_device_name(d), *torch.cuda.get_device_capability(d))
        for d in range(torch.cuda.device_count())
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(report())
    print("\n`python -m torch.utils.collect_env` reports on PyTorch and its environment.")
