"""Text, model and text generation for demo.py; generate.cpp is the C++ version.

Symbols: T steps, B text rows in a batch, V characters in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lltm

State = Tensor | tuple[Tensor, Tensor]  # h of a GRU, else h and c
Layer = Callable[[int, int], nn.RNNBase | lltm.LLTM]  # called with input_size, hidden_size

# The best peak learning rate for each cell, among 0.004, 0.008, 0.012, 0.016, 0.024, 0.032 and
# 0.045: with the fewest bits per held-out character after 600 updates of the demo's model. For the
# GRU, only rates up to 0.016, after 300 updates. The LLTM's best rate is 0.024, but its short runs,
# such as the demo's, are unstable: 2.99 bits after 130 updates, and 2.64 with 0.016.
RATES = {"LLTM": 0.016, "LSTM": 0.032, "GRU": 0.008}


def read_text(path: Path | None) -> tuple[str, str]:
    """Returns (name, text) of a UTF-8 file, or of a text that is part of CPython."""
    if path is not None:
        return path.name, path.read_text(encoding="utf-8")
    # The help() topics: about half a million characters of English.
    from pydoc_data.topics import topics

    return "Python's documentation topics", "\n\n".join(topics.values())


@dataclass
class Corpus:
    """A text as indices into its vocabulary, split into a training and a held-out part."""

    vocabulary: Tensor  # (V), int64: code points, ascending
    training: Tensor  # int64 indices
    held_out: Tensor  # int64 indices, the end of the text

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
        vocabulary, indices = np.unique(points, return_inverse=True)
        # Enough for a stable result, and fast for any text length.
        split = len(indices) - min(len(indices) // 12, 40_000)
        data = torch.from_numpy(indices.astype(np.int64))
        return cls(torch.from_numpy(vocabulary), data[:split], data[split:])

    def decode(self, indices: Tensor) -> str:
        return "".join(map(chr, self.vocabulary[indices].tolist()))


class CharLM(nn.Module):
    """Predicts the next character: embedding, recurrent layer, linear layer.

    `layer` is a layer class of lltm or torch.nn. The vocabulary is a buffer, so that a checkpoint
    is complete.
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
        """Returns a model with about as many parameters; its hidden size is a multiple of 8."""
        embedding_size = model.embedding.embedding_dim

        def build(hidden_size: int) -> CharLM:
            return cls(model.vocabulary, embedding_size, hidden_size, layer)

        def difference(hidden_size: int) -> int:
            with torch.device("meta"):
                return abs(build(hidden_size).parameter_count() - model.parameter_count())

        return build(min(range(8, 2 * model.rnn.hidden_size, 8), key=difference))

    def forward(self, characters: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The logits (T, B, V) of the character after each of the indices (T, B)."""
        hidden, state = self.rnn(self.embedding(characters), state)
        return self.output(hidden), state

    @torch.no_grad()
    def generate(
        self, prompt: str, length: int, seed: int | None = None, temperature: float = 0.8
    ) -> str:
        """Continues a prompt; without a seed, always with the most likely character.

        With a seed, each character is sampled: a uniform number of torch's CPU generator, which
        C++ shares, is mapped by the inverse cumulative distribution in float64. generate.cpp
        therefore writes the same text, unless a number is within a rounding error of a boundary.
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
                # Rounding may leave the last sum below 1, and below the number.
                index = torch.searchsorted(cumulative, uniform).clamp_max(len(cumulative) - 1)
            written.append(chr(int(self.vocabulary[index])))
            logits, state = self(index.view(1, 1), state)
        return "".join(written)
