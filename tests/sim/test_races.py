"""Every kind of missing order is reported, with both places; what is ordered is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide.sim
from lowtide.sim import Race, Simulator

pytestmark = pytest.mark.sim
N = 1 << 16


@pytest.fixture
def sim() -> Simulator:
    found = lowtide.sim.active()
    assert found is not None
    found.set(compute=True, checks=True, poison=True)
    found.reset()
    return found


def _one(sim: Simulator, kind: str) -> Race:
    (race,) = sim.races()
    assert race.kind == kind
    return race


def _now() -> torch.Stream:
    return torch.accelerator.current_stream()


def test_reading_what_another_stream_writes(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim").add_(1)
    with side:
        x * 2
    race = _one(sim, "read after write")
    assert race.first.operator == "add"
    assert race.second.operator == "mul"
    assert race.first.stream != race.second.stream
    for access in (race.first, race.second):
        assert Path(__file__).name in access.stack[0]


def test_waiting_for_the_stream_orders(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim")
    side.wait_stream(_now())
    with side:
        y = x * 2
    _now().wait_stream(side)
    y + x
    y.record_stream(_now())
    assert not sim.races()


def test_an_event_orders_what_was_queued_before_it_and_nothing_later(sim: Simulator) -> None:
    side, x, y = torch.Stream("sim"), torch.zeros(N, device="sim"), torch.zeros(N, device="sim")
    event = _now().record_event()
    y.add_(1)
    side.wait_event(event)
    with side:
        x * 2
    assert not sim.races()
    with side:
        y * 2
    _one(sim, "read after write")


def test_waiting_on_the_host_orders_what_is_launched_later(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim")
    torch.accelerator.synchronize()
    with side:
        x * 2
    assert not sim.races()


def test_overwriting_what_another_stream_reads(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim")
    side.wait_stream(_now())
    with side:
        x * 2
    x.add_(1)
    assert _one(sim, "write after read").first.operator == "mul"


def test_freeing_what_another_stream_uses(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim")
    side.wait_stream(_now())
    with side:
        x * 2
    del x
    race = _one(sim, "freed in use")
    assert race.first.operator == "mul"
    assert Path(__file__).name in race.second.stack[0]


@pytest.mark.parametrize("order", ["record_stream", "wait_stream", "synchronize"])
def test_freeing_is_right_once_the_owner_or_the_host_is_ordered_after_it(sim: Simulator, order: str) -> None:
    side, x = torch.Stream("sim"), torch.zeros(N, device="sim")
    side.wait_stream(_now())
    with side:
        x * 2
    if order == "record_stream":
        x.record_stream(side)
    elif order == "wait_stream":
        _now().wait_stream(side)
    else:
        side.synchronize()
    del x
    assert not sim.races()


def test_the_host_reading_a_copy_that_has_not_arrived(sim: Simulator) -> None:
    x, host = torch.ones(N, device="sim"), torch.empty(N, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host[0].isnan()
    race = _one(sim, "host access during a copy to the host")
    assert race.first.operator == "copy to host"
    assert Path(__file__).name in race.second.stack[0]
    torch.accelerator.synchronize()
    assert torch.equal(host, torch.ones(N))
    assert len(sim.races()) == 1


def test_numpy_is_the_host_too(sim: Simulator) -> None:
    x, host = torch.ones(N, device="sim"), torch.empty(N, pin_memory=True)
    view = host.numpy()
    host.copy_(x, non_blocking=True)
    view.sum()
    _one(sim, "host access during a copy to the host")


def test_the_host_writing_what_a_copy_still_reads(sim: Simulator) -> None:
    host = torch.ones(N, pin_memory=True)
    x = torch.empty(N, device="sim")
    x.copy_(host, non_blocking=True)
    assert host[0] == 1  # reading is right
    host[0] = 7
    _one(sim, "host write during a copy to the device")


def test_the_host_may_do_all_once_it_has_waited(sim: Simulator) -> None:
    host, x = torch.ones(N, pin_memory=True), torch.ones(N, device="sim")
    x.copy_(host, non_blocking=True)
    event = _now().record_event()
    event.synchronize()
    host.fill_(2)
    host.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    assert host.sum() == N
    assert not sim.races()


def test_what_was_copied_is_nan_until_the_reader_is_ordered_after_it(sim: Simulator) -> None:
    host, x, side = torch.ones(N, pin_memory=True), torch.empty(N, device="sim"), torch.Stream("sim")
    side.wait_stream(_now())
    with side:
        x.copy_(host, non_blocking=True)
    early = x * 1
    _now().wait_stream(side)
    late = x * 1
    torch.accelerator.synchronize()
    assert early.isnan().all()
    assert torch.equal(late.cpu(), torch.ones(N))
    _one(sim, "read after write")


def test_a_pinned_buffer_that_is_used_again_too_early(sim: Simulator) -> None:
    host, first, second = torch.empty(N, pin_memory=True), torch.ones(N, device="sim"), torch.empty(N, device="sim")
    out, inward = torch.Stream("sim"), torch.Stream("sim")
    out.wait_stream(_now())
    with out:
        host.copy_(first, non_blocking=True)
    inward.wait_stream(_now())
    with inward:
        second.copy_(host, non_blocking=True)
    _one(sim, "read after write")
    torch.accelerator.synchronize()


def test_backward_is_ordered_after_its_forward_on_another_stream(sim: Simulator) -> None:
    side, weight = torch.Stream("sim"), torch.ones(N, device="sim", requires_grad=True)
    x = torch.ones(N, device="sim")
    side.wait_stream(_now())
    with side:
        loss = (x * weight).exp().sum()
    loss.backward()
    _now().wait_stream(side)
    assert not sim.races()


def test_a_race_in_backward_names_the_node_and_the_line_of_its_forward(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.ones(N, device="sim", requires_grad=True)
    factor = torch.ones(N, device="sim")
    loss = (x * factor).sum()
    torch.accelerator.synchronize()
    with side:
        factor.data.add_(1)  # no order, and no version that autograd could compare
    loss.backward()
    race = _one(sim, "read after write")
    assert race.second.stack[0] == "backward of MulBackward0"
    assert Path(__file__).name in race.second.stack[1]
    torch.accelerator.synchronize()


def test_attention_reads_its_mask_in_both_directions(sim: Simulator) -> None:
    q, k, v = (torch.ones(1, 2, 8, 8, device="sim", requires_grad=True) for _ in range(3))
    host, mask = torch.zeros(8, 8, pin_memory=True), torch.zeros(8, 8, device="sim")
    loss = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()
    torch.accelerator.synchronize()
    with torch.Stream("sim"):
        mask.data.copy_(host, non_blocking=True)  # no order, and the mask is NaN until there is one
    loss.backward()
    assert any(race.second.operator.endswith("_backward") for race in sim.races())
    assert q.grad is not None
    assert q.grad.isnan().any()
    torch.accelerator.synchronize()
