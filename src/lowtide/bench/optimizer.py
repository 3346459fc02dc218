"""``lowtide bench optimizer``: a swapped optimizer beside the plain one, on this machine's CPU.

Law: every time is a ratio within one run, the modes' steps interleaved on one thread. Plain RAM is the device and a
file the lower tier, so that peaks and resident bytes mean what they mean on an accelerator.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lowtide
from lowtide.bench import host_step
from lowtide.measure import Record, memory_curve, write_records
from lowtide.optim.swap import SwapOptimizer

__all__ = ["run"]

BENCH = "bench optimizer"

Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Mode:
    """A way to step: AdamW's implementation, and what is put around it."""

    name: str
    implementation: str
    wrap: Wrap = lambda optimizer: optimizer
    dtype: torch.dtype = torch.float32


def _adamw(parameters: list[nn.Parameter], implementation: str) -> torch.optim.Optimizer:
    flags: dict[str, Any] = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[
        implementation
    ]
    return torch.optim.AdamW(parameters, lr=1e-3, **flags)


_MODES = (
    _Mode("plain, fused", "fused"),
    _Mode("plain, foreach", "foreach"),
    _Mode("plain, for-loop", "for-loop"),
    _Mode("swapped, fused", "fused", lowtide.swap_optimizer),
    _Mode("bf16, fp32 masters swapped", "fused", lambda o: lowtide.swap_optimizer(o, master="fp32"), torch.bfloat16),
    _Mode("bf16, residual swapped", "fused", lambda o: lowtide.swap_optimizer(o, master="residual"), torch.bfloat16),
    _Mode(
        "bf16, residual stays",
        "fused",
        lambda o: lowtide.swap_optimizer(o, master="residual", tier="device"),
        torch.bfloat16,
    ),
)


class _Run:
    """One mode's parameters and optimizer."""

    def __init__(self, mode: _Mode, elements: int) -> None:
        torch.manual_seed(0)
        rows = max(1, elements // (1 << 20))
        # Matrices of a million elements, as many as it takes.
        self.parameters = [nn.Parameter((torch.randn(1024, 1024) * 0.02).to(mode.dtype)) for _ in range(rows)]
        self.optimizer = mode.wrap(_adamw(self.parameters, mode.implementation))
        self.times: list[float] = []
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - began

    def resident(self) -> int:
        """Bytes beside parameters and gradients that stay in memory between steps."""
        if isinstance(self.optimizer, SwapOptimizer):
            return self.optimizer.report().kept_bytes
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))


def _figures(one: _Run, base: _Run, peak: int) -> dict[str, tuple[float, str]]:
    window = one.optimizer.report().window_bytes if isinstance(one.optimizer, SwapOptimizer) else 0
    middle = statistics.median(one.times)
    return {
        "step_over_plain_fused": (middle / statistics.median(base.times), "ratio"),
        "resident_bytes_a_parameter": (one.resident() / one.elements, "B"),
        "peak_bytes_a_parameter": (peak / one.elements, "B"),
        "window_bytes_a_parameter": (window / one.elements, "B"),
        "step_seconds": (middle, "s"),
    }


def run(elements: int, json: Path | None, *, rounds: int = 5) -> int:
    """Measure, print a table, and write records."""
    torch.set_num_threads(1)
    console = Console()
    runs = {mode.name: _Run(mode, elements) for mode in _MODES}
    peaks: dict[str, int] = {}
    for name, one in runs.items():
        one.step()  # makes the state
        gc.collect()
        peaks[name] = one.resident() + memory_curve(one.optimizer.step).peak_bytes
    for _ in range(rounds):
        for one in runs.values():
            one.times.append(one.step())
    base = runs["plain, fused"]
    table = Table(title=f"AdamW over {base.elements / 1e6:.1f} million parameters, one thread; bytes a parameter")
    for title in ("mode", "step / plain fused", "resident", "peak in step", "two buckets"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    found: list[Record] = []
    for name, one in runs.items():
        figures = _figures(one, base, peaks[name])
        shown = list(figures.values())[: len(table.columns) - 1]
        table.add_row(name, *(f"{value:.2f}" for value, _ in shown))
        found += [Record(BENCH, "adamw", name, metric, value, unit) for metric, (value, unit) in figures.items()]
    console.print(table)
    del runs, base
    found += host_step.measure(elements, console, rounds=rounds)
    console.print(_torchao())
    if json is not None:
        write_records(json, found)
    return 0


def _torchao() -> str:
    """Say of the optimizer of torchao that it cannot run here, instead of leaving it out."""
    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    if not kinds:
        return "torchao's CPUOffloadOptimizer: not measured, it runs on CUDA and XPU only"
    return "torchao's CPUOffloadOptimizer: not measured by this command"
