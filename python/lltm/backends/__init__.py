"""Process-wide backend settings, like torch.backends.

lltm.backends.cuda    execution of sequences on a GPU
"""

from __future__ import annotations

from . import cuda as cuda

__all__ = ["cuda"]
