"""Gradients in host memory: what a thread does beside backward has the bits of what is done when it is asked for."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import device
from lowtide.optim.cpu import cpu_optimizer
from lowtide.optim.host_gradient import BesideBackward, HostGradient

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights


class Gate:
    """An event of a copy that arrives when the test says so."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.waited = threading.Event()
        self.fault = fault

    def synchronize(self) -> None:
        self.waited.set()
        assert self.opened.wait(30)
        fault, self.fault = self.fault, None  # once: who has not heard of it does not hear of it again
        if fault is not None:
            raise fault


class Lane:
    """Copies arrive where they go when their gate is opened, and not before."""

    def __init__(self, *, opened: bool = True, fault: Exception | None = None) -> None:
        self.opened, self.fault = opened, fault
        self.gates: list[Gate] = []

    def copy_down(self, source: Tensor, row: Tensor) -> Any:
        row.copy_(source)
        gate = Gate(self.fault)
        self.gates.append(gate)
        if self.opened:
            gate.opened.set()
        return gate


def gradient(beside: BesideBackward | None, dtype: torch.dtype = torch.bfloat16) -> HostGradient:
    like = torch.empty(5, 300, dtype=dtype, device="cpu")
    return HostGradient(like, torch.empty(1500, dtype=dtype, device="cpu"), strides=(300, 1), beside=beside)


def row(number: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator(device="cpu").manual_seed(number)
    return torch.randn(1500, generator=draw, device="cpu").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clips", [False, True])
def test_whatever_number_of_backwards_a_step_has_the_sums_and_norms_have_the_same_bits(
    dtype: torch.dtype, *, clips: bool
) -> None:
    ends, jobs = [], []
    for beside in (None, BesideBackward()):
        one = gradient(beside, dtype)
        found = []
        for step, count in enumerate([1, 3, 3, 2, 4, 1, 3]):
            for micro in range(count):
                one.arrive(row(10 * step + micro, dtype), Lane())
                if clips and micro == 1:
                    one.scale(torch.tensor(0.3, device="cpu"))
            if clips:
                found += [one.norm(2.0), one.norm(float("inf"))]
                one.scale(torch.tensor(0.7, device="cpu"))
                found.append(one.norm(2.0))
            found.append(one.value().clone())
            one.used()
            assert not one.pending
        ends.append(found)
        jobs.append(0 if beside is None else beside.jobs)
    assert_same_bits(*ends)
    assert jobs[0] == 0
    assert jobs[1] >= 5


def test_a_gradient_that_another_will_be_added_to_is_added_beside_and_the_last_of_a_step_is_measured_there() -> None:
    beside = BesideBackward()
    one = gradient(beside)
    for count in (3, 3):
        for number in range(count):
            one.arrive(row(number), Lane())
        one.norm(2.0)
        one.used()
    # The first step cannot know. In the second, two are added and the norm that the first asked for is ready.
    assert beside.jobs == 3


def test_backward_goes_on_while_a_gradient_is_on_its_way_and_who_asks_for_it_waits() -> None:
    one = gradient(BesideBackward())
    for _ in range(2):
        one.arrive(row(0), Lane())
    one.used()
    closed = Lane(opened=False)
    one.arrive(row(1), closed)  # returns, with its copy under way and an addition that waits for it
    (gate,) = closed.gates
    assert gate.waited.wait(30)
    assert one.pending
    asked: list[Tensor] = []
    reader = threading.Thread(target=lambda: asked.append(one.value().clone()))
    reader.start()
    reader.join(0.05)
    assert not asked
    gate.opened.set()
    reader.join(30)
    assert_same_bits(row(1).float(), asked[0])


@pytest.mark.parametrize("use", ["value", "norm", "arrive", "whole", "scale", "used"])
def test_what_goes_wrong_beside_is_raised_to_who_uses_the_gradient_next(use: str) -> None:
    one = gradient(BesideBackward())
    for _ in range(2):
        one.arrive(row(0), Lane())
    one.used()
    one.arrive(row(1), Lane(fault=RuntimeError("the link is down")))
    call = {
        "value": one.value,
        "norm": lambda: one.norm(2.0),
        "arrive": lambda: one.arrive(row(2), Lane()),
        "whole": one.whole,
        "scale": lambda: one.scale(torch.tensor(1.0, device="cpu")),
        "used": one.used,
    }[use]
    with pytest.raises(RuntimeError, match="the link is down"):
        call()


def test_norms_do_not_depend_on_the_thread_that_takes_them() -> None:
    before = torch.get_num_threads()
    like = torch.empty(1 << 20, device="cpu")
    values = torch.randn(1 << 20, generator=torch.Generator(device="cpu").manual_seed(0), device="cpu")
    try:
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            beside = BesideBackward()
            beside.kinds.add(2.0)
            one = HostGradient(like, torch.empty_like(like), strides=(1,), beside=beside)
            one.arrive(values, Lane())
            norm = one.norm(2.0)
            assert beside.jobs == 1
            assert_same_bits(torch.linalg.vector_norm(values), norm)
    finally:
        torch.set_num_threads(before)


@pytest.mark.sim
@pytest.mark.values
def test_an_optimizer_of_a_device_adds_beside_and_its_thread_ends_with_it() -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("lowtide-gradients")}

    others, where = threads(), device.training_device()
    model, plain_model = net().to(where), net().to(where)
    optimizer = cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())), grad_offload=True)
    plain = OPTIMIZERS["sgd"](list(plain_model.parameters()))
    for m, o in ((plain_model, plain), (model, optimizer)):
        for step in range(3):
            o.zero_grad()
            for micro in range(3):
                backward(m, 10 * step + micro)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            o.step()
    assert_same_bits(weights(plain_model), weights(model))
    # Two of three backwards of the second step and of the third, and six norms of each.
    assert optimizer._beside.jobs == 6 * 3 * 2
    own = threads() - others
    assert len(own) == 1
    died = weakref.ref(optimizer)
    del optimizer, o
    assert died() is None
    own.pop().join(30)
    assert not threads() - others


@pytest.mark.parametrize("way", ["for_step", "hand_over"])
def test_a_step_takes_a_gradient_when_nothing_beside_works_on_it(way: str) -> None:
    beside = BesideBackward()
    one, lane = gradient(beside), Lane(opened=False)
    beside.kinds.add(2.0)
    one.arrive(row(1), lane)
    assert lane.gates[0].waited.wait(30)  # the norm is being taken
    opener = threading.Timer(0.2, lane.gates[0].opened.set)
    opener.start()
    one.for_step() if way == "for_step" else one.hand_over(Gate())  # type: ignore[arg-type]
    assert lane.gates[0].opened.is_set()
    assert 2.0 in one._norms
    opener.join()
