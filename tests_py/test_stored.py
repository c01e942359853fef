"""Files and prepacked weights of version 0.1.0 still load; stored.pt also has the results."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import lltm

STORED: dict[str, Any] = torch.load(Path(__file__).with_name("stored.pt"))


def read(stored: torch.Tensor) -> bytes:
    return bytes(stored.tolist())


@pytest.mark.parametrize(
    ("form", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 2e-2)]
)
def test_prepacked_weights(form: str, tolerance: float) -> None:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    names = ("input", "h", "c", "bias_ih", "bias_hh")
    x, h, c, bias_ih, bias_hh = (STORED[name].to(dtype) for name in names)
    packed = STORED["packed"][form]
    output, _ = lltm.functional.sequence(
        "lstm", x, (h, c), packed, bias_ih=bias_ih, bias_hh=bias_hh
    )
    torch.testing.assert_close(output.float(), STORED["output"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", STORED["modules"])
def test_modules(name: str) -> None:
    module = torch.load(io.BytesIO(read(STORED["modules"][name])), weights_only=False)
    with torch.no_grad():
        output = module(STORED["input"])[0]
    torch.testing.assert_close(output, STORED["outputs"][name], rtol=0, atol=1e-5)


def test_cell_files_and_state_dicts(tmp_path: Path) -> None:
    file = tmp_path / "cell"
    file.write_bytes(read(STORED["file"]))
    cell = lltm.Cell.load(file)
    with pytest.warns(UserWarning, match="load a state_dict"):
        layer = cell.Layer(3, 8)
    layer.load_state_dict(STORED["lru_state"])
    with torch.no_grad():
        output = layer(STORED["input"])[0]
    torch.testing.assert_close(output, STORED["lru_output"], rtol=0, atol=1e-5)


def test_serialized_cells() -> None:
    assert lltm.Cell(STORED["cell"]).text == STORED["cell"]
