"""Replaces recurrent torch.nn modules in an existing model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import modules
from ._recurrent import Recurrent


def _passing(ours: Any) -> type:
    """Returns a subclass that also derives from the torch.nn class."""
    name = ours.__name__
    members = {"__module__": __name__, "__doc__": ours.__doc__, "_get_name": lambda self: name}
    return type(f"_{name}", (ours, ours._TORCH), members)


# By torch.nn class: the lltm class, and its subclass that also derives from the torch.nn class.
_CLASSES: dict[type, tuple[type, type]] = {
    ours._TORCH: (ours, _passing(ours))
    for ours in vars(modules).values()
    if isinstance(ours, type) and issubclass(ours, Recurrent) and ours._TORCH is not None
}
globals().update((passing.__name__, passing) for _, passing in _CLASSES.values())  # for pickle
_NAMES = {cls.__name__ for cls in _CLASSES}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Replaced:
    """Result of :func:`replace_`. str() lists it for logging.

    Attributes:
        replaced: names of the replaced modules. "" is the model itself
        left: by name, the reason why a recurrent module was not replaced
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"replaced: {', '.join(map(_shown, self.replaced)) or 'nothing'}"]
        lines += [f"left: {_shown(name)}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def replace_(model: nn.Module, *, keep_class: bool = False) -> Replaced:
    """Replaces the LSTM, GRU, RNN and cell modules of torch.nn in a model with lltm's, in place.

    Only the class of a module changes. Parameters, buffers, hooks, names, state_dict and optimizers
    remain valid. Results are the same up to rounding.

    Args:
        model (torch.nn.Module): any module, also a recurrent module itself
        keep_class (bool): if True, ``isinstance(module, torch.nn.LSTM)`` remains true for replaced
            modules. torch.compile then does not trace through them and, with fullgraph=True, raises
            an error. Default: False

    Returns:
        Names of the replaced modules, and of the modules left with the reason. It leaves modules on
        devices other than the CPU (lltm has not been compared with cuDNN) and subclasses,
        including classes made by parametrizations, fully_shard and PyTorch's quantization.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.GRU(32, 128))
        print(lltm.replace_(model))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"lltm::replace_: expected model to be a torch.nn.Module, got {type(model).__name__}"
        )
    result = Replaced()
    of_ours = {ours: classes for classes in _CLASSES.values() for ours in classes}
    for name, module in model.named_modules():
        cls: Any = type(module)
        if cls in of_ours:  # replaced before, perhaps with another keep_class
            module.__class__ = of_ours[cls][keep_class]
            continue
        if cls not in _CLASSES:
            reason = _why_not(module)
            inside = any(name.startswith(f"{left}.") for left in result.left)
            if reason is not None and not inside:
                result.left[name] = reason
            continue
        reason = _reason_to_leave(module)
        if reason is not None:
            result.left[name] = reason
            continue
        module.__class__ = _CLASSES[cls][keep_class]
        result.replaced.append(name)
    return result


def _reason_to_leave(module: nn.Module) -> str | None:
    """Returns why a module of a torch.nn class is not replaced, or None if it is."""
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    for parameter in module.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return f"it is on device {parameter.device}; only modules on the CPU are replaced"
        if parameter.dtype not in _DTYPES:
            return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    return None


def _why_not(module: nn.Module) -> str | None:
    """Returns why a module of another class is not replaced, or None if it is not recurrent."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = module.original_name in _NAMES
        return "it is compiled by TorchScript" if is_recurrent else None
    if cls.__name__ in _NAMES and cls.__module__.startswith("torch.ao."):
        return (
            "it is a PyTorch quantization module; replace the float module and prepack it in int8"
        )
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or isinstance(module, Recurrent):
        return None
    if getattr(nn, cls.__name__, None) is cls:
        return f"lltm has no {cls.__name__}"
    if parametrize.is_parametrized(module):
        return "it is parametrized; call replace_ before parametrizing it"
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return "it is sharded by fully_shard; call replace_ before fully_shard"
    return f"it is a {cls.__name__}, a subclass that may override forward"


def _shown(name: str) -> str:
    return repr(name) if name else "the model"
