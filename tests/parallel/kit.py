"""What the programs share: ways to wrap, and a mode that watches operators, collectives and swapped bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide import SwapManager, _torch, checkpoint_wrapper, swap_wrapper

__all__ = ["WRAPS", "Watch", "mean_square", "more_than", "same"]

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": lambda layer: checkpoint_wrapper(layer, recompute="replay"),
    "auto": checkpoint_wrapper,
    "swap": swap_wrapper,
    "inputs": lambda layer: checkpoint_wrapper(layer, swap_inputs=True, recompute="replay"),
    "both": lambda layer: checkpoint_wrapper(
        layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True, recompute="replay"
    ),
}


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators of backward, collectives by themselves, and sees the largest number of swapped bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.backward: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if _torch.current_backward() != _torch.NO_BACKWARD:
            self.backward[name] += 1
            self.collectives[name] += "c10d" in space
        self.peak = max(self.peak, SwapManager().lower_bytes())
        return func(*args, **(kwargs or {}))


def mean_square(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return (out - target).square().mean()


def same(want: list[torch.Tensor], got: list[torch.Tensor]) -> bool:
    """Whether two lists agree in every bit."""
    return len(want) == len(got) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def more_than(plain: Counter[str], got: Counter[str]) -> dict[str, int]:
    """By how much two counts differ, where they do."""
    names = sorted({*plain, *got})
    return {name: more for name in names if (more := got[name] - plain[name])}
