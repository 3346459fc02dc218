"""A timed step is a step; its times are those of the compute and of the link, and add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide import device
from lowtide.optim import times
from lowtide.optim.segment import HeldSegment
from lowtide.optim.swap import swap_optimizer
from lowtide.optim.times import BucketTimes, StepTimes, Stopwatch

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights

CPU = torch.device("cpu")


class Marks:
    """A clock that the test winds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(times, "_mark", lambda _: self.now)


class Fake:
    """What a stopwatch looks at of a segment."""

    def __init__(self, nbytes: int, *, moves: bool = True) -> None:
        self.nbytes, self.moves, self.device = nbytes, moves, CPU


def test_times_are_sorted_into_buckets_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Marks(monkeypatch)
    watch = Stopwatch([CPU])
    for nbytes, wait, update in ((60, 3.0, 1.0), (40, 0.0, 2.0), (50, 5.0, 1.0), (50, 0.5, 1.0)):
        segment: Any = Fake(nbytes)
        clock.now += wait
        with watch.lap(segment):
            clock.now += update
    clock.now += 7.0
    watch.end()
    found = watch.times(100, lambda _: (20.0, 50.0))
    assert found.buckets == (BucketTimes(100, 2.0, 5.0, 3.0, 3.0), BucketTimes(100, 2.0, 5.0, 2.0, 5.5))
    assert found.last_stores_seconds == 7.0
    assert (found.link_seconds, found.update_seconds, found.exposed_seconds) == (10.0, 5.0, 15.5)
    assert found.seconds == clock.now
    assert "step 20500.00 ms: link 10000.00, update 5000.00, exposed 15500.00" in str(found)


def test_what_does_not_move_takes_no_time_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Marks(monkeypatch)
    watch = Stopwatch([CPU])
    segment: Any = Fake(100, moves=False)
    with watch.lap(segment):
        clock.now += 1.0
    watch.end()
    assert watch.times(100, lambda _: (1.0, 1.0)) == StepTimes((BucketTimes(100, 0.0, 0.0, 1.0, 0.0),), 0.0)


@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_timed_step_has_the_bits_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.optim.swap.tier_rates", lambda *_: (1e9, 1e9))
    plain_model, model = net(), net()
    plain = OPTIMIZERS[name](list(plain_model.parameters()))
    optimizer = swap_optimizer(OPTIMIZERS[name](list(model.parameters())), swap_times=4)
    for step in range(3):
        for m, o in ((plain_model, plain), (model, optimizer)):
            o.zero_grad()
            backward(m, step)
            found = optimizer.timed_step() if o is optimizer else o.step()
    assert_same_bits(weights(plain_model), weights(model))
    report = optimizer.report()
    assert sum(bucket.nbytes for bucket in found.buckets) == report.moving_bytes
    assert report.buckets <= len(found.buckets) <= report.buckets + 1
    assert found.seconds > 0
    assert optimizer._watch is None


@pytest.mark.sim
def test_on_the_simulated_device_the_times_are_those_of_its_description() -> None:
    """The probe finds the link's rate within a percent; the longer of link and arithmetic is what a step takes."""
    where = device.training_device()
    rows = [nn.Parameter(torch.ones(1 << 20, device=where)) for _ in range(8)]
    optimizer = swap_optimizer(torch.optim.AdamW(rows, fused=True), swap_times=4)
    for _ in range(2):
        for row in rows:
            row.grad = torch.ones_like(row)
        found = optimizer.timed_step()
    down, up = times.link_rates(where)
    moved = optimizer.report().moving_bytes
    assert found.link_seconds == pytest.approx(max(moved / down, moved / up), rel=0.02)
    assert found.seconds >= max(found.link_seconds, found.update_seconds)
    assert found.exposed_seconds == pytest.approx(found.seconds - found.update_seconds)


def test_an_update_that_raises_leaves_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.optim.swap.tier_rates", lambda *_: (1e9, 1e9))
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["sgd"](list(model.parameters())), swap_times=4)
    backward(model, 0)

    def full(_: HeldSegment) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(HeldSegment, "arrive", full)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.timed_step()
    assert optimizer._watch is None
    optimizer.step()
