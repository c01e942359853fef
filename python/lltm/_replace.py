"""Replaces recurrent torch.nn modules in an existing model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Generic

import torch
from torch import nn
from torch.nn.utils import parametrize

from . import _C, modules
from ._recurrent import Recurrent


def _passing(ours: Any) -> type:
    """Returns a subclass that also derives from the torch.nn class."""
    shown = f"lltm.{ours.__name__}"
    members = {"__module__": __name__, "__doc__": ours.__doc__, "_get_name": lambda self: shown}
    return type(f"_{ours.__name__}", (ours, ours._TORCH), members)


# By torch.nn class: the lltm class, and its subclass that also derives from the torch.nn class.
_CLASSES: dict[type, tuple[type, type]] = {
    ours._TORCH: (ours, _passing(ours))
    for ours in vars(modules).values()
    if isinstance(ours, type) and issubclass(ours, Recurrent) and ours._TORCH is not None
}
globals().update((passing.__name__, passing) for _, passing in _CLASSES.values())  # for pickle
_NAMES = {cls.__name__ for cls in _CLASSES}
_QUANTIZED = ("torch.ao.", "brevitas.")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# With these names, a subclass changes or computes torch.nn's forward itself.
_INTERNALS = {"_VF", "_flat_weights", "_flat_weights_names", "_update_flat_weights"}
_INTERNALS |= {"_init_flat_weights", "check_forward_args", "permute_hidden"}
# H of the one-layer modules in 16 bits that are replaced on a GPU. In the results of an earlier
# version (benchmarks/results/*/gpu.json), they are at most 5 % slower than cuDNN in any case and
# faster in the median: tests_py/test_replace_on_gpu.py. The next results replace this table.
_FAST_ON_GPU = {"LSTM": range(256, 769, 8), "GRU": range(128, 1025, 8)}


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


def replace_(model: nn.Module, *, keep_class: bool = False, subclasses: bool = False) -> Replaced:
    """Replaces the LSTM, GRU, RNN and cell modules of torch.nn in a model with lltm's, in place.

    Only the class of a module changes. Parameters, buffers, hooks, names, state_dict and optimizers
    remain valid. Results are the same up to rounding.

    Args:
        model (torch.nn.Module): any module, also a recurrent module itself
        keep_class (bool): if True, ``isinstance(module, torch.nn.LSTM)`` remains true for replaced
            modules. torch.compile then does not trace through them and, with fullgraph=True, raises
            an error. Default: False
        subclasses (bool): if True, also replaces modules of subclasses whose forward is inherited
            or calls ``super().forward``. They keep their methods, and ``isinstance`` remains true
            for their class. Default: False

    Returns:
        Names of the replaced modules, and of the modules left with the reason. It leaves modules on
        a GPU unless an earlier version was measured to be fast there (in 16 bits), classes made by
        parametrizations, fully_shard and PyTorch's quantization, and other subclasses unless
        ``subclasses`` is True.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.GRU(32, 128))
        print(lltm.replace_(model))
    """
    if not isinstance(model, nn.Module):
        attributes = getattr(model, "__dict__", {}).items()
        names = [name for name, value in attributes if isinstance(value, nn.Module)]
        hint = f"; pass its attribute {' or '.join(names)}" if names else ""
        raise TypeError(
            f"lltm::replace_: expected model to be a torch.nn.Module, got {type(model).__name__}"
            f"{hint}"
        )
    result = Replaced()
    of_ours = {ours: classes for classes in _CLASSES.values() for ours in classes}
    for name, module in model.named_modules():
        cls: Any = type(module)
        if cls in of_ours:  # replaced before, perhaps with another keep_class
            module.__class__ = of_ours[cls][keep_class]
            continue
        if cls in _CLASSES:
            new: Any = _reason_to_leave(module) or _CLASSES[cls][keep_class]
        else:
            new = _for_another_class(module, subclasses)
        if isinstance(new, str):
            if not any(name.startswith(f"{left}.") for left in result.left):
                result.left[name] = new
        elif new is not None:
            # torch.jit.script stores the overloads of torch.nn's forward in the module.
            for stale in ("__overloads__", "_flat_weights"):
                vars(module).pop(stale, None)
            module.__class__ = new
            result.replaced.append(name)
    return result


def _reason_to_leave(module: nn.Module) -> str | None:
    """Returns why a module of a torch.nn class is not replaced, or None if it is."""
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    classes = type(module).__mro__
    base = next((each for each in classes if each in _CLASSES), None)
    if base is not None:
        defined = set(vars(module)).union(*map(vars, classes[: classes.index(base)]))
        if same := _names_added_to(base) & defined:
            return f"it has an attribute {min(same)}, a name that lltm uses"
    for parameter in module.parameters():
        device, dtype = parameter.device, parameter.dtype
        if dtype not in _DTYPES:
            return f"its dtype is {str(dtype).removeprefix('torch.')}"
        if device.type == "cuda":
            if dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
            if reason := _slow_on_gpu(module, (base or type(module)).__name__, dtype, device):
                return f"it is on {device}; {reason}"
        elif device.type not in ("cpu", "meta"):
            return f"it is on {device}; only modules on CPUs and CUDA devices are replaced"
    return None


def _gpu(device: torch.device) -> tuple[tuple[int, int], bool]:
    """Returns a GPU's compute capability, and True if this lltm has kernels for it."""
    if not torch.cuda.is_available():  # a fake tensor
        return (0, 0), False
    return torch.cuda.get_device_capability(device), "CUDA kernels: none" not in _C.build_info()


def _slow_on_gpu(module: Any, cell: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why a module on a GPU is not replaced, or None if it is."""
    capability, has_kernels = _gpu(device)
    if not has_kernels:
        return "this lltm has no kernels for it"
    if capability < (8, 0):
        return "its compute capability is below 8.0"
    hidden = module.hidden_size
    if cell not in _FAST_ON_GPU or module.proj_size:
        name = cell + " with proj_size" * bool(getattr(module, "proj_size", 0))
    elif dtype == torch.float32:
        name = "float32; under torch.autocast, call replace_ inside it"
    elif dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
    elif module.num_layers > 1:
        name = f"{module.num_layers} layers"
    elif module.bidirectional:
        name = "2 directions"
    elif hidden not in _FAST_ON_GPU[cell]:
        name = f"{hidden} hidden units"
    else:
        return None
    return f"lltm has not been measured to be as fast as cuDNN for {name}"


@functools.cache
def _names_added_to(base: type) -> frozenset[str]:
    """Names that lltm's class of a torch.nn class has in addition."""
    names = set(dir(_CLASSES[base][True])).difference(dir(base), dir(Generic), _INTERNALS)
    names = names.difference(*map(inspect.get_annotations, base.__mro__))  # set by torch.nn
    return frozenset(name for name in names if not name.startswith("__"))


def _for_another_class(module: nn.Module, subclasses: bool) -> Any:
    """Returns a module's new class, the reason why it has none, or None if it is not recurrent."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = module.original_name in _NAMES
        return "it is compiled by TorchScript" if is_recurrent else None
    if cls.__name__.removeprefix("Quant") in _NAMES and cls.__module__.startswith(_QUANTIZED):
        return "it is a quantization module; replace the float module and prepack it in int8"
    if isinstance(module, Recurrent):
        return None
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        if any(map(_is_recurrent, module._parameters.items())):
            return f"{cls.__name__} is no torch.nn module; write its step as a custom cell"
        return None
    if getattr(nn, cls.__name__, None) is cls:
        return f"lltm has no {cls.__name__}"
    if parametrize.is_parametrized(module):
        return "it is parametrized; call replace_ before parametrizing it"
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return "it is sharded by fully_shard; call replace_ before fully_shard"
    if not subclasses:
        return f"{cls.__name__} is a subclass, whose forward may differ: pass subclasses=True"
    return _reason_to_leave(module) or _derived(cls)  # type: ignore[arg-type]


def _is_recurrent(named: tuple[str, Any]) -> bool:
    """Returns True for a matrix weight_hh of one or more gates, also if it is transposed."""
    name, weight = named
    known = weight is not None and not nn.parameter.is_lazy(weight)
    sizes = sorted(weight.shape) if known and name.startswith("weight_hh") else ()
    return len(sizes) == 2 and sizes[0] > 0 and sizes[1] % sizes[0] == 0


@functools.cache
def _derived(cls: Any) -> Any:
    """Returns a subclass of cls in which super().forward is lltm's, or the reason why not."""
    base = next((base for base in cls.__mro__ if base in _CLASSES), None)
    if base is None:
        return f"lltm has no base class of {cls.__name__}"
    classes = cls.__mro__[: cls.__mro__.index(base)]
    functions = {
        name: set(_names_in(value))
        for each in reversed(classes)
        for name, value in vars(each).items()
    }
    internal = _INTERNALS & set(functions).union(*functions.values())
    if internal:
        return f"{cls.__name__} uses {min(internal)} of torch.nn"
    called, found = set[str](), {"forward"}
    while found := (found & functions.keys()) - called:
        called |= found
        found = set[str]().union(*(functions[name] for name in found))
    calls_super = any({"super", "forward"} <= functions[name] for name in called)
    if cls.forward is not base.forward and not calls_super:
        return f"{cls.__name__}.forward does not call super().forward"
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}

    def reduce(self: nn.Module, protocol: Any) -> Any:
        make, arguments, *state = cls.__reduce_ex__(self, protocol)
        if not arguments or arguments[0] is not type(self):  # a reduction of the subclass
            return make, arguments, *state
        return _rebuilt, (make, cls, *arguments[1:]), *state

    members.update(_get_name=lambda self: cls.__name__, __reduce_ex__=reduce)
    try:
        return type(cls)(cls.__name__, (cls, _CLASSES[base][True]), members)
    except Exception as error:  # also from __init_subclass__
        return f"lltm's forward cannot be inherited by {cls.__name__}: {error}"


def _rebuilt(make: Callable[..., Any], cls: type, *arguments: Any) -> Any:
    """Unpickles a module of a derived class, which cannot be imported."""
    return make(_derived(cls), *arguments)


def _names_in(value: Any) -> Iterator[str]:
    """Yields the global and attribute names that the code of a class member uses."""
    code = getattr(inspect.unwrap(getattr(value, "fget", value)), "__code__", value)
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def _shown(name: str) -> str:
    return repr(name) if name else "the model"
