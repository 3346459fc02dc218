"""What a configuration asks of the optimizer: swap, a residual instead of masters, a step on the host (O1, O4, P1).

Law: whether it can be met is known before a layer is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import ConfigError, explain
from lowtide.optim.cpu import CpuOptimizer
from lowtide.optim.placement import offload_optimizer
from lowtide.optim.reuse import check_model, reuse_fp32_param
from lowtide.optim.swap import SwapOptimizer, swap_optimizer
from lowtide.recipes.config import MemoryConfig

__all__ = ["check_optimizer", "refuse_optimizer_fields", "wrap_optimizer"]


def check_optimizer(config: MemoryConfig, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if the optimizer that the configuration is about is missing."""
    if config.treats_optimizer and optimizer is None:
        raise ConfigError(
            explain(
                "the configuration is about the optimizer, too",
                expected="lowtide.apply(model, config, optimizer)",
                got="no optimizer",
                where=_fields(config),
                remedy="Pass it, and train with applied.optimizer.",
            )
        )


def refuse_optimizer_fields(config: MemoryConfig, where: str, remedy: str) -> None:
    """Raise ConfigError where nobody could hand the wrapped optimizer on."""
    if config.treats_optimizer:
        raise ConfigError(
            explain(
                "the trainer makes its optimizer itself and keeps it",
                expected="a configuration of layers",
                got=_fields(config),
                where=where,
                remedy=remedy,
            )
        )


def wrap_optimizer(
    model: torch.nn.Module,
    config: MemoryConfig,
    optimizer: torch.optim.Optimizer | None,
    undo: list[Callable[[], None]],
) -> torch.optim.Optimizer | None:
    """The optimizer to train with; how to take it off again is appended to ``undo``."""
    if optimizer is None or not config.treats_optimizer:
        return optimizer
    made: SwapOptimizer | CpuOptimizer
    if config.optimizer_offload is not None:
        made = offload_optimizer(
            optimizer,
            step=config.optimizer_offload,
            grad_offload=config.grad_offload,
            overlap=config.optimizer_overlap,
        )
    elif not config.swap_optimizer:
        made = reuse_fp32_param(model, optimizer)
    else:
        if config.reuse_fp32_param:
            check_model(model, optimizer)
        options: dict[str, Any] = (
            {} if config.swap_optimizer_times is None else {"swap_times": config.swap_optimizer_times}
        )
        master = "residual" if config.reuse_fp32_param else None
        made = swap_optimizer(optimizer, master=master, overlap=config.optimizer_overlap, **options)

    def unwrap() -> None:
        made.unwrap()

    undo.append(unwrap)
    return made


def _fields(config: MemoryConfig) -> str:
    names = ("swap_optimizer", "reuse_fp32_param", "optimizer_offload")
    return ", ".join(name for name in names if getattr(config, name))
