"""Code of docs/use-it-in.md compared with the libraries' own layers."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch import Tensor

import lltm

PAGE = support.ROOT / "docs" / "use-it-in.md"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # other libraries' warnings


def defined_in(file: str, folder: Path) -> dict[str, Any]:
    """Names that this file in the page defines."""
    match = re.search(
        rf"^```python\n(# {re.escape(file)}\n.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert match is not None
    path = folder / file
    path.write_text(match[1], encoding="utf-8")
    return runpy.run_path(str(path))


def of_pytorch_forecasting() -> tuple[Any, Callable[[Any], Tensor]]:
    from pytorch_forecasting.models.nn import LSTM

    x, lengths = torch.randn(4, 20, 3), torch.tensor([20, 0, 3, 7])
    model = torch.nn.ModuleList([LSTM(3, 16, num_layers=2, batch_first=True)])
    return model, lambda model: model[0](x, lengths=lengths, enforce_sorted=False)[0]


def of_torch_geometric() -> tuple[Any, Callable[[Any], Tensor]]:
    from torch_geometric.nn import GatedGraphConv, LSTMAggregation

    x, index = torch.randn(12, 3), torch.arange(12) // 3
    model = torch.nn.ModuleList([LSTMAggregation(3, 8), GatedGraphConv(8, 2)])
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    return model, lambda model: model[1](model[0](x, index), edges)


LINES: dict[str, tuple[str, Any]] = {
    "pytorch_forecasting": ("lltm.replace_(model, subclasses=True)", of_pytorch_forecasting),
    "torch_geometric": ("lltm.replace_(model)", of_torch_geometric),
}


@pytest.mark.parametrize(
    "package", [pytest.param(p, marks=support.needs_extra("examples", p)) for p in LINES]
)
def test_one_line(package: str) -> None:
    """Compares outputs and gradients before and after the line of the page's table."""
    line, made = LINES[package]
    assert re.search(
        rf"^\| {package} .*`{re.escape(line)}`", PAGE.read_text(encoding="utf-8"), re.M
    )
    model, call = made()
    parameters = list(model.parameters())
    results = []
    for _ in range(2):
        model.eval()
        output = call(model)
        loss = output.square().sum()
        results.append((output, *torch.autograd.grad(loss, parameters, allow_unused=True)))
        exec(line, {"lltm": lltm, "model": model})
    assert any(isinstance(part, lltm.LSTM) for part in model.modules())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@support.needs_extra("examples", "sb3_contrib")
def test_stable_baselines3(tmp_path: Path) -> None:
    """Compares with sb3-contrib's loop, and trains."""
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    policy = defined_in("recurrent_ppo.py", tmp_path)["Policy"]
    options: dict[str, Any] = {"seed": 0, "device": "cpu", "n_steps": 32, "n_epochs": 2}
    theirs = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", **options)
    ours = RecurrentPPO(policy, "CartPole-v1", **options)
    assert sum(isinstance(module, lltm.LSTM) for module in ours.policy.modules()) == 2
    ours.policy.load_state_dict(theirs.policy.state_dict())
    state = torch.randn(1, 4, 256), torch.randn(1, 4, 256)
    starts = (torch.rand(4 * 20) < 0.2).float()
    rollout = torch.randn(4 * 20, 4), torch.randint(2, (4 * 20,)), RNNStates(state, state), starts
    results = []
    for model in (theirs, ours):
        recurrent: Any = model.policy
        values, log_prob, _ = recurrent.evaluate_actions(*rollout)
        parameters = list(recurrent.parameters())
        loss = values.square().mean() + log_prob.mean()
        results.append((values, log_prob, *torch.autograd.grad(loss, parameters)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    before = [p.clone() for p in ours.policy.parameters()]
    ours.learn(64)
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.policy.parameters(), strict=True))


@support.needs_extra("examples", "torchrl")
def test_torchrl(tmp_path: Path) -> None:
    """Compares with torchrl's split and padded episodes."""
    from tensordict import TensorDict
    from torchrl.modules import GRUModule, set_recurrent_mode

    module = defined_in("torchrl_gru.py", tmp_path)["GRUModule"](3, 5)
    keys = ["observation", "hidden", "is_init"]
    theirs = GRUModule(3, 5, in_keys=keys, out_keys=["embedding", ("next", "hidden")])
    module.gru.load_state_dict(theirs.gru.state_dict())
    starts = torch.rand(4, 12, 1) < 0.2
    starts[:, 0] = True
    x = torch.randn(4, 12, 3)

    def rollout(hidden: Tensor) -> TensorDict:
        return TensorDict({"observation": x, "hidden": hidden, "is_init": starts}, [4, 12])

    with set_recurrent_mode(True):
        expected = theirs(rollout(torch.zeros(4, 12, 1, 5)))["embedding"]
        output = module(rollout(torch.zeros(4, 12, 5)))["embedding"]
    torch.testing.assert_close(output, expected)
    hidden = torch.zeros(4, 5)
    for t in range(12):
        step = TensorDict({"observation": x[:, t], "hidden": hidden, "is_init": starts[:, t]}, [4])
        hidden = module(step)["next", "hidden"]
        torch.testing.assert_close(hidden, output[:, t])


@support.needs_extra("examples", "torchrl")
@pytest.mark.parametrize("count", [1, 2])
def test_torchrl_in_an_environment(count: int, tmp_path: Path) -> None:
    """Single steps match the rollout."""
    from torchrl.envs import GymEnv, SerialEnv
    from torchrl.modules import set_recurrent_mode

    defined = defined_in("torchrl_gru.py", tmp_path)
    module = defined["GRUModule"](4, 5)
    made: Any = GymEnv("CartPole-v1")
    if count > 1:
        made = SerialEnv(count, lambda: GymEnv("CartPole-v1"))
    environment = defined["with_state"](made, 5)
    with torch.no_grad():
        rollout = environment.rollout(
            60, lambda td: environment.rand_action(module(td)), break_when_any_done=False
        )
    assert rollout.shape == ((60,) if count == 1 else (count, 60))
    assert rollout["is_init"].sum() > count  # some episodes ended
    expected = rollout["embedding"].clone()
    with set_recurrent_mode(True):
        output = module(rollout)["embedding"]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert module.gru.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="pyqlib has no packages for this Python")
@support.needs_extra("examples", "qlib")
def test_qlib(tmp_path: Path) -> None:
    """A configured model matches qlib's."""
    import numpy as np
    import pandas as pd
    from qlib.utils import init_instance_by_config

    defined_in("qlib_gru.py", tmp_path)
    options = {"d_feat": 3, "hidden_size": 16, "batch_size": 32, "GPU": -1, "seed": 0}
    x = pd.DataFrame(np.random.default_rng(0).normal(size=(128, 3 * 10)))
    y = pd.DataFrame(x.to_numpy()[:, :3].sum(1))
    dataset = SimpleNamespace(prepare=lambda *a, **options: x)
    results = []
    for name, module in (
        ("GRU", "qlib.contrib.model.pytorch_gru"),
        ("FasterGRU", str(tmp_path / "qlib_gru.py")),
    ):
        model = init_instance_by_config({"class": name, "module_path": module, "kwargs": options})
        np.random.seed(0)
        losses = []
        for _ in range(3):
            model.train_epoch(x, y)
            losses.append(model.test_epoch(x, y)[0])
        model.fitted = True
        results.append((model, torch.tensor(losses), torch.tensor(model.predict(dataset))))
    (theirs, *expected), (ours, *got) = results
    assert isinstance(ours.gru_model.rnn, lltm.GRU)
    assert not isinstance(theirs.gru_model.rnn, lltm.GRU)
    assert expected[0][2] < expected[0][0]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@support.needs_extra("examples", "opacus")
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_opacus(name: str, tmp_path: Path) -> None:
    """Compares with the gradients of single samples."""
    from opacus.grad_sample import GradSampleModule

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
            self.rnn = getattr(torch.nn, name)(3, 5, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1].square().sum(1)  # type: ignore[no-any-return]

    defined_in("private_layers.py", tmp_path)
    model, x = Model(), torch.randn(4, 6, 3)
    parameters = list(model.parameters())
    samples = [torch.autograd.grad(model(sample[None]).sum(), parameters) for sample in x]
    lltm.replace_(model)
    GradSampleModule(model)(x).mean().backward()
    for p, *expected in zip(parameters, *samples, strict=True):
        torch.testing.assert_close(p.grad_sample, torch.stack(expected))
