"""Whatever fails in a step, no state is lost: the step was made, or is made by calling it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import SwapManager
from lowtide.errors import CapacityError, StateError, TierError
from lowtide.optim import stepping
from lowtide.optim.swap import SwapOptimizer, swap_optimizer
from lowtide.residency.copies import Copy

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights


class FailingCopy:
    """A copy that was launched and turns out to have failed."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy.wait()
        raise TierError("the disk is gone")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copy, name)


class Faults:
    """Makes one copy of a carrier fail: ``launch_out``, ``out``, ``launch_in`` or ``in``, at its n-th use."""

    def __init__(self, carrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind, self.after = "", 0
        self._out, self._in = carrier.copy_out, carrier.copy_in
        monkeypatch.setattr(carrier, "copy_out", self.copy_out)
        monkeypatch.setattr(carrier, "copy_in", self.copy_in)

    def _now(self, kind: str) -> bool:
        if self.kind != kind:
            return False
        self.after -= 1
        if self.after >= 0:
            return False
        self.kind = ""
        return True

    def copy_out(self, sources: Sequence[torch.Tensor], stream: Any = None) -> list[Any]:
        if self._now("launch_out"):
            raise TierError("the disk is full")
        started = self._out(sources, stream)
        return [(slot, FailingCopy(copy)) for slot, copy in started] if self._now("out") else started

    def copy_in(self, slots: Any, where: torch.device, stream: Any = None) -> list[Any]:
        if self._now("launch_in"):
            raise TierError("the disk is gone")
        started = self._in(slots, where, stream)
        return [(flat, FailingCopy(copy)) for flat, copy in started] if self._now("in") else started


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Faults]:
    """A plain and a swapped run, and what makes the swapped one's copies fail."""
    model, twin = net(), net()
    plain = OPTIMIZERS["adamw"](list(model.parameters()))
    swapped = swap_optimizer(OPTIMIZERS["adamw"](list(twin.parameters())), swap_times=8)
    faults = Faults(SwapManager().carrier_for(next(twin.parameters()).device), monkeypatch)
    return (model, plain), (twin, swapped), faults


def prepare(runs: Any, step: int) -> None:
    for model, optimizer in runs[:2]:
        optimizer.zero_grad()
        backward(model, step)


@pytest.mark.parametrize("kind", ["launch_out", "out"])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_state_that_finds_no_room_stays_and_the_step_was_made(runs: Any, kind: str, after: int) -> None:
    (model, plain), (twin, swapped), faults = runs
    for step in range(5):
        prepare(runs, step)
        plain.step()
        if step == 2:
            faults.kind, faults.after = kind, after
            with pytest.raises(TierError, match="the step was made"):
                swapped.step()
            assert sum(s.is_resident for s in swapped._segments) == 1
        else:
            swapped.step()
            assert not any(s.is_resident for s in swapped._segments)
        assert_same_bits(weights(model), weights(twin), f"step {step}")
    assert_same_bits(plain.state_dict(), swapped.state_dict())


@pytest.mark.parametrize("kind", ["launch_in", "in", "update"])
@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_step_that_failed_half_way_goes_on_when_called_again(
    runs: Any, kind: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, plain), (twin, swapped), faults = runs
    for step in range(5):
        prepare(runs, step)
        plain.step()
        if step == 2:
            with monkeypatch.context() as patch:
                if kind == "update":
                    fail_update(patch, after)
                else:
                    faults.kind, faults.after = kind, after
                with pytest.raises((TierError, torch.OutOfMemoryError)):
                    swapped.step()
            assert not any(s.is_resident for s in swapped._segments)
            if after:
                with pytest.raises(StateError, match="half way"):
                    swapped.state_dict()
        swapped.step()
        assert_same_bits(weights(model), weights(twin), f"step {step}")
    assert_same_bits(plain.state_dict(), swapped.state_dict())


def fail_update(patch: pytest.MonkeyPatch, after: int) -> None:
    update, left = stepping.update_segment, [after]

    def once(*args: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("no memory for a temporary")
        update(*args)

    patch.setattr("lowtide.optim.swap.update_segment", once)


def test_new_gradients_after_a_failed_step_begin_another_step(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces that were stepped before the error are stepped again: these gradients are new."""
    _, (_, swapped), faults = runs
    prepare(runs, 0)
    swapped.step()
    prepare(runs, 1)
    faults.kind, faults.after = "launch_in", 3
    with pytest.raises(TierError):
        swapped.step()
    counts = [state["step"].item() for segment in swapped._segments for state in segment.states if state]
    prepare(runs, 2)
    swapped.step()
    after = [state["step"].item() for segment in swapped._segments for state in segment.states if state]
    assert [b - a for a, b in zip(counts, after, strict=True)] == [1.0] * len(counts)
    assert {1.0, 2.0} == set(counts)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_too_little_room_is_found_when_wrapping_and_nothing_moves(steps_before: int) -> None:
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(steps_before):
        inner.zero_grad()
        backward(model, step)
        inner.step()
    state = {key: dict(value) for key, value in inner.state.items()}
    SwapManager().configure(host_bytes=100_000)
    with pytest.raises(CapacityError, match=r"no room for the optimizer's state.* = \d+ bytes"):
        swap_optimizer(inner)
    assert_same_bits(list(state.values()), list(inner.state.values()))
    backward(model, 9)
    inner.step()


def test_a_budget_that_others_use_up_leaves_the_plain_optimizer_whole() -> None:
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    backward(model, 0)
    inner.step()
    moving = swap_optimizer(inner).report().moving_bytes
    other = net()
    second = OPTIMIZERS["adamw"](list(other.parameters()))
    backward(other, 0)
    second.step()
    SwapManager().reset()
    SwapManager().configure(host_bytes=2 * moving)
    first = net()
    held = OPTIMIZERS["adamw"](list(first.parameters()))
    backward(first, 0)
    held.step()
    taken: list[SwapOptimizer] = [swap_optimizer(held)]
    with pytest.raises(CapacityError):
        taken.extend(swap_optimizer(o) for o in (second, nn.Module()))  # type: ignore[type-var]
    assert len(taken) == 1
    assert second.state
    second.step()
