"""The memory curve is exact to the byte: every expected figure here is a sum of tensor sizes, never a tolerance."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from lowtide.measure import memory_curve

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="sizes are those of the CPU allocator")

MIB = 1 << 20


def test_two_tensors_alive_at_once_are_added() -> None:
    held: list[torch.Tensor] = []
    curve = memory_curve(lambda: held.extend((torch.empty(MIB), torch.empty(3 * MIB, dtype=torch.uint8))))
    assert curve.points[0] == (0.0, 0)
    assert [size for _, size in curve.points[1:]] == [4 * MIB, 7 * MIB]
    assert curve.peak_bytes == curve.end_bytes == 7 * MIB


def test_a_released_tensor_is_subtracted_and_the_peak_is_not_the_sum() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        return torch.empty(2 * MIB, dtype=torch.uint8)

    curve = memory_curve(call)
    assert [size for _, size in curve.points] == [0, MIB, 0, 2 * MIB, 0]
    assert curve.peak_bytes == 2 * MIB
    assert curve.end_bytes == 0


def test_views_and_operators_are_counted_once() -> None:
    def call() -> None:
        base = torch.ones(256, 256)
        view = base.t()[::2].unsqueeze(0).expand(8, -1, -1)
        total = view.contiguous()
        del base, view, total

    expected = 256 * 256 * 4
    curve = memory_curve(call)
    assert [size for _, size in curve.points] == [0, expected, 5 * expected, 4 * expected, 0], (
        "the view keeps its base alive; both go before the copy"
    )


def test_a_resize_holds_old_and_new_for_a_moment() -> None:
    held: list[torch.Tensor] = []

    def call() -> None:
        tensor = torch.empty(1000, dtype=torch.uint8)
        tensor.untyped_storage().resize_(5000)
        tensor.untyped_storage().resize_(0)
        held.append(tensor)

    curve = memory_curve(call)
    assert curve.peak_bytes == 6000
    assert curve.end_bytes == 0


def test_a_release_of_older_memory_needs_a_warmup() -> None:
    model = nn.Linear(64, 32, bias=False)
    inputs = torch.ones(8, 64)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    step()
    gradient = 64 * 32 * 4
    assert memory_curve(step, warmup=0).end_bytes == gradient, "the profiler cannot know the older gradient's size"
    assert memory_curve(step, warmup=1).end_bytes == 0


def test_backward_is_part_of_the_curve_and_leaves_exactly_the_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    inputs = torch.randn(32, 64)

    def step() -> None:
        model(inputs).square().mean().backward()

    curve = memory_curve(step)
    assert curve.end_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert curve.peak_bytes > curve.end_bytes
    model.zero_grad()
    again = memory_curve(step)
    assert [size for _, size in again.points] == [size for _, size in curve.points], "the same step, the same bytes"


def test_other_threads_and_later_work_are_not_in_the_curve() -> None:
    def call() -> None:
        worker = threading.Thread(target=torch.empty, args=(MIB,))
        worker.start()
        worker.join()

    assert memory_curve(call).peak_bytes == 0


def test_phases_carry_the_callers_outermost_names_in_order() -> None:
    def call() -> None:
        with record_function("forward"), record_function("inside"):
            tensor = torch.empty(MIB, dtype=torch.uint8)
        with record_function("backward"):
            del tensor

    curve = memory_curve(call, warmup=2)
    assert [phase.name for phase in curve.phases] == ["forward", "backward"]
    forward, backward = curve.phases
    (allocated, _), (released, _) = curve.points[1:]
    assert forward.start <= allocated <= forward.end <= backward.start <= released <= backward.end


def test_an_exception_in_the_call_reaches_the_caller_and_ends_the_profiler() -> None:
    def call() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        memory_curve(call)
    assert memory_curve(lambda: torch.empty(8, dtype=torch.uint8)).peak_bytes == 8
