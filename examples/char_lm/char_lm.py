"""The text, the model and how it writes: what train.py, demo.py and generate.cpp share.

Letters: T steps, B rows side by side, V characters in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lltm

State = Tensor | tuple[Tensor, Tensor]  # of a GRU h, else h and c
Layer = Callable[[int, int], nn.RNNBase | lltm.LLTM]  # of input_size, hidden_size

# The peak learning rate that suits each cell: of 0.004, 0.008, 0.012, 0.016, 0.024, 0.032 and
# 0.045 the one with the fewest bits per held-out character after 600 updates of the demo's model;
# of the GRU, up to 0.016 alone, after 300.
RATES = {"LLTM": 0.024, "LSTM": 0.032, "GRU": 0.008}


def read_text(path: Path | None) -> tuple[str, str]:
    """Returns (name, text): of a UTF-8 file, or of a text that comes with every CPython."""
    if path is not None:
        return path.name, path.read_text(encoding="utf-8")
    # What help() shows for language topics: about half a million characters of English.
    from pydoc_data.topics import topics

    return "Python's documentation topics", "\n\n".join(topics.values())


@dataclass
class Corpus:
    """A text as indices into its vocabulary, split into a training and a held-out part."""

    vocabulary: Tensor  # (V), int64: the code points that occur, ascending
    training: Tensor  # int64 indices
    held_out: Tensor  # int64 indices, the end of the text

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
        vocabulary, indices = np.unique(points, return_inverse=True)
        # Enough for a steady figure, and quick to read whatever the length of the text.
        split = len(indices) - min(len(indices) // 12, 40_000)
        data = torch.from_numpy(indices.astype(np.int64))
        return cls(torch.from_numpy(vocabulary), data[:split], data[split:])

    def decode(self, indices: Tensor) -> str:
        return "".join(map(chr, self.vocabulary[indices].tolist()))


class CharLM(nn.Module):
    """Predicts the next character: embedding, recurrent layer, linear layer.

    `layer` is a class of layers, lltm's or torch.nn's. The vocabulary is a buffer, so a checkpoint
    is all that another program needs.
    """

    def __init__(
        self,
        vocabulary: Tensor,
        embedding_size: int = 64,
        hidden_size: int = 256,
        layer: Layer = lltm.LLTM,
    ) -> None:
        super().__init__()
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary)
        self.embedding = nn.Embedding(len(vocabulary), embedding_size)
        self.rnn = layer(embedding_size, hidden_size)
        self.output = nn.Linear(hidden_size, len(vocabulary))

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def with_parameters_of(cls, model: CharLM, layer: Layer) -> CharLM:
        """A model whose hidden size, a multiple of 8, gives it as many parameters, or nearly."""
        embedding_size = model.embedding.embedding_dim

        def build(hidden_size: int) -> CharLM:
            return cls(model.vocabulary, embedding_size, hidden_size, layer)

        def difference(hidden_size: int) -> int:
            with torch.device("meta"):
                return abs(build(hidden_size).parameter_count() - model.parameter_count())

        return build(min(range(8, 2 * model.rnn.hidden_size, 8), key=difference))

    def forward(self, characters: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Takes (T, B) indices; returns the logits of what follows each, (T, B, V)."""
        hidden, state = self.rnn(self.embedding(characters), state)
        return self.output(hidden), state

    @torch.no_grad()
    def generate(
        self, prompt: str, length: int, seed: int | None = None, temperature: float = 0.8
    ) -> str:
        """Continues a prompt; greedily (the likeliest character each time) without a seed.

        With a seed, each character is drawn by inverting the cumulative distribution, in
        float64, at one uniform number of torch's CPU generator. That generator gives C++ the same
        stream, and a last-bit difference between two builds moves a character only if the number
        falls on the very edge of an interval; so generate.cpp writes the same text.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        points = torch.tensor([ord(character) for character in prompt])
        indices = torch.searchsorted(self.vocabulary, points).clamp_max(len(self.vocabulary) - 1)
        if not torch.equal(self.vocabulary[indices], points):
            raise ValueError("the prompt has a character that the training text lacks")
        logits, state = self(indices.unsqueeze(1))
        written = []
        for _ in range(length):
            scores = logits[-1, 0].double()
            if generator is None:
                index = scores.argmax()
            else:
                cumulative = torch.softmax(scores / temperature, dim=0).cumsum(dim=0)
                uniform = torch.rand((), dtype=torch.float64, generator=generator)
                # Rounding may leave the last sum a little below 1, and below the number.
                index = torch.searchsorted(cumulative, uniform).clamp_max(len(cumulative) - 1)
            written.append(chr(int(self.vocabulary[index])))
            logits, state = self(index.view(1, 1), state)
        return "".join(written)
