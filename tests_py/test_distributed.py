"""DDP, FSDP2 and DTensor: two processes train to the same losses as one.

torchrun starts the checks in distributed/train.py with gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import support
import torch.distributed

TIMEOUT_S = 120


@pytest.mark.slow  # three processes import PyTorch
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no distributed")
def test_two_processes_train_as_one_does() -> None:
    script = Path(__file__).parent / "distributed" / "train.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = support.run_python(*launch, str(script), timeout_s=TIMEOUT_S, OMP_NUM_THREADS="1")
    assert result.stdout.count("done") == 2
