"""Two stages of a pipeline in one process, in the order of 1F1B and with backward in two halves: on every device.

Laws: bits equal; every region recomputes once and every copy is loaded once, and in time; nothing is left. On the
simulated accelerator no copy races with the compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import SwapManager

from .kit import WRAPS, Watch, more_than, same

LAYERS, BATCHES, ROWS, WIDTH = 3, 4, 16, 8
Tensor = torch.Tensor


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1, self.training)


class Line:
    """Both stages: runs forwards and backwards of micro-batches in a given order."""

    def __init__(self, wrap: str | None, *, groups: bool) -> None:
        torch.manual_seed(0)
        self.stages = [nn.Sequential(*(Block() for _ in range(LAYERS))) for _ in range(2)]
        self.groups = groups and wrap not in {None, "recompute"}
        if wrap is not None:
            for stage in self.stages:
                for layer in stage:
                    WRAPS[wrap](layer)
                if not groups:
                    lowtide.auto(stage)
        self.live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.coming: dict[tuple[int, int], Tensor] = {}
        self.losses: list[Tensor] = []

    def forward(self, number: int, batch: int) -> None:
        """One stage's forward of one micro-batch."""
        x = torch.randn(ROWS, WIDTH) if not number else self.coming.pop((number, batch))
        x = x.detach().requires_grad_()
        manager, group = SwapManager(), f"{number}, {batch}"
        if self.groups:
            manager.set_current_group_name(group)
        out = self.stages[number](x)
        manager.set_current_group_name(None)
        if self.groups:
            manager.launch_offload(group)
        if number:
            loss = out.square().mean()
            self.losses.append(loss.detach())
            self.live[number, batch] = x, loss
        else:
            self.coming[1, batch] = out.detach()
            self.live[number, batch] = x, out
        if self.groups:
            manager.wait_offload(group)

    def backward(self, number: int, batch: int, *, split: bool) -> None:
        """One stage's backward of one micro-batch, in one piece or first for its input and then for its weights."""
        x, out = self.live.pop((number, batch))
        grad = None if number else self.coming.pop((0, batch))
        manager, group = SwapManager(), f"{number}, {batch}"
        if self.groups:
            manager.launch_load(group)
            manager.wait_load(group)
        if not split:
            out.backward(grad)
            assert x.grad is not None
            made = x.grad
        else:
            (made,) = torch.autograd.grad(out, x, grad, retain_graph=True)
            weights = list(self.stages[number].parameters())
            for weight, more in zip(weights, torch.autograd.grad(out, weights, grad), strict=True):
                weight.grad = more if weight.grad is None else weight.grad + more
        if number:
            self.coming[0, batch] = made

    def results(self) -> list[Tensor]:
        grads = [p.grad for stage in self.stages for p in stage.parameters() if p.grad is not None]
        return [*self.losses, *grads, torch.get_rng_state()]


def orders() -> Iterator[tuple[Callable[..., None], int, int]]:
    """1F1B of two stages, as it falls out in one process."""
    yield Line.forward, 0, 0
    for batch in range(BATCHES):
        yield Line.forward, 1, batch
        if batch + 1 < BATCHES:
            yield Line.forward, 0, batch + 1
        yield Line.backward, 1, batch
        yield Line.backward, 0, batch


def run(wrap: str | None, *, groups: bool, split: bool) -> tuple[list[Tensor], Watch]:
    line, watch = Line(wrap, groups=groups), Watch()
    torch.manual_seed(1)
    with watch:
        for verb, number, batch in orders():
            options: dict[str, Any] = {"split": split} if verb is Line.backward else {}
            verb(line, number, batch, **options)
    assert not line.live
    return line.results(), watch


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("groups", [False, True], ids=["learned", "groups"])
@pytest.mark.parametrize("wrap", ["recompute", "swap", "inputs", "both"])
def test_two_stages_train_alike_and_bring_every_byte_back_once(wrap: str, groups: bool, split: bool) -> None:  # noqa: FBT001
    SwapManager().configure(min_bytes=0)
    plain, without = run(None, groups=False, split=split)
    got, watch = run(wrap, groups=groups, split=split)
    assert same(plain, got)
    assert SwapManager().lower_bytes() == 0
    traffic = SwapManager().traffic
    assert traffic.late_loads == 0
    again = more_than(without.backward, watch.backward)
    once = 0 if wrap == "swap" else 2 * LAYERS * BATCHES
    assert again.get("gelu", 0) == again.get("native_layer_norm", 0) == once
    if wrap == "recompute":
        assert traffic.out_bytes == traffic.in_bytes == 0
    elif groups:
        assert traffic.in_bytes == traffic.out_bytes > 0
    else:
        assert 0 < traffic.in_bytes <= traffic.out_bytes
