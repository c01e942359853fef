"""Modules in the manner of torch.nn.LSTMCell and torch.nn.LSTM: the LLTM, and torch's LSTM and GRU.

Letters: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _check
from ._C import ArgumentError
from ._recurrent import (
    Layer,
    MadeLayer,
    MadeStep,
    PairLayer,
    PairStep,
    Prepacked,
    SingleLayer,
    SingleStep,
)

__all__ = [
    "GRU",
    "LLTM",
    "LSTM",
    "GRUCell",
    "LLTMCell",
    "LSTMCell",
    "PrepackedGRU",
    "PrepackedLLTM",
    "PrepackedLSTM",
]

GATES = 3  # of the LLTM

# ---- the LLTM -------------------------------------------------------------------


class LLTMCell(PairStep, MadeStep):
    """One step of the Long-Long-Term-Memory unit, an LSTM without a forget gate.

    See :func:`lltm.functional.cell` for the equations.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there is a bias
        device, dtype: of the parameters

    Parameters::

        weights  (3H, H+I)
        bias     (3H), or None

    both drawn from the uniform distribution on ±1/sqrt(H). ``weights[:, :H]`` multiplies h, as
    weight_hh of torch.nn.LSTMCell does, and ``weights[:, H:]`` the input, as weight_ih does; of the
    rows the first H are the input gate, the next the output gate, the last the candidate.

    Example::

        cell = lltm.LLTMCell(32, 128)
        h, c = cell(torch.randn(16, 32))
        h, c = cell(torch.randn(16, 32), (h, c))
    """

    input_size: int
    hidden_size: int
    weights: nn.Parameter
    bias: nn.Parameter | None

    _CELL = "lltm"
    _where = "LLTMCell"
    _parameter_names = ("weights", "bias")

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        return _shapes(self.hidden_size, columns)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        _flatten_biases(state_dict, [prefix + "bias"], GATES * self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class LLTM(PairLayer, MadeLayer):
    """A recurrent layer of LLTM cells over sequences, used like torch.nn.LSTM.

    Args:
        input_size: I
        hidden_size: H
        num_layers: L; each layer runs over the output of the one before
        bias: whether there are biases
        batch_first: batched tensors are (B, T, .) rather than (T, B, .); says nothing about the
            states, and nothing about unbatched and packed input
        dropout: probability of zeroing an element of the output of every layer but the last,
            when training
        bidirectional: a second direction runs from the last step to the first; its output is
            concatenated to the first one's
        proj_size: 0; torch.nn.LSTM has it, an LLTM has no projection
        device, dtype: of the parameters
        checkpoint_steps: for training on long sequences: 0, or how many steps apart each layer
            saves its state, to compute the activations of the steps in between again in backward
            (:func:`lltm.functional.sequence`)
        recurrent_dropout: probability of zeroing an element of h where the next step's GEMM reads
            it, when training: one mask (B, H) for all steps of a call, drawn for each layer and
            direction (Gal and Ghahramani, https://arxiv.org/abs/1512.05287)

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weights_l{k}  (3H, H+I); for k > 0, I is D * H
        bias_l{k}     (3H)

    all drawn from the uniform distribution on ±1/sqrt(H). ``weights_l{k}[:, :H]`` multiplies h, as
    weight_hh_l{k} of torch.nn.LSTM does, and ``weights_l{k}[:, H:]`` the layer's input, as
    weight_ih_l{k} does; of the rows the first H are the input gate, the next the output gate, the
    last the candidate.

    Example::

        layer = lltm.LLTM(32, 128, num_layers=2)
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """

    _CELL = "lltm"
    _where = mode = "LLTM"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        _check.no_projection("LLTM", proj_size)
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            checkpoint_steps=checkpoint_steps,
            recurrent_dropout=recurrent_dropout,
        )

    def _shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        return _shapes(self.hidden_size, columns)

    # What code for torch.nn.LSTM reads although it is private there.

    @property
    def _all_weights(self) -> list[list[str]]:
        return [list(names) if self.bias else [names[0]] for names in self._by_direction]

    @property
    def _flat_weights_names(self) -> list[str]:
        return [name for names in self._all_weights for name in names]

    @property
    def _flat_weights(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._flat_weights_names]

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLLTM:
        """Returns this layer as it is now in a form for inference, the weights packed once.

        Args:
            weights: torch.qint8 quantises the weights to 8 bits, each row by a scale of its own,
                and input and h as the layer runs: a quarter of the size of float32 and faster, at
                the price of small errors (:func:`lltm.functional.prepack`)
        """
        return PrepackedLLTM(self, weights)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        biases = [prefix + bias for bias in self._names[1::2]]
        _flatten_biases(state_dict, biases, GATES * self.hidden_size)
        super()._load_from_state_dict(state_dict, prefix, *args)


class PrepackedLLTM(PairLayer, Prepacked):
    """An LLTM layer for inference whose weights were laid out once; see :meth:`LLTM.prepack`.

    It is called like the layer, gives what the layer gives in evaluation mode, and saves what the
    layer does in every call: for short sequences and small batches, such as a stream that comes in
    chunks, that can be most of the time. It is a module, so ``model.rnn = model.rnn.prepack()``
    works, without parameters: its weights are buffers. It cannot be changed, nor converted to
    another dtype or device, and changes of the layer do not reach it; train() and eval() make no
    difference. It has no derivatives, and autocast does nothing to it: input and states are of the
    dtype that the layer had. It can be copied, pickled, and used on another machine
    (``torch.load`` wants ``weights_only=False``, as for any object that is not a tensor). Its
    state_dict fits a prepacked layer of the same sizes and dtype, and nothing else.

    Example::

        layer = lltm.LLTM(32, 128).eval()
        packed = layer.prepack()
        state = None
        for chunk in stream:  # each (T, B, 32), of any T
            output, state = packed(chunk, state)
    """

    _CELL = "lltm"
    _where = mode = "LLTM"
    _BIASES = ("packed_bias",)
    _FIRST_OF_LAYER = "weights_l0"


# ---- the LSTM and the GRU of torch.nn ---------------------------------------------


class _OfTorch(Layer, nn.RNNBase):
    """What lltm.LSTM and lltm.GRU share.

    A subclass of torch.nn.RNNBase, which code for torch.nn's layers asks for: of torch.nn.LSTM or
    GRU one would not compile with fullgraph=True (:func:`lltm.replace_` makes one where it is
    asked to).
    """

    @property
    def _names(self) -> Sequence[str]:  # type: ignore[override]
        names: list[str] = self._flat_weights_names
        return names

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        proj_size: int,
        device: torch.types.Device,
        dtype: torch.dtype | None,
        checkpoint_steps: int,
        recurrent_dropout: float,
    ) -> None:
        steps = _check.checkpoint_steps(mode, checkpoint_steps)
        super().__init__(
            mode,
            _check.integer(mode, "input_size", input_size),
            _check.integer(mode, "hidden_size", hidden_size),
            _check.integer(mode, "num_layers", num_layers, _check.MOST_LAYERS),
            _check.flag(mode, "bias", bias),
            _check.flag(mode, "batch_first", batch_first),
            _check.probability(mode, "dropout", dropout),
            _check.flag(mode, "bidirectional", bidirectional),
            proj_size,
            device,
            dtype,
        )
        self.checkpoint_steps = steps
        self.recurrent_dropout = _check.probability(mode, "recurrent_dropout", recurrent_dropout)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()
        for name in ("checkpoint_steps", "recurrent_dropout"):
            if getattr(self, name) != 0:
                text += f", {name}={getattr(self, name)}"
        return text


class LSTM(PairLayer, _OfTorch):
    """torch.nn.LSTM: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`LLTM`
        proj_size: 0, or P < H: h is projected to P features. The output and h are then P wide, c
            is H wide; takes no recurrent_dropout
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weight_ih_l{k}  (4H, I); for k > 0, I is D * H
        weight_hh_l{k}  (4H, H)
        bias_ih_l{k}    (4H)
        bias_hh_l{k}    (4H)
        weight_hr_l{k}  (P, H), with proj_size; weight_hh_l{k} is (4H, P) then, and for k > 0 I is
                        D * P

    drawn as torch.nn.LSTM draws them; of the rows the first H are the input gate, the next the
    forget gate, the candidate and the output gate.

    Example::

        layer = lltm.LSTM(32, 128, num_layers=2)
        layer.load_state_dict(torch_lstm.state_dict())
        output, (h_n, c_n) = layer(torch.randn(100, 16, 32))
    """

    _CELL = "lstm"
    _where = mode = "LSTM"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        projection = _check.any_integer("LSTM", "proj_size", proj_size)
        if not 0 <= projection < _check.integer("LSTM", "hidden_size", hidden_size):
            raise ArgumentError(
                f"lltm::LSTM: expected proj_size to lie in [0, hidden_size), got {proj_size}"
            )
        if projection > 0 and recurrent_dropout != 0:
            raise ArgumentError(
                "lltm::LSTM: expected recurrent_dropout to be 0 with proj_size, got"
                f" {recurrent_dropout}"
            )
        super().__init__(
            "LSTM",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            projection,
            device,
            dtype,
            checkpoint_steps,
            recurrent_dropout,
        )

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedLSTM:
        """Returns this layer as it is now in a form for inference; see :meth:`LLTM.prepack`."""
        return PrepackedLSTM(self, weights)


class GRU(SingleLayer, _OfTorch):
    """torch.nn.GRU: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        num_layers, bias, batch_first, dropout, bidirectional: as for :class:`LLTM`
        device, dtype: of the parameters
        checkpoint_steps, recurrent_dropout: as for :class:`LLTM`

    Parameters, for each layer k, with the suffix ``_reverse`` for the second direction::

        weight_ih_l{k}  (3H, I); for k > 0, I is D * H
        weight_hh_l{k}  (3H, H)
        bias_ih_l{k}    (3H)
        bias_hh_l{k}    (3H)

    drawn as torch.nn.GRU draws them; of the rows the first H are the reset gate, the next the
    update gate, the last the candidate.

    Example::

        layer = lltm.GRU(32, 128, num_layers=2)
        layer.load_state_dict(torch_gru.state_dict())
        output, h_n = layer(torch.randn(100, 16, 32))
    """

    _CELL = "gru"
    _where = mode = "GRU"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_steps: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            "GRU",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            0,
            device,
            dtype,
            checkpoint_steps,
            recurrent_dropout,
        )

    def prepack(self, weights: torch.dtype | None = None) -> PrepackedGRU:
        """Returns this layer as it is now in a form for inference; see :meth:`LLTM.prepack`."""
        return PrepackedGRU(self, weights)


class PrepackedLSTM(PairLayer, Prepacked):
    """An LSTM for inference whose weights were laid out once; as :class:`PrepackedLLTM`."""

    _CELL = "lstm"
    _where = mode = "LSTM"
    _BIASES = ("packed_bias_ih", "packed_bias_hh")
    _FIRST_OF_LAYER = "weight_ih_l0"


class PrepackedGRU(SingleLayer, Prepacked):
    """A GRU for inference whose weights were laid out once; as :class:`PrepackedLLTM`."""

    _CELL = "gru"
    _where = mode = "GRU"
    _BIASES = ("packed_bias_ih", "packed_bias_hh")
    _FIRST_OF_LAYER = "weight_ih_l0"


class LSTMCell(PairStep, nn.RNNCellBase):
    """torch.nn.LSTMCell: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there are biases
        device, dtype: of the parameters

    Parameters: ``weight_ih`` (4H, I), ``weight_hh`` (4H, H), ``bias_ih`` and ``bias_hh`` (4H) or
    None; the rows as those of :class:`LSTM`.
    """

    _CELL = "lstm"
    _where = "LSTMCell"
    _parameter_names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _check.integer("LSTMCell", "input_size", input_size),
            _check.integer("LSTMCell", "hidden_size", hidden_size),
            _check.flag("LSTMCell", "bias", bias),
            num_chunks=4,
            device=device,
            dtype=dtype,
        )


class GRUCell(SingleStep, nn.RNNCellBase):
    """torch.nn.GRUCell: its arguments, results, parameters and state_dict.

    Args:
        input_size: I
        hidden_size: H
        bias (bool): whether there are biases
        device, dtype: of the parameters

    Parameters: ``weight_ih`` (3H, I), ``weight_hh`` (3H, H), ``bias_ih`` and ``bias_hh`` (3H) or
    None; the rows as those of :class:`GRU`.
    """

    _CELL = "gru"
    _where = "GRUCell"
    _parameter_names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            _check.integer("GRUCell", "input_size", input_size),
            _check.integer("GRUCell", "hidden_size", hidden_size),
            _check.flag("GRUCell", "bias", bias),
            num_chunks=3,
            device=device,
            dtype=dtype,
        )


# ---- parameters of the LLTM -------------------------------------------------------


def _shapes(hidden_size: int, columns: int) -> dict[str, tuple[int, ...]]:
    rows = GATES * hidden_size
    return {"weights": (rows, hidden_size + columns), "bias": (rows,)}


def _flatten_biases(state_dict: dict[str, Any], keys: Iterable[str], size: int) -> None:
    """Takes biases saved as (1, 3H), as the tutorial's module has them, for ones of (3H)."""
    for key in keys:
        bias = state_dict.get(key)
        if isinstance(bias, Tensor) and bias.shape == (1, size):
            state_dict[key] = bias.reshape(size)
