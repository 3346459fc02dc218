"""The loop that an optimizer on the host is compared with, and a run of it with everything in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.optim.cpu import CpuOptimizer

from .kit import assert_same_bits, backward

NAMES = ["adamw", "adamw-foreach", "adamw-fused", "sgd"]
TYPES = [torch.float32, torch.bfloat16]


class HostSums:
    """The loop written out: gradients of a step are added up in float32 in host memory, and stepped there."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.parameters = list(model.parameters())
        dense = {"memory_format": torch.preserve_format}
        self.masters = [p.detach().to("cpu", torch.float32).clone(**dense) for p in self.parameters]
        with torch.device("cpu"):
            self.optimizer = make(self.masters)
        self.param_groups = self.optimizer.param_groups

    def take(self) -> None:
        """After each backward."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                grad = parameter.grad.detach().to("cpu").to(torch.float32)
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        with torch.device("cpu"):
            self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master.grad is not None:
                parameter.copy_(master)
            master.grad = None


def same_state(reference: HostSums, model: nn.Module, optimizer: CpuOptimizer) -> None:
    """Masters and state of the loop written out are those of ``optimizer``."""
    found = optimizer.state
    for parameter, master in zip(model.parameters(), reference.masters, strict=True):
        expected = dict(reference.optimizer.state.get(master, {}))
        got = found.get(parameter, {})
        kept = got.pop("master_param", None)
        assert_same_bits(expected, got, "state")
        if kept is not None:
            assert_same_bits(master, kept, "master")


def run_with_everything(model: nn.Module, optimizer: Any, *, clips: bool) -> list[Tensor]:
    """Three backwards a step, a scheduler, a step without one gradient, one without any, and sometimes clipping."""
    scheduled = optimizer.optimizer if isinstance(optimizer, HostSums) else optimizer
    schedule = torch.optim.lr_scheduler.SequentialLR(
        scheduled,
        [
            torch.optim.lr_scheduler.LambdaLR(scheduled, lambda k: 0.1 * (k + 1)),
            torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, 5),
        ],
        milestones=[3],
    )
    norms = []
    for step in range(7):
        for micro in range(0 if step == 4 else 1 if step == 3 else 3):
            model[2].weight.requires_grad_(step not in {2, 5})  # type: ignore[index]
            backward(model, 10 * step + micro, 1 / 3)
            if isinstance(optimizer, HostSums):
                optimizer.take()
        if clips and step != 4:
            norms.append(optimizer.clip(0.05) if isinstance(optimizer, HostSums) else optimizer.clip_grad_norm_(0.05))
        optimizer.step()
        schedule.step()
    return norms
