"""lltm.realtime.save; tests_cpp/test_realtime.cpp and test_save_realtime.cpp run its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import support
import torch

import lltm


def saved(layer: Any, path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors."""
    lltm.realtime.save(layer, path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
        tensors[name] = values.view(entry["shape"])
    return metadata, tensors


def test_a_layer_is_saved_in_the_layout_of_the_operators(tmp_path: Path) -> None:
    lstm = lltm.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    metadata, tensors = saved(lstm, tmp_path / "lstm.rt")
    assert metadata == {"lltm.realtime": "1", "cell": "lstm", "format": "pt"}
    state = lstm.state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)

    gru = lltm.GRU(3, 4, bias=False, dtype=torch.bfloat16)
    _, tensors = saved(gru, tmp_path / "gru.rt")
    assert torch.equal(tensors["weight_hh_l0"], gru.state_dict()["weight_hh_l0"].float())
    assert torch.equal(tensors["bias_ih_l0"], torch.zeros(12))

    layer = lltm.LLTM(3, 4)
    _, tensors = saved(layer, tmp_path / "lltm.rt")
    weights = layer.state_dict()["weights_l0"]
    assert torch.equal(tensors["weight_hh_l0"], weights[:, :4])
    assert torch.equal(tensors["weight_ih_l0"], weights[:, 4:])

    cell = lltm.cells.peephole_lstm
    metadata, tensors = saved(cell.Layer(3, 4), tmp_path / "peephole.rt")
    assert metadata["cell"] == cell.text
    assert tensors["bias_ih_l0"].shape == (7 * 4,)


def test_what_is_not_supported_is_refused_with_the_reason(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "a layer with bidirectional = False, got True": lltm.GRU(3, 4, bidirectional=True),
        "a layer with proj_size = 0, got 2": lltm.LSTM(3, 4, proj_size=2),
        "a layer with heads = 1, got 2": lltm.cells.slstm.Layer(8, 8, heads=2),
        "layer to be a layer of lltm, got a PrepackedGRU, whose weights are packed": lltm.GRU(
            3, 4
        ).prepack(),
        "layer to be a layer of lltm, got a LSTMCell": lltm.LSTMCell(3, 4),
        "layer to be a layer of lltm, got a LSTM": torch.nn.LSTM(3, 4),
        "a cell without products, got mgu": lltm.cells.mgu.Layer(3, 4),
        "a cell without means, got layernorm_lstm": lltm.cells.layernorm_lstm.Layer(3, 4),
        "a cell without gates in the input, got t_lstm": lltm.cells.t_lstm.Layer(3 + 4, 4),
        "a cell without other outputs than h, got alpha": lltm.cells.alpha.Layer(3, 4),
    }
    for expected, layer in wrong.items():
        with pytest.raises(lltm.ArgumentError) as caught:
            lltm.realtime.save(layer, tmp_path / "x.rt")
        assert str(caught.value).endswith(f": expected {expected}")
    assert not (tmp_path / "x.rt").exists()
    with pytest.raises(RuntimeError, match="cannot write"):
        lltm.realtime.save(lltm.GRU(3, 4), tmp_path / "none" / "x.rt")


@pytest.mark.slow  # trains
def test_an_amplifier_learns(tmp_path: Path) -> None:
    script = support.ROOT / "examples/amplifier/train.py"
    options = ["--demo", "amplifier", "--hidden-size", "8", "--seconds", "20"]
    result = support.run_python(str(script), *options, cwd=tmp_path, timeout_s=240)
    error = float(result.stdout.split("trained: error ")[1].split()[0])
    assert error < 0.3
    assert {path.suffix for path in tmp_path.iterdir()} == {".rt", ".head", ".wav"}
