"""Converters of other libraries' modules into layers with the same weights."""

from __future__ import annotations

import copy
import importlib
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._C import ArgumentError
from ..custom.cell import Cell
from ..custom.cell import cell as custom_cell
from ..custom.modules import CustomLayer
from ..custom.program import scalar
from ._spikes import Spike

Run = Callable[[Any, Tensor], Any]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _expect(right: object, converter: str, expected: str, got: object) -> None:
    if not right:
        raise ArgumentError(f"lltm.cells.{converter}: expected module {expected}, got {got}")


def _check(converter: str, module: Any, *expected: str) -> str:
    """Returns which "library.Class" of the expected ones the module is, or raises an error."""
    names = (
        f"{base.__module__.partition('.')[0]}.{base.__name__.removesuffix('Base')}"
        for base in type(module).__mro__
    )
    name = next((name for name in names if name in expected), "")
    got = f"{type(module).__module__}.{type(module).__qualname__}"
    _expect(name, converter, f"to be {' or '.join(expected)}", got)
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        for key, tensor in _tensors(part):
            lazy = nn.parameter.is_lazy(tensor)
            got = f"{key} {'without a shape: call the module once' if lazy else 'on device meta'}"
            _expect(not (lazy or tensor.is_meta), converter, "whose tensors have values", got)
        plain = not (parametrize.is_parametrized(part) or any(getattr(part, k) for k in _HOOKS))
        got = f"those of {path or 'the module'}, which the layer would not have"
        _expect(plain, converter, "without parametrizations and hooks", got)
    return name


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a module, without its children, and of tuples in it."""
    for key, value in {**vars(part), **part._parameters, **part._buffers}.items():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                yield key, x


def _check_options(converter: str, module: Any, expected: Mapping[str, Any]) -> None:
    """Compares attributes, of functions and modules their names."""
    for name, value in expected.items():
        got = getattr(module, name, value)
        if isinstance(got, Tensor):
            got = got.tolist() if len(got.unique()) != 1 else got.flatten()[0].item()
        got = getattr(got, "__name__", type(got).__name__) if callable(got) else got
        hint = f"; for inference, set module.cell.{name} = 0" if "dropout" in name else ""
        _expect(got == value, converter, f"with {name}={value!r}", f"{reprlib.repr(got)}{hint}")


def _loaded(
    converter: str, cell: Cell, hidden: int, tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[CustomLayer, CustomLayer]:
    """Returns a layer with these tensors, or zeros, and a copy in float64 on the CPU."""
    weight = tensors["weight_ih_l0"]
    columns = weight.shape[1] + hidden * len(cell.Layer._HEADER.gates_input)
    layer, exact = (
        cell.Layer(columns, hidden, dtype=dtype, device=device, **options)
        for dtype, device in ((weight.dtype, weight.device), (torch.float64, "cpu"))
    )
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            given = tensors.get(key, 0)
            known = isinstance(given, Tensor)
            tensor = given if known else torch.tensor(given, dtype=torch.float64)
            shape = tuple(parameter.shape)
            expected = f"to have the tensor {key} of {cell.name} with shape {shape}"
            fits = tensor.numel() == 1 or tensor.shape == shape
            _expect(fits, converter, expected, tuple(tensor.shape))
            for other in (parameter, exact.get_parameter(key)):
                other.copy_(tensor)
            # The module learns neither numbers nor biases that it does not have.
            parameter.requires_grad_(tensor.requires_grad)
    return layer, exact


def _converted(
    converter: str,
    cell: Cell,
    module: Any,
    hidden: int,
    tensors: Mapping[str, Any],
    run: Run,
    tolerance: float = 1e-5,
    same: Any = None,
    **options: Any,
) -> CustomLayer:
    """Returns a layer with these tensors, or zeros, after comparing it with the module.

    `run(same, x)` returns the module's output. Unless given, `same` is a copy in float64, so that
    rounding changes no spike, and large inputs are compared too.
    """
    layer, exact = _loaded(converter, cell, hidden, tensors, options)
    layer.train(getattr(module, "training", True))
    exact.train(layer.training and layer.dropout == 0)
    if isinstance(module, nn.Module) and converter != "from_keras":  # copies all its weights
        _check_learned(converter, cell, module, tensors)
    spiking = cell.Layer._HEADER.own_gradient
    fired, scales = not spiking, [10.0**k for k in range(7 if spiking else 2)]
    if same is not None:
        scales = [1.0]
    else:
        # deepcopy does not copy the results of operations, such as states of an earlier call.
        found = (x for part in module.modules() for _, x in _tensors(part) if not x.is_leaf)
        same = copy.deepcopy(module, {id(x): x.detach().clone() for x in found})
        same.to("cpu", torch.float64).train(exact.training)
    for scale in scales:
        x = scale * torch.arange(1.0, 1 + 30 * layer.input_size, dtype=torch.float64).square().sin()
        x = x.view(6, 5, layer.input_size)
        with torch.no_grad():
            wanted, (output, _) = run(same, x), exact(x)
        if isinstance(output, tuple):
            fired |= bool(wanted[0].any())
            wanted, output = torch.cat(wanted, -1), torch.cat(output, -1)
        got = f"an output of shape {tuple(wanted.shape)}"
        if right := wanted.shape == output.shape:
            error = ((wanted.to(output) - output).abs().max() / (1 + output.abs().max())).item()
            right, got = error <= tolerance, f"{got} that differs by {error:.1e}"
        _expect(right, converter, f"to have the equations of {cell.name}", got)
    _expect(fired, converter, "that spikes, to compare its equations", "no spike for any input")
    return layer


def _check_learned(converter: str, cell: Cell, module: Any, tensors: Mapping[str, Any]) -> None:
    """Checks that the layer has all that the module learns."""
    named = module.named_parameters()
    learned = {name: x for name, x in named if x.requires_grad and not x.is_inference()}
    used = [x.sum() for x in tensors.values() if isinstance(x, Tensor)]
    used += [zero := torch.zeros((), requires_grad=True)]
    used = [x for x in used if x.requires_grad]
    found: Any = torch.autograd.grad(used, [*learned.values(), zero], allow_unused=True)
    lost = [name for name, gradient in zip(learned, found, strict=False) if gradient is None]
    expected = f"that learns only parameters of {cell.name}"
    got = f"{', '.join(lost)}, which the layer would lose; call requires_grad_(False) on them"
    _expect(not lost, converter, expected, got)


def _remade(cell: Any, **changes: Any) -> Cell:
    """Returns the cell, in which all parameters are scalars, with other options."""
    header = cell.Layer._HEADER
    parameters = {name: scalar(value) for name, value in cell.Layer._INITIAL.items()}
    options = {"states": header.states, "outputs": cell.outputs or None, "parameters": parameters}
    made = custom_cell(cell.gates, name=cell.name, bounded=True, **{**options, **changes})
    return made(cell.function)


def _named(name: str) -> Any:
    return getattr(importlib.import_module(__package__), name)


def _joined(converter: str, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Joins tensors of which the module learns all or none: a layer learns a whole tensor."""
    learned = [key for key, tensor in parts.items() if tensor.requires_grad]
    expected = f"that learns all or none of {', '.join(parts)}, which the layer has as {name}"
    got = f"only {', '.join(learned)} learned; set requires_grad alike for all"
    _expect(len(learned) in (0, len(parts)), converter, expected, got)
    return torch.cat([*parts.values()])


_KINDS = ("weight", "bias")


def _recurrent(cell: Any, *names: str) -> dict[str, Tensor]:
    parts = {k: {f"{k}_{name}": getattr(cell, f"{k}_{name}") for name in names} for k in _KINDS}
    return {f"{k}_hh": _joined("from_torchrecurrent", f"{k}_hh", parts[k]) for k in _KINDS}


# Our cells, and the tensors with other names.
_TORCHRECURRENT: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    **{name: (name.lower(), lambda cell: {}) for name in ("LiGRU", "MGU", "MUT1", "MUT3", "UGRNN")},
    "coRNN": ("cornn", lambda cell: _recurrent(cell, "hh", "ch")),
    "MultiplicativeLSTM": ("multiplicative_lstm", lambda cell: _recurrent(cell, "mh", "hh")),
    "IndRNN": (
        "indrnn",
        lambda cell: {"u": cell.vector_u, "bias_ih": cell.bias_ih + cell.bias_hh, "bias_hh": ()},
    ),
    "PeepholeLSTM": (
        "peephole_lstm",
        lambda cell: dict(zip(("p_i", "p_f", "p_o"), cell.weight_ph.chunk(3), strict=True)),
    ),
}
_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "dt", "gamma", "epsilon")


@torch.inference_mode(False)  # with gradients, computed tensors say if the module learns them
def from_torchrecurrent(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a layer of torchrecurrent, such as ``MGU``."""
    names = (f"torchrecurrent.{name}" for name in _TORCHRECURRENT)
    _, _, name = _check("from_torchrecurrent", module, *names).partition(".")
    ours, others = _TORCHRECURRENT[name]
    tensors: dict[str, Any] = {}
    usual = {"act": "ReLU" if name in ("LiGRU", "IndRNN") else "Tanh", "gate_act": "Sigmoid"}
    for k, cell in enumerate(module.cells):
        _check_options("from_torchrecurrent", cell, usual)
        found = {name: getattr(cell, name) for name in _NAMES if hasattr(cell, name)}
        tensors |= {f"{name}_l{k}": value for name, value in {**found, **others(cell)}.items()}
    options = {name: getattr(module, name) for name in ("num_layers", "dropout", "batch_first")}
    run: Run = lambda same, x: same(x)[0]  # noqa: E731
    where, hidden = "from_torchrecurrent", module.hidden_size
    return _converted(where, _named(ours), module, hidden, tensors, run, **options)


@torch.inference_mode(False)
def from_keras(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a GRU of Keras with ``reset_after=False`` and
    ``return_sequences=True``."""
    _check("from_keras", module, "keras.GRU")
    usual: dict[str, Any] = {"built": True, "reset_after": False, "return_sequences": True}
    usual |= dict.fromkeys(("return_state", "go_backwards", "stateful"), False)
    usual |= {"dropout": 0, "recurrent_dropout": 0}
    usual |= {"activation": "tanh", "recurrent_activation": "sigmoid"}
    parts = ("kernel", "recurrent", "bias")
    for kind in ("regularizer", "constraint"):
        usual |= dict.fromkeys((f"{part}_{kind}" for part in parts), None)
    _check_options("from_keras", module, {**usual, "activity_regularizer": None})
    wide = module.compute_dtype == module.variable_dtype in ("float32", "float64")
    got = f"compute_dtype={module.compute_dtype!r}"
    _expect(wide, "from_keras", "that computes in float32 or float64", got)
    numpy = importlib.import_module("keras").ops.convert_to_numpy
    weight_x, weight_h, *bias = (
        torch.tensor(numpy(weight)).requires_grad_(weight.trainable) for weight in module.weights
    )
    tensors = {"weight_ih_l0": weight_x.T, "weight_hh_l0": weight_h.T, "bias_ih_l0": sum(bias)}

    def run(same: Any, x: Tensor) -> Any:
        return torch.tensor(numpy(same(x.numpy())))

    options: dict[str, Any] = {"tolerance": 1e-4, "same": module, "batch_first": True}
    cell = _named("keras_gru")
    return _converted("from_keras", cell, module, module.units, tensors, run, **options)


@torch.inference_mode(False)
def from_ncps(module: Any) -> CustomLayer:
    """Returns a layer with the weights of ``ncps.torch.CfC`` with as many backbone units as units.

    The last H columns of its input are the time step, which is 1 by default in ncps.
    """
    _check("from_ncps", module, "ncps.CfC")
    cell, hidden = module.rnn_cell, module.state_size
    usual = {"wired_mode": False, "use_mixed": False, "return_sequences": True, "proj_size": None}
    _check_options("from_ncps", module, usual)
    _check_options("from_ncps", cell, {"mode": "default", "backbone_layers": 1})
    first, activation = cell.backbone
    backbone = types.SimpleNamespace(backbone_units=first.out_features, activation=activation)
    _check_options("from_ncps", backbone, {"backbone_units": hidden, "activation": "LeCun"})
    parts = {"backbone.0": first}
    parts |= {name: getattr(cell, name) for name in ("ff1", "ff2", "time_a", "time_b")}
    weights = {f"{name}.weight": part.weight for name, part in parts.items()}
    biases = {f"{name}.bias": part.bias for name, part in parts.items()}
    weight_x, weights["backbone.0.weight"] = first.weight.split([module.input_size, hidden], 1)
    tensors = {
        "weight_ih_l0": weight_x,
        "weight_hh_l0": _joined("from_ncps", "weight_hh_l0", weights),
        "bias_hh_l0": _joined("from_ncps", "bias_hh_l0", biases),
    }

    def run(same: Any, x: Tensor) -> Any:
        x[..., same.input_size :] = 1  # the time step of ncps
        return same(x[..., : same.input_size])[0]

    options = {"batch_first": module.batch_first}
    return _converted("from_ncps", _named("cfc"), module, hidden, tensors, run, **options)


@torch.inference_mode(False)
def from_xlstm(module: Any) -> CustomLayer:
    """Returns a layer with the recurrent weights and heads of an ``sLSTMCell`` of xlstm or TiRex.

    As for the cell, the input is the part of the pre-activations that ``sLSTMLayer`` computes, 4H
    columns. The output is h with H columns, before the group norm.
    """
    _check("from_xlstm", module, "xlstm.sLSTMCell", "tirex.sLSTMCell")
    weight, bias, config = module._recurrent_kernel_, module._bias_, module.config
    usual = dict.fromkeys(("gradient_recurrent_clipval", "forward_clipval"), None)
    usual |= {"gradient_recurrent_cut": False, "function": "slstm"}
    _check_options("from_xlstm", config, usual)
    swapped = weight.shape[1] < weight.shape[2]  # the layout of CUDA kernels, and of TiRex
    if swapped:
        weight, bias = weight.mT, bias.view(len(weight), 4, -1).transpose(0, 1).flatten()
    first = getattr(config, "input_shape", "BSGNH")[0] == "B"
    shape = getattr(config, "output_shape", "BNSH")
    axes = [shape.index(axis) for axis in ("BSNH" if first else "SBNH") if axis in shape]
    tensors = {
        "weight_ih_l0": weight.new_empty(0, 0),
        "weight_hh_l0": weight.squeeze(0),
        "bias_hh_l0": bias,
    }

    def run(same: Any, x: Tensor) -> Any:
        return same(x.to(weight), None)[0].permute(axes).flatten(2).to(x)

    options: dict[str, Any] = {"heads": len(weight), "batch_first": first}
    if swapped:  # modules in these layouts compute in bfloat16
        options |= {"tolerance": 3e-2, "same": module}
    # Without weight_ih: the gates read the input.
    reads = dict.fromkeys(("i", "f", "z", "o"), ("input", "h"))
    cell, hidden = _remade(_named("slstm"), reads=reads), len(weight) * weight.shape[2]
    return _converted("from_xlstm", cell, module, hidden, tensors, run, **options)


# Our cells, and their parameters.
_SNNTORCH = {
    "Leaky": ("leaky", ["beta", "threshold"]),
    "Synaptic": ("synaptic", ["alpha", "beta", "threshold"]),
    "Alpha": ("alpha", ["alpha", "beta", "threshold"]),
    "RSynaptic": ("rsynaptic", ["alpha", "beta"]),
}


@torch.inference_mode(False)
def from_snntorch(module: Any) -> CustomLayer:
    """Returns a layer with the weights of a ``torch.nn.Sequential`` of a ``torch.nn.Linear`` and a
    neuron of snnTorch: ``Leaky``, ``Synaptic``, ``Alpha`` or ``RSynaptic``.

    Both compute a step of a sequence. The output is a tuple of the spikes and states of every step.
    A decay that the neuron shares between units becomes a value per unit.
    """
    where = "from_snntorch"
    names = [f"snntorch.{name}" for name in _SNNTORCH]
    pair = [*module] if type(module) is nn.Sequential else []
    expected = "to be a torch.nn.Sequential of a torch.nn.Linear and a neuron of snnTorch"
    got = [type(part).__name__ for part in pair] or type(module).__qualname__
    _expect(len(pair) == 2, where, expected, got)
    linear, neuron = pair
    _check(where, module, "torch.Sequential")
    _check(where, linear, "torch.Linear")
    _, _, kind = _check(where, neuron, *names).partition(".")
    name, parameters = _SNNTORCH[kind]
    usual: dict[str, Any] = dict.fromkeys(("init_hidden", "inhibition", "state_quant"), False)
    usual |= {"reset_delay": True, "reset_mechanism": "zero" if kind == "Alpha" else "subtract"}
    usual |= {"graded_spikes_factor": 1, "all_to_all": True, "threshold": 1}
    usual |= {"surrogate_disable": False, "recurrent": "Linear"}
    _check_options(where, neuron, {k: x for k, x in usual.items() if k not in parameters})
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    theirs = neuron.spike_grad(x) + 0 * x
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (Spike.apply(x), theirs))
    expected = "with spike_grad=snntorch.surrogate.atan()"
    _expect(torch.allclose(ours, theirs), where, expected, "another surrogate gradient")
    layers = {"ih": linear}
    if kind == "RSynaptic":
        layers["hh"] = neuron.recurrent
    tensors = {f"{k}_{suffix}_l0": getattr(x, k) for suffix, x in layers.items() for k in _KINDS}
    tensors |= {f"{k}_l0": getattr(neuron, k) for k in parameters}
    tensors = {k: x for k, x in tensors.items() if x is not None}  # a bias
    cell, hidden = _named(name), linear.out_features

    def run(same: Any, x: Tensor) -> Any:
        steps = [[x.new_zeros(x.shape[1], hidden) for _ in cell.outputs]]
        for z in same[0](x):
            steps.append([y.to(x) for y in same[1](z, *steps[-1]["hh" not in layers :])])
        return [torch.stack(values) for values in zip(*steps[1:], strict=True)]

    return _converted(where, cell, module, hidden, tensors, run)


@torch.inference_mode(False)
def from_norse(module: Any) -> CustomLayer:
    """Returns a layer with the weights of norse's ``LIFRecurrent`` or ``LSNNRecurrent``.

    The output is a tuple of the spikes and states of every step. The layer also learns the weights
    from a neuron to itself, which norse keeps at 0 by default. Its potentials start from the
    module's ``v_leak``, thresholds from ``v_th``.
    """
    where = "from_norse"
    kind = _check(where, module, "norse.LIFRecurrent", "norse.LSNNRecurrent")
    name, step, first = {
        "norse.LIFRecurrent": ("norse_lif", "lif_step", {"v": "v_leak"}),
        "norse.LSNNRecurrent": ("alif", "lsnn_step", {"v": "v_leak", "b": "v_th"}),
    }[kind]
    _check_options(where, module.p, {"method": "super"})
    _check_options(where, module, {"activation": step})
    cell: Any = _named(name)
    tensors = {"weight_ih_l0": module.input_weights, "weight_hh_l0": module.recurrent_weights}
    for key in cell.parameters:
        unit = module.dt / 1e-3 if key.startswith("tau") else 1  # the cell's step is 1 ms
        tensors[f"{key}_l0"] = unit * torch.as_tensor(getattr(module.p, key)).double()
    states = {**cell.Layer._HEADER.states}
    for state, key in first.items():
        initial = tensors[f"{key}_l0"]
        got = f"one that learns it; call requires_grad_(False) on module.p.{key}"
        expected = f"with a fixed {key}, the initial value of {state}"
        _expect(not initial.requires_grad, where, expected, got)
        states |= {state: initial.item()} if initial.numel() == 1 else {}
    if states != cell.Layer._HEADER.states:
        cell = _remade(cell, states=states)

    def run(same: Any, x: Tensor) -> Any:
        exact = (y.double() if isinstance(y, Tensor) else y for y in module.p)
        same.p, same.record_states = type(module.p)(*exact), True
        for key in ("input_weights", "recurrent_weights"):  # not always parameters
            if isinstance(weight := getattr(same, key), nn.Parameter):
                continue
            setattr(same, key, weight.to(x))
        spikes, (_, *states) = same(x)
        return [spikes, *(state.to(spikes) for state in states)]

    return _converted(where, cell, module, int(module.hidden_size), tensors, run)
