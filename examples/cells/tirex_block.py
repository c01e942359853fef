"""Runs the sLSTM block of TiRex, a forecasting model, with a layer of lltm.

    pip install tirex-ts
    python examples/cells/tirex_block.py --compile

The cell of TiRex is a Python loop, which on the CPU rounds states and weights to bfloat16. Only the
cell is replaced: norms, gates and feed-forward network stay. For a block with random weights, the
script prints the differences from TiRex' loop without this rounding, relative to the largest
element, and the times. Compiling the loop takes minutes.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from tirex.models.slstm.block import sLSTMBlock
from tirex.models.slstm.cell import sLSTMCell
from tirex.models.slstm.layer import sLSTMBlockConfig
from torch import Tensor, nn

import lltm
from lltm.benchmark.timing import Settings, measure, timed


class Cell(nn.Module):
    """Replaces an sLSTMCell of TiRex, or of xlstm with its default shapes."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.layer = lltm.cells.from_xlstm(cell)

    def forward(self, input: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, states = self.layer(input, None if state is None else (*state.unsqueeze(1),))
        return output.unflatten(2, (self.layer.heads, -1)).transpose(1, 2), torch.cat(states)


class Float32Cell(sLSTMCell):
    """TiRex' loop, without rounding to bfloat16."""

    def _impl_torch(self, input: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (self.config.num_heads, self.config.num_gates, -1)
        bias = self._bias_.view(sizes).transpose(0, 1).flatten()
        return self._impl_forward_torch(input.flatten(2), state, self._recurrent_kernel_, bias)


def blocks(size: int) -> dict[str, nn.Module]:
    block = sLSTMBlock(sLSTMBlockConfig(embedding_dim=size, num_heads=4), backend="torch")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=size**-0.5 if parameter.dim() > 1 else 1)
    ours, loop = copy.deepcopy(block), copy.deepcopy(block)
    ours.slstm_layer.slstm_cell = Cell(block.slstm_layer.slstm_cell)
    loop.slstm_layer.slstm_cell.__class__ = Float32Cell
    return {"lltm": ours, "TiRex": block, "TiRex, float32": loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(16, 64, 512), help="B T H")
    parser.add_argument("--compile", action="store_true", help="torch.compile of TiRex too")
    options = parser.parse_args()
    torch.manual_seed(0)
    models, x = blocks(options.shape[2]), torch.randn(options.shape)
    with torch.no_grad():
        expected = models["TiRex, float32"](x)
        for name, model in models.items():
            error = (model(x) - expected).abs().max() / expected.abs().max()
            print(f"{name:16}{error:8.1e}")
    if options.compile:
        models["torch.compile, TiRex"] = torch.compile(models["TiRex"])
    settings = Settings(rounds=7, seconds=0.05, compile=options.compile)
    runs = {"inference": lambda model: model(x), "training": lambda model: model(x).backward(x)}
    for title, run in runs.items():
        training = title == "training"
        builds = {name: partial(timed, partial(run, m), training) for name, m in models.items()}
        print("\n".join(measure(title, builds, settings).lines()), flush=True)


if __name__ == "__main__":
    main()
