"""Mutation testing (tests_cpp/mutants.py)."""

from __future__ import annotations

import mutants
from support import ROOT


def test_every_python_file_has_mutations_that_compile() -> None:
    for path in (ROOT / "python" / "lltm").rglob("[a-z]*.py"):
        text = path.read_text()
        faults = [*mutants.faults_of(path, text)]
        assert faults, path
        for fault in faults[::20]:
            assert fault.apply(text) != text
            compile(fault.apply(text), path, "exec")
