from __future__ import annotations

import multiprocessing.context
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _check
from ._recurrent import IN_TRAINING, Recurrent, names_of
from .integrations import schema

_OPTIONS = {*schema.options(torch.ops.lltm.layer.default)} - {"prepacked"}


class Prepacked(Recurrent):
    """Base of prepacked layers, such as PrepackedLSTM.

    The packed format depends on the CPU. So state_dict and pickle hold unpacked weights, which
    loading packs.
    """

    # Name stems for the layer's matrices, and for their saved int8 form.
    _MATRICES: tuple[str, ...] = ("weight_ih", "weight_hh")
    _INT8 = ("weight_ih_int8", "weight_hh_int8", "weight_ih_scales", "weight_hh_scales")
    _PACKED = "packed_weights"
    _prepacked = True
    _recurrent_dropout_now = 0.0  # every call reads it: faster than the property of Layer
    # Attributes that are equal in the layer, and all that cannot be set.
    _OF_LAYER = sorted({*_OPTIONS, "_CELL", "proj_size"} - {*IN_TRAINING, "checkpoint_steps"})
    _FIXED = frozenset(_OPTIONS).union(_OF_LAYER, ("heads", "mode", "nonlinearity"))
    _FIXED |= {"_names", "_quantized", "dtype"}
    _quantized: bool  # True if the weights are int8

    dtype: torch.dtype

    # Members of Layer (modules.py), the other base class.
    num_layers: int
    bidirectional: bool
    proj_size: int
    heads: int
    _inherits_forward: Callable[[], bool]
    _names: Sequence[str]
    _names_of: Callable[[int], Sequence[str]]
    _state_shape: Callable[[int], tuple[int, int, int]]

    def __init__(self, layer: Any, weights: torch.dtype | None = None) -> None:
        Recurrent.__init__(self)
        if weights not in (None, torch.qint8):
            expected = "expected weights to be torch.qint8 or None"
            raise TypeError(f"lltm::prepack: {expected}, got {weights!r}")
        right = layer._inherits_forward() or not self._inherits_forward()
        got = f"{type(layer).__name__}, whose forward the prepacked layer would not call; make the"
        got += " layer an attribute of your module and prepack it there"
        _check.expect(right, "prepack", "a layer that inherits forward", got)
        vars(self).update(
            {name: getattr(layer, name) for name in self._OF_LAYER},
            heads=getattr(layer, "heads", 1),
            dropout=0.0,
            training=False,
            dtype=getattr(layer, layer._names[0]).dtype,
            _quantized=weights == torch.qint8,
        )
        names: list[str] = []
        for k, packed in enumerate(names_of([self._PACKED], self.num_layers, self.bidirectional)):
            self.register_buffer(packed, None, persistent=False)
            others = layer._names_of(k)[len(self._MATRICES) :]
            for name in others:
                self.register_buffer(name, None)
            names += [packed, *others]
        vars(self)["_names"] = tuple(names)
        named = ((name, getattr(layer, name)) for name in layer._names)
        given = {name: tensor.detach() for name, tensor in named if tensor is not None}
        for name, tensor in given.items():
            _check.memory("prepack", name, tensor)
        self._pack({n: t.clone() if n in self._buffers else t for n, t in given.items()}, weights)

    def _directions(self) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yields, by direction: name of the packed weights, suffix, names of the other buffers."""
        for k in range(self._state_shape(0)[0]):
            packed, *others = self._names_of(k)
            yield packed, packed.removeprefix(self._PACKED), others

    def _pack(self, given: Mapping[str, Tensor], weights: torch.dtype | None = None) -> None:
        """Packs the parameters of the layer, or the result of _saved."""
        for packed, suffix, others in self._directions():
            self._buffers.update((name, given.get(name)) for name in others)
            if self._INT8[0] + suffix in given:
                rows = (given[stem + suffix] for stem in self._INT8)
                self._buffers[packed] = torch.ops.lltm._prepack_int8(self._CELL, *rows)
                continue
            matrices = [given[stem + suffix] for stem in self._MATRICES]
            if self.proj_size > 0:  # as the layer computes it (api/projection.h)
                hidden, projected, weight_hr = self.hidden_size, self.proj_size, given[others[-1]]
                later = projected * (2 if self.bidirectional else 1)
                columns = self.input_size if suffix.startswith("_l0") else later
                shapes = (4 * hidden, columns), (4 * hidden, projected), (projected, hidden)
                stems = (*self._MATRICES, "weight_hr")
                for stem, weight, shape in zip(stems, (*matrices, weight_hr), shapes, strict=True):
                    _check.shape("prepack", stem + suffix, weight, shape)
                with torch.autocast("cpu", enabled=False):
                    matrices = [torch.cat(matrices, 1), matrices[1] @ weight_hr]
            _check.optional_dtype("prepack", "dtype", weights)
            prepack = torch.ops.lltm.prepack
            self._buffers[packed] = _check.call(prepack, self._CELL, *matrices, dtype=weights)

    @property
    def _saved_matrices(self) -> tuple[str, ...]:
        return self._INT8 if self._quantized else self._MATRICES

    def _saved(self) -> dict[str, Tensor]:
        """Tensors by name. int8 weights are quantized rows and scales."""
        saved: dict[str, Tensor] = {}
        for packed, suffix, others in self._directions():
            matrices: list[Tensor] = torch.ops.lltm._unpack(self._CELL, self._buffers[packed])
            if self.proj_size > 0 and not self._quantized:
                both = matrices[0]
                columns = [both.shape[1] - self.proj_size, self.proj_size]
                matrices = [part.contiguous() for part in both.split(columns, dim=1)]
            names = (stem + suffix for stem in self._saved_matrices)
            if self.heads > 1 and not self._quantized and matrices[1].dim() == 2:
                matrices[1] = self._without_zeros(matrices[1])
            saved.update(zip(names, matrices, strict=True))
            buffers = ((name, self._buffers[name]) for name in others)
            saved.update((name, buffer) for name, buffer in buffers if buffer is not None)
        return saved

    def _without_zeros(self, weight_hh: Tensor) -> Tensor:
        """Returns the blocks of a matrix that was packed with zeros between heads."""
        gates, heads = weight_hh.shape[0] // self.hidden_size, self.heads
        units = self.hidden_size // heads
        square = weight_hh.reshape(gates, heads, units, heads, units)
        return square.diagonal(0, 1, 3).permute(3, 0, 1, 2).flatten(1, 2)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination.update((prefix + name, tensor) for name, tensor in self._saved().items())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # PyTorch loads into a module that has the saved tensors.
        module: Any = nn.Module()
        module._load_state_dict_pre_hooks = self._load_state_dict_pre_hooks
        for name, tensor in self._saved().items():
            module.register_buffer(name, tensor)
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        module._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self._pack(dict(module.named_buffers()))

    def __getstate__(self) -> dict[str, Any]:
        saved: Any = self._saved()
        if multiprocessing.context.get_spawning_popen() is not None:
            # The child would receive descriptors of tensors that no longer exist when it starts.
            saved = pickle.dumps(saved)
        return {**super().__getstate__(), "_buffers": saved}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_buffers": dict.fromkeys(state["_names"])})  # type: ignore[no-untyped-call]
        saved = state["_buffers"]
        self._pack(pickle.loads(saved) if isinstance(saved, bytes) else saved)

    def extra_repr(self) -> str:
        shown = ["input_size", "hidden_size", "num_layers", "batch_first", "bidirectional"]
        shown += ["proj_size"] if self.proj_size > 0 else []
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    @property
    def _dropout_now(self) -> float:  # every call reads it
        if self.training and torch.is_grad_enabled():
            _warn_in_training(type(self).__name__)
        return 0.0

    def _expect_other(self, action: str, name: str, value: Any = None) -> None:
        """Rejects changes of options and weights. Tools set other attributes of any module."""
        fixed = {*self._FIXED, *self._MATRICES, *self._INT8, *vars(self).get("_names", ())}
        changes = fixed & {name, name.split("_l")[0]} or isinstance(value, nn.Parameter)
        if changes and "_is_replica" not in vars(self):  # set by DataParallel
            raise AttributeError(
                f"lltm::{type(self).__name__}: cannot {action} {name}: a prepacked layer is"
                " read-only; change the original layer and prepack it again"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        self._expect_other("set", name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._expect_other("delete", name)
        super().__delattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Prepacked:
        """Rejects conversions, which would change the biases but not the packed weights."""
        weights: Any = self._buffers[self._names[0]]
        result = fn(weights.new_empty(0, dtype=self.dtype))
        where, dtype = type(self).__name__, _check.dtype(self.dtype)
        got = f"{_check.dtype(result.dtype)}; convert the original layer and prepack it again"
        _check.expect(result.dtype == self.dtype, where, f"dtype to stay {dtype}", got, TypeError)
        same, expected = result.device == weights.device, f"device to stay {weights.device}"
        got = f"{result.device}; move the original layer and prepack it there"
        _check.expect(same, where, expected, got, RuntimeError)
        packed = {name: self._buffers[name] for name, *_ in self._directions()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(packed)  # to_empty() would leave bytes that _saved cannot unpack
        return self


def _warn_in_training(name: str) -> None:
    warnings.warn(
        f"lltm::{name}: a prepacked layer is not trained; train the original layer, or call eval()"
        " or torch.no_grad()",
        stacklevel=6,
    )


# Dynamo calls it during tracing.
_warn_in_training._dynamo_marked_constant = True  # type: ignore[attr-defined]
