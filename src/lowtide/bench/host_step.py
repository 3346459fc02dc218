"""A loop whose optimizer steps on the host, beside the same loop with a step that goes on: what of it is hidden.

Law: the loops take turns, on one compute thread each, and a loop's time ends when its last step has. The thread that a
step goes on in has a core of its own where there is one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lowtide
from lowtide.measure import Record

__all__ = ["measure"]

BENCH = "bench optimizer"

_WIDTH = 1024
# Rows of a batch: a forward and a backward then take about twice as long as a step of the optimizer.
_ROWS = 96
_STEPS = 4


@dataclass(frozen=True)
class _Mode:
    name: str
    wraps: bool
    overlap: bool = False


_MODES = (
    _Mode("plain, fused", wraps=False),
    _Mode("on the host", wraps=True),
    _Mode("overlap", wraps=True, overlap=True),
)


class _Loop:
    """One mode's model and optimizer."""

    def __init__(self, mode: _Mode, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(_WIDTH, _WIDTH), nn.GELU())))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        if mode.wraps:
            self.optimizer = lowtide.cpu_optimizer(self.optimizer, overlap=mode.overlap)
        self.data = torch.randn(_ROWS, _WIDTH)
        self.whole: list[float] = []
        self.step: list[float] = []

    def run(self) -> None:
        """A few steps, from start to end; the times are of one step."""
        inside = 0.0
        began = time.perf_counter()
        for _ in range(_STEPS):
            self.model(self.data).square().mean().backward()
            called = time.perf_counter()
            self.optimizer.step()
            inside += time.perf_counter() - called
            self.optimizer.zero_grad()
        if isinstance(self.optimizer, lowtide.CpuOptimizer):
            self.optimizer.wait()
        self.whole.append((time.perf_counter() - began) / _STEPS)
        self.step.append(inside / _STEPS)


def _weights(loop: _Loop) -> list[Tensor]:
    return [parameter.detach() for parameter in loop.model.parameters()]


def measure(elements: int, console: Console, *, rounds: int = 5) -> list[Record]:
    """Measure and print a table; about ``elements`` parameters.

    Raises:
        RuntimeError: the loops came to different bits.
    """
    layers = max(2, elements // (_WIDTH * _WIDTH))
    loops = {mode.name: _Loop(mode, layers) for mode in _MODES}
    for loop in loops.values():
        loop.run()  # makes the state
        loop.whole.clear()
        loop.step.clear()
    for _ in range(rounds):
        for loop in loops.values():
            loop.run()
    plain, host, late = loops.values()
    for loop in (host, late):
        if not all(torch.equal(a, b) for a, b in zip(_weights(plain), _weights(loop), strict=True)):
            raise RuntimeError("a step on the host came to other bits than the plain one")
    base = statistics.median(plain.whole)
    table = Table(title=f"A loop over {layers} layers of a million parameters, stepped on the host; times over plain")
    for title in ("mode", "whole loop / plain", "step() / plain loop", "of the host's step() hidden"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    found = []
    for name, loop in loops.items():
        whole, inside = statistics.median(loop.whole), statistics.median(loop.step)
        saved = (statistics.median(host.whole) - whole) / statistics.median(host.step)
        shown = f"{saved:.0%}" if loop is late else "-"
        table.add_row(name, f"{whole / base:.2f}", f"{inside / base:.3f}", shown)
        found += [
            Record(BENCH, "loop", name, "loop_over_plain", whole / base, "ratio"),
            Record(BENCH, "loop", name, "step_call_over_plain_loop", inside / base, "ratio"),
        ]
        if loop is late:
            found.append(Record(BENCH, "loop", name, "step_hidden", saved, "ratio"))
    console.print(table)
    return found
