"""lltm.reference, the definition, against the oracle and against lltm's modules."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import support
import torch
from support import LENGTHS

import lltm


def assert_equal_to_the_oracle(outputs: support.Outputs, arguments: support.Arguments) -> None:
    with torch.no_grad():
        grads = [torch.randn_like(y) for y in outputs(lltm.reference, arguments)]
    exact = support.exact_results_and_gradients(arguments, grads)
    named = support.results_and_gradients(outputs, lltm.reference, arguments, grads)
    for name, y in named.items():
        np.testing.assert_allclose(
            oracle.array(y).reshape(exact[name].shape),
            exact[name],
            rtol=1e-12,
            atol=1e-12,
            err_msg=name,
        )


def test_the_cell_is_the_oracle_s() -> None:
    arguments = support.cell_arguments((4, 3, 5), torch.float64)
    assert_equal_to_the_oracle(support.cell_outputs, arguments)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_sequence_is_the_oracle_s(reverse: bool) -> None:
    arguments = support.sequence_arguments((6, 4, 3, 5), torch.float64, reverse=reverse)
    assert_equal_to_the_oracle(support.sequence_outputs, arguments)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_packed_sequence_is_the_oracle_s(lengths: tuple[int, ...], reverse: bool) -> None:
    arguments = support.packed_arguments(lengths, dtype=torch.float64, reverse=reverse)
    assert_equal_to_the_oracle(support.sequence_outputs, arguments)


def test_an_empty_sequence_gives_the_initial_states() -> None:
    h, c = torch.randn(2, 4, 5)
    output, state = lltm.reference.sequence(torch.randn(0, 4, 3), (h, c), torch.randn(15, 8))
    assert output.shape == (0, 4, 5)
    torch.testing.assert_close(state, (h, c))


def test_runs_no_operator_of_lltm() -> None:
    layer = lltm.reference.LLTM(3, 5, num_layers=2, bidirectional=True)
    cell = lltm.reference.LLTMCell(3, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(torch.randn(6, 4, 3))[0].sum().backward()
        cell(torch.randn(4, 3))[0].sum().backward()
    called = {event.key for event in profile.key_averages()}
    assert "aten::sigmoid" in called
    assert not [name for name in called if "lltm::" in name]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3},
        {"bidirectional": True, "num_layers": 2},
        {"bias": False},
        {"batch_first": True},
    ],
    ids=str,
)
def test_modules_share_state_dicts_and_agree(options: dict[str, object]) -> None:
    ours = lltm.LLTM(3, 5, dtype=torch.float64, **options)  # type: ignore[arg-type]
    plain = lltm.reference.LLTM(3, 5, dtype=torch.float64, **options)  # type: ignore[arg-type]
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), plain(x))
