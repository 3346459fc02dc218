"""Pipeline programs: the same schedule with plain and with wrapped stages, in one process per rank.

Law: losses, gradients and the generator's state of every step are compared bit
by bit in the rank that made them; what comes back to the test are counts.
"""

from __future__ import annotations

import gc
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import lowtide
from lowtide import SwapManager

from .kit import WRAPS, Watch, mean_square, more_than, same

WIDTH, TOKENS = 8, 16
SCHEDULES: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}
ONE_STAGE = {"GPipe", "1F1B"}
V_SHAPED = {"ZBV", "DualPipeV"}


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1, self.training)


class Depth:
    """How many forwards of a rank's stages wait for their backward, and how many backwards of a step come in two."""

    def __init__(self, stages: list[Any]) -> None:
        self.now = self.most = self.split = 0
        for stage in stages:
            self._count(stage)

    def _count(self, stage: Any) -> None:
        forward, backward, weight = (
            stage.forward_one_chunk,
            stage.backward_one_chunk,
            stage.backward_weight_one_chunk,
        )

        def counted_forward(*args: Any, **kwargs: Any) -> Any:
            self.now += torch.is_grad_enabled()
            self.most = max(self.most, self.now)
            return forward(*args, **kwargs)

        def counted_backward(*args: Any, **kwargs: Any) -> Any:
            self.now -= 1
            return backward(*args, **kwargs)

        def counted_weight(*args: Any, **kwargs: Any) -> Any:
            # The first stage has no input gradient: its two halves are one whole backward.
            self.split += not stage.is_first
            return weight(*args, **kwargs)

        stage.forward_one_chunk = counted_forward
        stage.backward_one_chunk = counted_backward
        stage.backward_weight_one_chunk = counted_weight


def stage_numbers(schedule: str) -> list[int]:
    """Which stages this rank runs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if schedule in ONE_STAGE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else [rank, size + rank]


def build(numbers: list[int], wrap: str | None, layers: int, first: int) -> list[nn.Sequential]:
    """The stage modules of this rank, alike however they are wrapped; layers before ``first`` are left alone."""
    modules = []
    for number in numbers:
        torch.manual_seed(100 + number)
        module = nn.Sequential(*(Block() for _ in range(first + layers)))
        if wrap is not None:
            for layer in module[first:]:
                WRAPS[wrap](layer)
            lowtide.auto(module)
        modules.append(module)
    return modules


class Training:
    """One rank of one pipeline: bits to compare, and counts to return."""

    def __init__(self, schedule: str, wrap: str | None, *, layers: int, first: int, batches: int) -> None:
        self.numbers = stage_numbers(schedule)
        self.modules = build(self.numbers, wrap, layers, first)
        count = len(self.numbers) * dist.get_world_size()
        stages = [
            pipelining.PipelineStage(module, number, count, torch.device("cpu"))
            for module, number in zip(self.modules, self.numbers, strict=True)
        ]
        one: Any = stages[0] if schedule in ONE_STAGE else stages
        self.engine = SCHEDULES[schedule](one, n_microbatches=batches, loss_fn=mean_square)
        self.depth = Depth(stages)
        self.v_shaped = schedule in V_SHAPED
        self.batches, self.last = batches, count - 1
        self.bits: list[torch.Tensor] = []
        self.watch = Watch()
        self.peaks: list[int] = []
        self.after: list[int] = []

    def _arguments(self, number: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], list[torch.Tensor]]:
        data = torch.Generator().manual_seed(number)
        x, target = (torch.randn(self.batches * TOKENS, WIDTH, generator=data) for _ in range(2))
        losses: list[torch.Tensor] = []
        last = self.last in self.numbers
        return (x,) if 0 in self.numbers else (), {"target": target, "losses": losses} if last else {}, losses

    def step(self, number: int) -> None:
        """One training step."""
        torch.manual_seed(10 * number + dist.get_rank())
        for module in self.modules:
            module.zero_grad()
        inputs, more, losses = self._arguments(number)
        self.watch.peak = self.depth.split = 0
        self.watch.backward.clear()
        with self.watch:
            self.engine.step(*inputs, **more)
        self.peaks.append(self.watch.peak)
        self.bits += [loss.detach().clone() for loss in losses]
        self.bits += [p.grad.clone() for module in self.modules for p in module.parameters() if p.grad is not None]
        self.bits.append(torch.get_rng_state())
        self.after.append(SwapManager().lower_bytes())

    def evaluate(self, number: int) -> None:
        """A pass of the whole pipeline without gradients."""
        inputs, more, _ = self._arguments(number)
        for module in self.modules:
            module.eval()
        with torch.no_grad():
            if self.v_shaped:  # torch's own evaluation of these fails: it asks a stage for the gradient it did not make
                for module in self.modules:
                    module(torch.ones(TOKENS, WIDTH))
            else:
                self.engine.eval(*inputs, **more)
        for module in self.modules:
            module.train()


@lru_cache(maxsize=2)
def plainly(schedule: str, layers: int, first: int, batches: int, steps: int) -> Training:
    """The training that every way to wrap is compared with."""
    plain = Training(schedule, None, layers=layers, first=first, batches=batches)
    for number in range(steps):
        plain.step(number)
    return plain


def compare(
    schedule: str,
    wrap: str,
    *,
    layers: int = 2,
    first: int = 1,
    batches: int = 4,
    steps: int = 2,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Train plain, and wrapped, with an evaluation after the first step if asked; the verdict, and what was counted."""
    SwapManager().configure(min_bytes=0)
    plain = plainly(schedule, layers, first, batches, steps)
    got = Training(schedule, wrap, layers=layers, first=first, batches=batches)
    for number in range(steps):
        got.step(number)
        if evaluate and not number:
            got.evaluate(number)  # once: after it the schedule runs a step to learn its shapes again
    gc.collect()
    rows = [row for module in got.modules for row in lowtide.report(module).rows]
    traffic = SwapManager().traffic
    held = [r.bytes for row in rows for reason, r in row.refused.items() if reason.startswith("somebody else keeps it")]
    return {
        "equal": same(plain.bits, got.bits),
        "results": len(got.bits),
        "after": [*got.after, SwapManager().lower_bytes()],
        "peaks": got.peaks,
        "depth": got.depth.most,
        "stages": len(got.numbers),
        "chunks": len(got.numbers) * batches,
        "split": got.depth.split,
        "in": traffic.in_bytes,
        "out": traffic.out_bytes,
        "late": traffic.late_loads,
        "held": held,
        "again": more_than(plain.watch.backward, got.watch.backward),
    }


def by_hand(wrap: str, *, layers: int = 2, batches: int = 4, steps: int = 2) -> dict[str, Any]:
    """A hand-written 1F1B loop, plain and with a group per stage and micro-batch that the loop itself drives."""
    SwapManager().configure(min_bytes=0)
    plain = [run_by_hand(None, number, layers, batches) for number in range(steps)]
    got = [run_by_hand(wrap, number, layers, batches) for number in range(steps)]
    traffic = SwapManager().traffic
    return {
        "equal": all(same(want[0], have[0]) for want, have in zip(plain, got, strict=True)),
        "results": len(got[0][0]),
        "after": SwapManager().lower_bytes(),
        "peaks": [peak for _, peak in got],
        "in": traffic.in_bytes,
        "out": traffic.out_bytes,
        "late": traffic.late_loads,
    }


def run_by_hand(wrap: str | None, number: int, layers: int, batches: int) -> tuple[list[torch.Tensor], int]:
    """One step of 1F1B: warm up, then one forward and one backward by turns, then the rest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (module,) = build([rank], wrap, layers, 1)
    loop = HandLoop(module, wrap, number)
    torch.manual_seed(10 * number + rank)
    warm = min(size - rank - 1, batches)
    with loop.watch:
        for batch in range(warm):
            loop.forward(batch)
        for batch in range(warm, batches):
            loop.forward(batch)
            loop.backward(batch - warm)
        for batch in range(batches - warm, batches):
            loop.backward(batch)
        for work, _ in loop.sent:
            work.wait()
    losses = [loss.detach() for loss in loop.losses]
    return [
        *losses,
        *(p.grad for p in module.parameters() if p.grad is not None),
        torch.get_rng_state(),
    ], loop.watch.peak


class HandLoop:
    """One stage's sends, receives and group calls."""

    def __init__(self, module: nn.Module, wrap: str | None, number: int) -> None:
        self.module, self.swaps, self.number = module, wrap not in {None, "recompute"}, number
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self.sent: list[Any] = []
        self.watch = Watch()

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        self.sent.append((dist.isend(tensor, rank), tensor))  # both neighbours send at once: nobody may block

    def _data(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = torch.Generator().manual_seed(100 * self.number + batch)
        return torch.randn(TOKENS, WIDTH, generator=data), torch.randn(TOKENS, WIDTH, generator=data)

    def _group(self, batch: int) -> str:
        return f"stage {self.rank}, micro-batch {batch}"

    def forward(self, batch: int) -> None:
        """Forward of one micro-batch; what it saved leaves."""
        manager = SwapManager()
        x, target = self._data(batch)
        if self.rank:
            x = torch.empty(TOKENS, WIDTH)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        if self.swaps:
            manager.set_current_group_name(self._group(batch))
        out = self.module(x)
        manager.set_current_group_name(None)
        if self.swaps:
            manager.launch_offload(self._group(batch))
        if self.rank + 1 < self.size:
            self._send(out.detach(), self.rank + 1)
        else:
            out = mean_square(out, target)
            self.losses.append(out)
        if self.swaps:
            manager.wait_offload(self._group(batch))
        self.waiting[batch] = (x, out)

    def backward(self, batch: int) -> None:
        """Backward of one micro-batch; what it saved comes back while the gradient is on its way."""
        manager = SwapManager()
        x, out = self.waiting.pop(batch)
        if self.swaps:
            manager.launch_load(self._group(batch))
        grad = None
        if self.rank + 1 < self.size:
            grad = torch.empty(TOKENS, WIDTH)
            dist.recv(grad, self.rank + 1)
        if self.swaps:
            manager.wait_load(self._group(batch))
        out.backward(grad)
        if self.rank:
            assert x.grad is not None
            self._send(x.grad, self.rank - 1)
