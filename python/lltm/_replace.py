"""Faster layers in the place of torch.nn's, in a model that exists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import modules
from ._recurrent import Recurrent


def _passing(ours: Any) -> type:
    """A subclass that is one of torch.nn's class, too."""
    name = ours.__name__
    members = {"__module__": __name__, "__doc__": ours.__doc__, "_get_name": lambda self: name}
    return type(f"_{name}", (ours, ours._TORCH), members)


# Of a class of torch.nn: ours, and ours that passes for it.
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
    """What :func:`replace_` did, by the modules' names; "" is the model itself."""

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # with the reason

    def __str__(self) -> str:
        lines = [f"replaced: {', '.join(map(_shown, self.replaced)) or 'nothing'}"]
        lines += [f"left: {_shown(name)}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def replace_(model: nn.Module, *, keep_class: bool = False) -> Replaced:
    """Makes lltm's modules of a model's recurrent ones of torch.nn, in place.

    A module stays the same object, with its parameters, buffers, hooks and mode: only its class
    changes. So optimizers, names and the state_dict stay as they are, and the results up to
    rounding.

    Args:
        model: any module; it may be such a module itself
        keep_class: the modules pass for those of torch.nn in ``isinstance(module,
            torch.nn.LSTM)``. torch.compile does not trace through them then (it refuses them with
            fullgraph=True)

    Returns:
        What was replaced, and what was left and why: subclasses, whose forward may be their own,
        such as those that parametrizations, fully_shard and PyTorch's quantization make, and
        modules that are not on the CPU, where cuDNN is the faster one.

    Example::

        model = torch.nn.Sequential(torch.nn.GRU(32, 128), ...)
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
        if cls in of_ours:  # replaced before, perhaps by the other class
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
    """Of a module of one of torch.nn's classes."""
    if "forward" in vars(module):
        return "it has a forward of its own"
    for parameter in module.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return f"it is on device {parameter.device}, and lltm is faster on CPUs"
        if parameter.dtype not in _DTYPES:
            return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    return None


def _why_not(module: nn.Module) -> str | None:
    """Of a module of another class; None if it has nothing to do with recurrent layers."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = module.original_name in _NAMES
        return "it is compiled by TorchScript" if is_recurrent else None
    if cls.__name__ in _NAMES and cls.__module__.startswith("torch.ao."):
        return (
            "it is of PyTorch's tools for quantization: replace the float module and prepack it in"
            " int8"
        )
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or isinstance(module, Recurrent):
        return None
    if getattr(nn, cls.__name__, None) is cls:
        return f"lltm has no {cls.__name__}"
    if parametrize.is_parametrized(module):
        return "it is parametrized: replace it first and parametrize it then"
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return "it is sharded by fully_shard: replace it first and shard it then"
    return f"it is a {cls.__name__}, a subclass whose forward may be its own"


def _shown(name: str) -> str:
    return repr(name) if name else "the model"
