"""Shapes of programs in which people use torch.nn's LSTM and GRU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lltm.benchmark.cases import Case

# By program or field; those of one cell alone name it.
USERS: dict[str, Case] = {
    "qlib": Case((20, 800, 20, 64), num_layers=2),
    "neuralhydrology": Case((365, 256, 32, 128)),
    "PufferLib": Case((16, 32, 128, 128)),
    "DeepFilterNet": Case((300, 32, 256, 256), cell="gru"),
    "neuralforecast": Case((48, 128, 8, 128), num_layers=2),
    "taggers": Case((40, 32, 400, 256), bidirectional=True, packed=True),
    "pyannote": Case((589, 32, 60, 128), num_layers=2, bidirectional=True),
    "speech": Case((128, 1, 640, 256), bidirectional=True),
    "OCR": Case((60, 1, 256, 256), bidirectional=True),
    "VAD": Case((1, 1, 128, 128)),
}


def user_cases(cells: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, Case]]:
    """Yields (title, case) for the LSTM and the GRU, where they are among `cells`."""
    for name, shape in USERS.items():
        for cell in ("lstm", "gru") if shape.cell == "lltm" else (shape.cell,):
            for dtype in dtypes:
                for training in (False, True):
                    case = replace(shape, cell=cell, dtype=dtype, training=training)
                    if cell in cells:
                        yield f"{case}, {name}", case
