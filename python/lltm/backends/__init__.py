"""Settings of the backends, in the manner of torch.backends; they hold for the whole process.

lltm.backends.cuda    how sequences run on a GPU
"""

from __future__ import annotations

from . import cuda as cuda

__all__ = ["cuda"]
