"""Steps that go on beside the loop and stand still until somebody waits, to compare with steps that end at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.optim import cpu, late
from lowtide.optim.cpu import CpuOptimizer

from .kit import backward

__all__ = ["Gate", "adamw", "cpu_optimizer", "held_step", "stepped", "x_of"]

cpu_optimizer = functools.partial(cpu.cpu_optimizer, grad_offload=True, overlap=True)


class Gate:
    """Steps that go on stand still until somebody waits, however long that takes: who does not wait reads old bits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.order: list[list[str]] = []
        self.fails: str | None = None
        plain = late.step_rows

        def step_rows(rows: Any, worker: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            self.order.append([row.name for row in rows])
            if self.fails in self.order[-1]:
                raise MemoryError("no room")
            plain(rows, worker)

        patch.setattr(late, "step_rows", step_rows)
        for name in ("want", "join"):
            patch.setattr(late._LateStep, name, self._opening(getattr(late._LateStep, name)))

    def _opening(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any) -> Any:
            if method.__name__ == "join":  # which returns at the end alone
                self.opened.set()
            found = method(*args)
            self.opened.set()
            return found

        return opened

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    def close(self) -> None:
        self.opened.clear()
        self.reached.clear()
        self.order.clear()


def adamw(model: nn.Module, **options: Any) -> CpuOptimizer:
    return cpu_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), **options)


def held_step(optimizer: torch.optim.Optimizer, held: Gate | None) -> None:
    """A step, which goes on and stands still if there is a gate."""
    if held is not None:
        held.close()
    optimizer.step()


def stepped(make: Callable[[], nn.Module], gate: Gate | None, feed: Callable[[nn.Module, int], Any] = backward) -> Any:
    """A model after two steps, of which the last goes on and stands still if there is a gate; and its optimizer."""
    model = make()
    optimizer = adamw(model, overlap=gate is not None)
    for step in range(2):
        feed(model, step)
        held_step(optimizer, gate if step else None)
        optimizer.zero_grad()
    return model, optimizer


def x_of(model: nn.Module, columns: int = 301) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(5)
    return torch.randn(3, columns, generator=draw, device="cpu").to(next(model.parameters()).device)
