"""The simulated device as the mutation tool sees it. The only file here that knows it."""

from __future__ import annotations

from typing import Any

import torch

from .loader import load_simulator_alone

__all__ = ["start"]

# Slow enough that copies of a tiny model take as long as its kernels: what waits too early or too late shows.
_LINK = 2e9


def start() -> Any:
    """The simulator, started in this process, which must not have imported lowtide."""
    torch.set_num_threads(1)
    return load_simulator_alone().start("tiny", link=_LINK, trace=True)
