"""Prints a report on this environment, for bug reports."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
from collections.abc import Iterator

import torch

import lltm
from lltm import _C


def report() -> str:
    """Returns the report, with lines `name: value`."""
    here = "\n".join(f"{name}: {value}" for name, value in _environment())
    return f"Library\n{lltm.build_info().rstrip()}\n\nEnvironment\n{here}"


def _environment() -> Iterator[tuple[str, str]]:
    yield "lltm in", os.path.dirname(lltm.__file__)
    yield "binding", "torch.ops, for any Python" if _C.__name__ != "lltm._C" else "lltm._C"
    yield "CPU kernels chosen", _C.cpu_kernels()
    if features := _arm_features():
        yield "CPU extensions", features
    yield "CUDA devices", _cuda_devices()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    yield "threads", str(torch.get_num_threads())
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "processor", _processor()
    yield "load average", f"{os.getloadavg()[0]:.1f}, {usable_cores()} cores"
    for variable in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS"):
        if variable in os.environ:
            yield variable, os.environ[variable]
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        yield variable, os.environ.get(variable, "not set")


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return len(usable(0))


def _cuda_devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(
        "{} sm_{}{}".format(torch.cuda.get_device_name(d), *torch.cuda.get_device_capability(d))
        for d in range(torch.cuda.device_count())
    )


def _arm_features() -> str:
    """Returns the CPU's extensions that the kernels use, and SVE; "" on other systems."""
    if platform.machine() != "aarch64" or sys.platform != "linux":
        return ""
    auxiliary = ctypes.CDLL(None).getauxval
    auxiliary.restype = ctypes.c_ulong
    # AT_HWCAP or AT_HWCAP2, and the bit.
    bits = {"dotprod": (16, 20), "sve": (16, 22), "i8mm": (26, 13), "bf16": (26, 14)}
    found = [name for name, (word, bit) in bits.items() if auxiliary(word) >> bit & 1]
    return ", ".join(found) or "none"


def _processor() -> str:
    codes: list[str] = []  # of an ARM CPU, which has no name here
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            for line in cpuinfo:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
                if name.strip() in ("CPU implementer", "CPU part"):
                    codes.append(line.replace("\t", "").strip())
                if len(codes) == 2:
                    return ", ".join(codes)
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m lltm", description=__doc__).parse_args()
    print(report())
    print("\n`python -m torch.utils.collect_env` reports on PyTorch and its environment.")
