"""Saves layers and times them with lltm/realtime.h: `make bench-realtime`.

python benchmarks/realtime.py build/realtime/benchmarks/lltm_realtime_benchmark
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import lltm

SIZES = (16, 40, 64, 128)


def main(program: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for make in (lltm.LSTM, lltm.GRU):
            for hidden in SIZES:
                names.append(f"{make.__name__.lower()}-{hidden}.rt")
                lltm.realtime.save(make(1, hidden), Path(folder, names[-1]))
        subprocess.run([Path(program).resolve(), *names], cwd=folder, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
