"""Processes that may hang: each is ended, with all that it has started, when its time is up."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

KILL_SECONDS = 5.0  # between the request to end and the end
LOOK_SECONDS = 0.1  # between two looks at what was printed


PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def own_group() -> None:
    """In a new process: a group that `end` can end; killed when its parent ends."""
    os.setpgrp()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it has started, which is a process group of its own.

    What a driver holds may not end at all, so nobody waits for it.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(KILL_SECONDS)


def watch(
    command: Sequence[str],
    heed: Callable[[str], None],
    *,
    seconds: float,
    silence: float = float("inf"),
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int | None:
    """Runs a command, and calls `heed` with each line that it prints, on either stream, at once.

    Returns the exit status; None if it was ended, after so many seconds in all or without a line.
    A line that was not completed is the last one.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            preexec_fn=own_group,
        )
        try:
            return _watch(process, output.fileno(), heed, seconds, silence)
        finally:
            end(process)


def _watch(
    process: subprocess.Popen[bytes],
    output: int,
    heed: Callable[[str], None],
    seconds: float,
    silence: float,
) -> int | None:
    last = time.monotonic() + seconds
    offset, begun, spoke = 0, b"", time.monotonic()
    while True:
        status, late = process.poll(), time.monotonic() > min(last, spoke + silence)
        while more := os.pread(output, 1 << 20, offset):  # what was printed before that
            offset, spoke = offset + len(more), time.monotonic()
            *whole, begun = (begun + more).split(b"\n")
            for line in whole:
                heed(line.decode(errors="replace"))
        if status is not None or late:
            if begun:
                heed(begun.decode(errors="replace"))
            return status
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
