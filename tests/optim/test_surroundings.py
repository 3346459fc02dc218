"""Loads that begin in backward and stores that end in forward change no bit; a wrong guess is taken back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import SwapManager, device
from lowtide.errors import ConfigError, TierError
from lowtide.optim.segment import HeldSegment
from lowtide.optim.swap import SwapOptimizer, swap_optimizer

from .kit import OPTIMIZERS, SeparateMasters, assert_same_bits, backward, net, through_file, weights

NAMES = ["adamw", "adamw-fused", "sgd", "adafactor"]


def overlapping(model: nn.Module, name: str = "adamw", **options: Any) -> SwapOptimizer:
    made = OPTIMIZERS[name](list(model.parameters()))
    return swap_optimizer(made, **{"swap_times": 4, "overlap": True} | options)


def arriving(optimizer: SwapOptimizer) -> int:
    return sum(segment.nbytes for segment in optimizer._segments if segment.is_arriving)


@pytest.mark.values
@pytest.mark.parametrize("tier", [None, "file"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_bits_of_the_plain_optimizer(name: str, micro_batches: int, tier: str | None) -> None:
    plain_model, model = net(), net()
    plain, optimizer = OPTIMIZERS[name](list(plain_model.parameters())), overlapping(model, name, tier=tier)
    for m, o in ((plain_model, plain), (model, optimizer)):
        for step in range(6):
            o.zero_grad()
            # Two more in one step, none in another, one parameter without a gradient in a third.
            for micro in range(micro_batches + 2 * (step == 2) - micro_batches * (step == 4)):
                m[2].weight.requires_grad_(step != 3)
                backward(m, 10 * step + micro)
            o.step()
            assert o is plain or arriving(optimizer) == 0
    assert_same_bits(weights(plain_model), weights(model), "weights")
    assert_same_bits(plain.state_dict()["state"], optimizer.state_dict()["state"], "state")
    assert optimizer.report().ahead_bytes > 0


@pytest.mark.values
@pytest.mark.parametrize("master", ["fp32", "residual"])
def test_masters_have_the_bits_of_separate_ones(master: str) -> None:
    plain_model, model = net(torch.bfloat16), net(torch.bfloat16)
    plain = SeparateMasters(OPTIMIZERS["adamw"](list(plain_model.parameters())))
    optimizer = overlapping(model, master=master)
    for m, o in ((plain_model, plain), (model, optimizer)):
        for step in range(5):
            o.zero_grad()
            backward(m, step)
            o.step()  # type: ignore[attr-defined]
    assert_same_bits(weights(plain_model), weights(model), "weights")


def test_steps_that_no_backward_told_of_are_counted() -> None:
    model = net()
    optimizer = overlapping(model)
    for step in range(4):
        optimizer.zero_grad()
        if step < 2:
            backward(model, step)
        else:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    (note,) = optimizer.report().notes
    assert note == "2 steps had no loads before them: too few gradients came in the backward before"


def test_the_first_window_is_on_its_way_when_backward_ends_and_nothing_is_after_a_step() -> None:
    model = net()
    optimizer = overlapping(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        came = arriving(optimizer)
        assert (came > 0) is (step > 0)
        assert came <= optimizer.report().window_bytes
        optimizer.step()
        assert arriving(optimizer) == 0
        assert optimizer.report().peak_bytes <= optimizer.report().window_bytes


@pytest.mark.values
def test_with_accumulation_loads_begin_in_the_last_backward_alone() -> None:
    model = net()
    optimizer = overlapping(model)
    for step in range(3):
        for micro in range(3):
            backward(model, micro)
            assert (arriving(optimizer) > 0) is (step > 0 and micro == 2)
        optimizer.step()
        optimizer.zero_grad()


def test_the_window_holds_whatever_was_loaded_for_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is left out of one step, so that what was loaded ahead is not what the next step begins with."""
    model = net()
    optimizer = overlapping(model)
    seen = []

    def leave(segment: HeldSegment) -> None:
        held = [one for one in optimizer._segments if one.is_arriving or one.is_resident or one.is_leaving]
        seen.append(sum(one.nbytes for one in held))
        leaves(segment)

    leaves = HeldSegment.leave
    backward(model, 0)
    optimizer.step()
    monkeypatch.setattr(HeldSegment, "leave", leave)
    for step, parameter in enumerate(model.parameters()):
        for wanted in (False, True):
            optimizer.zero_grad()
            parameter.requires_grad_(wanted)
            backward(model, step)
            optimizer.step()
            assert arriving(optimizer) == 0
    assert seen
    assert max(seen) <= optimizer.report().window_bytes


@pytest.mark.values
def test_what_was_loaded_for_gradients_that_are_thrown_away_leaves_again() -> None:
    plain_model, model = net(), net()
    plain, optimizer = OPTIMIZERS["adamw"](list(plain_model.parameters())), overlapping(model)
    for m, o in ((plain_model, plain), (model, optimizer)):
        for step in range(5):
            backward(m, step)
            if step != 3:
                o.step()
            o.zero_grad()
            if o is optimizer:
                assert arriving(optimizer) == 0
    assert_same_bits(weights(plain_model), weights(model))


@pytest.mark.values
@pytest.mark.parametrize("way", ["export", "import", "unwrap", "add_param_group"])
def test_state_is_whole_while_copies_run(way: str) -> None:
    """Read, replaced or given back before and after loads have begun."""
    ends = []
    for wraps in (False, True):
        model = net()
        inner = OPTIMIZERS["adamw"](list(model.parameters())[:-1])
        optimizer: Any = swap_optimizer(inner, swap_times=4, overlap=True) if wraps else inner
        saved: Any = None
        wrapped = optimizer  # which outlives what unwrap() does
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            if step in {1, 3}:
                if way == "export":
                    saved = through_file(optimizer.state_dict())["state"]
                elif way == "import":
                    optimizer.load_state_dict(through_file(optimizer.state_dict()))
                elif way == "unwrap" and wraps and step == 3:
                    optimizer = optimizer.unwrap()
                elif way == "add_param_group" and step == 1:
                    optimizer.add_param_group({"params": [list(model.parameters())[-1]]})
            optimizer.step()
        ends.append((weights(model), saved, optimizer.state_dict()["state"]))
        watched = any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
        assert watched is (wraps and wrapped is optimizer)
    assert_same_bits(*ends)


@pytest.mark.values
def test_a_store_that_fails_beside_forward_keeps_its_bytes_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model, model = net(), net()
    plain, optimizer = OPTIMIZERS["adamw"](list(plain_model.parameters())), overlapping(model, tier="file")
    for step in range(4):
        for m, o in ((plain_model, plain), (model, optimizer)):
            o.zero_grad()
            backward(m, step)
            o.step()
        if step == 1:
            behind = list(optimizer._around._behind)  # type: ignore[union-attr]
            assert behind
            out = behind[-1]._swap._out  # type: ignore[union-attr]
            monkeypatch.setattr(type(out), "wait", _fails_once(out, type(out).wait))
    assert_same_bits(weights(plain_model), weights(model))
    assert_same_bits(plain.state_dict()["state"], optimizer.state_dict()["state"])
    assert any("stayed on the device until the next one: the disk is gone" in n for n in optimizer.report().notes)


def _fails_once(chosen: Any, wait: Any) -> Any:
    failed = []

    def waits(copy: Any) -> None:
        if copy is chosen and not failed:
            failed.append(copy)
            wait(copy)
            raise TierError("the disk is gone")
        wait(copy)

    return waits


@pytest.mark.values
def test_without_memory_in_backward_the_step_loads_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model, model = net(), net()
    plain, optimizer = OPTIMIZERS["adamw"](list(plain_model.parameters())), overlapping(model)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(optimizer._around, "_start", full)
    for m, o in ((plain_model, plain), (model, optimizer)):
        for step in range(3):
            o.zero_grad()
            backward(m, step)
            o.step()
    assert_same_bits(weights(plain_model), weights(model))
    assert optimizer.report().ahead_bytes == 0
    assert optimizer.report().notes == ("the first loads could not begin in backward: no room",)


def test_it_dies_with_its_last_reference_and_its_hooks_go() -> None:
    model = net()
    optimizer = overlapping(model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    backward(model, 2)
    died, around = weakref.ref(optimizer), weakref.ref(optimizer._around)
    gc.disable()
    try:
        del optimizer
        assert died() is None
        assert around() is None  # type: ignore[misc]
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
    assert SwapManager().lower_bytes() == 0


def test_nothing_overlaps_where_nothing_moves() -> None:
    with pytest.raises(ConfigError, match="overlap=True with tier='device'"):
        overlapping(net(torch.bfloat16), master="residual", tier="device")


@pytest.mark.sim
def test_the_device_is_not_held_up_by_the_last_stores_nor_by_the_first_loads() -> None:
    """Seconds of whole steps on the simulated device, and its bytes once the stores are over."""
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    where = device.training_device()
    seconds, left = [], []
    for overlap in (False, True):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False, device=where) for _ in range(16)))
        optimizer = swap_optimizer(torch.optim.AdamW(model.parameters(), fused=True), swap_times=4, overlap=overlap)
        x = torch.ones(256, 512, device=where)
        before = device.allocated_bytes(where)
        for step in range(4):
            if step == 3:
                simulator.synchronize()
                simulator.reset()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x).sum()
        seconds.append(simulator.synchronize())
        left.append(device.allocated_bytes(where) - before)
        del optimizer, model
    assert seconds[1] < seconds[0]
    assert left[0] == left[1]


@pytest.mark.sim
def test_after_a_step_the_compute_is_done_before_the_stores_are() -> None:
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    where = device.training_device()
    rows = [nn.Parameter(torch.ones(1 << 20, device=where)) for _ in range(8)]
    for overlap in (False, True):
        optimizer = swap_optimizer(torch.optim.AdamW(rows, fused=True), swap_times=4, overlap=overlap)
        for _ in range(2):
            for row in rows:
                row.grad = torch.ones_like(row)
            simulator.synchronize()
            optimizer.step()
        torch.accelerator.current_stream().synchronize()
        computed = simulator.now()
        assert (simulator.synchronize() > computed) is overlap
        optimizer.unwrap()


@pytest.mark.sim
@pytest.mark.values
def test_the_step_may_run_on_a_stream_of_its_own() -> None:
    """What backward begins to load is allocated where it will be used and freed."""
    where = device.training_device()
    plain_model, model = net().to(where), net().to(where)
    plain, optimizer = OPTIMIZERS["adamw"](list(plain_model.parameters())), overlapping(model)
    side = device.new_stream(where)
    for step in range(4):
        for m, o in ((plain_model, plain), (model, optimizer)):
            o.zero_grad()
            backward(m, step)
            device.wait_stream(side, device.current_stream(where))
            with device.use_stream(side):
                o.step()
            device.wait_stream(device.current_stream(where), side)
            del m
    assert optimizer.report().ahead_bytes > 0
    assert_same_bits(weights(plain_model), weights(model))
