"""Libraries of reinforcement learning with the code of docs/reinforcement-learning.md."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from torch import Tensor

import lltm

PAGE = support.ROOT / "docs" / "reinforcement-learning.md"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # other libraries' warnings


def defined_in(file: str, folder: Path) -> dict[str, Any]:
    """What the block of the page that is this file defines."""
    match = re.search(
        rf"^```python\n(# {re.escape(file)}\n.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    assert match is not None
    path = folder / file
    path.write_text(match[1])
    return runpy.run_path(str(path))


@support.needs_extra("examples", "sb3_contrib")
def test_stable_baselines3(tmp_path: Path) -> None:
    """The policy computes what sb3-contrib's does by its loop, and trains."""
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
        values, log_prob, _ = model.policy.evaluate_actions(*rollout)
        parameters = list(model.policy.parameters())
        loss = values.square().mean() + log_prob.mean()
        results.append((values, log_prob, *torch.autograd.grad(loss, parameters)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    before = [p.clone() for p in ours.policy.parameters()]
    ours.learn(64)
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.policy.parameters(), strict=True))


@support.needs_extra("examples", "torchrl")
def test_torchrl(tmp_path: Path) -> None:
    """The module computes what torchrl's does with episodes that are split and padded."""
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
