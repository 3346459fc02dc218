"""Laws of the host pool: buffers are reused, bounded, lent to one holder, and freed behind their readers."""

# Fixed seeds are the point.

from __future__ import annotations

import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from lowtide.device import pinned_footprint
from lowtide.errors import CapacityError, StateError
from lowtide.residency.pool import HostBuffer, HostPool, size_class

KIB = 1 << 10


def plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Event:
    """An event that counts how often the host waited for it, and may not be asked whether it is complete."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        """Count a wait of the host."""
        self.waited += 1

    def query(self) -> bool:
        """Refuse: the pool must not ask."""
        raise AssertionError("a host that asks frees nothing when it runs ahead")


def test_classes_waste_at_most_a_quarter_and_grow() -> None:
    dice = random.Random(0)
    for nbytes in [1, 4095, 4096, 4097, *(dice.randrange(1, 1 << dice.randrange(1, 40)) for _ in range(3000))]:
        held = size_class(nbytes)
        assert held >= nbytes
        assert held <= max(4096, nbytes * 5 // 4 + 4)
        assert size_class(held) == held
        assert held % 1024 == 0
        assert held < 1 << 20 or held % (64 * KIB) == 0
    classes = {size_class(nbytes) for nbytes in range(1 << 20, 2 << 20, 999)}
    assert sorted(classes) == [(4 + step) << 18 for step in range(5)]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 123_457])
def test_a_buffer_has_exactly_the_bytes_asked_for(nbytes: int) -> None:
    pool = HostPool(allocate=plain)
    buffer = pool.take(nbytes)
    assert buffer.nbytes == buffer.tensor.numel() == nbytes
    assert (buffer.tensor.dtype, buffer.tensor.dim()) == (torch.uint8, 1)
    assert buffer.capacity == size_class(nbytes)
    assert buffer.ready is None
    assert pool.live_bytes == pool.allocated_bytes == buffer.capacity


def test_an_idle_buffer_is_reused_with_its_event() -> None:
    pool = HostPool(allocate=plain)
    buffer = pool.take(5000)
    where = buffer.tensor.data_ptr()
    event = Event()
    pool.give(buffer, event)
    assert (pool.live_bytes, pool.idle_bytes) == (0, 5120)
    again = pool.take(4800)
    assert again.tensor.data_ptr() == where
    assert again.ready is event
    assert event.waited == pool.waits == 0
    assert pool.allocations == 1
    pool.give(again)
    assert pool.take(5120).ready is None


def test_the_longest_idle_buffer_goes_first() -> None:
    pool = HostPool(allocate=plain)
    events = [Event() for _ in range(3)]
    for buffer, event in zip([pool.take(KIB) for _ in events], events, strict=True):
        pool.give(buffer, event)
    assert [pool.take(KIB).ready for _ in events] == events


def test_the_closest_fit_is_lent_and_no_more_than_four_times_the_class() -> None:
    pool = HostPool(allocate=plain)
    held = [pool.take(nbytes) for nbytes in (64 * KIB, 40 * KIB, 12 * KIB)]
    for buffer in held:
        pool.give(buffer)
    assert [pool.take(10 * KIB).capacity for _ in range(3)] == [12 * KIB, 40 * KIB, 10 * KIB]
    assert pool.idle_bytes == 64 * KIB


def test_giving_back_twice_raises() -> None:
    pool = HostPool(allocate=plain)
    buffer = pool.take(10)
    pool.give(buffer)
    with pytest.raises(StateError, match="given back before"):
        pool.give(buffer)
    with pytest.raises(StateError, match="not yours any more"):
        _ = buffer.tensor
    lent = pool.take(10)
    with pytest.raises(StateError, match="given back before"):
        pool.give(buffer)
    assert lent.tensor.numel() == 10
    with pytest.raises(StateError, match="another pool"):
        HostPool(allocate=plain).give(lent)


def test_two_holders_never_share_memory() -> None:
    pool = HostPool(allocate=plain)
    dice = random.Random(1)
    live: list[HostBuffer] = []
    for _ in range(500):
        if live and dice.random() < 0.5:
            pool.give(live.pop(dice.randrange(len(live))))
        else:
            live.append(pool.take(dice.randrange(1, 40_000)))
        spans = sorted((buffer.tensor.data_ptr(), buffer.nbytes) for buffer in live)
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
        assert pool.live_bytes == sum(buffer.capacity for buffer in live)
        assert pool.allocated_bytes == pool.live_bytes + pool.idle_bytes


def allocations_over_steps(sizes: Callable[[random.Random, int], int], seed: int) -> tuple[int, int, HostPool]:
    """Run 250 steps of eight buffers each; returns the allocations after 50 steps and after all."""
    dice = random.Random(seed)
    pool = HostPool(allocate=plain)
    after_warm_up = 0
    for step in range(250):
        buffers = [pool.take(sizes(dice, layer)) for layer in range(8)]
        dice.shuffle(buffers)
        for buffer in buffers:
            pool.give(buffer)
        if step == 49:
            after_warm_up = pool.allocations
    return after_warm_up, pool.allocations, pool


def test_layers_whose_shapes_vary_by_a_fifth_stop_allocating_after_a_warm_up() -> None:
    for seed in range(6):
        warm, final, _ = allocations_over_steps(
            lambda dice, layer: int((layer + 1) * 128 * KIB * dice.uniform(0.8, 1.2)), seed
        )
        assert warm == final <= 10


def test_sizes_at_random_over_a_factor_of_four_hardly_allocate_after_a_warm_up() -> None:
    growth = 0
    for seed in range(10):
        warm, final, pool = allocations_over_steps(lambda dice, _: dice.randrange(256 * KIB, 1024 * KIB), seed)
        growth += final - warm
        assert final <= 2 * 8 + 2
        assert pool.allocated_bytes < 2 * 8 * 1024 * KIB
    assert growth <= 16_000 // 1000


def test_the_budget_frees_idle_buffers_before_it_refuses() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []
    totals: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        tensor = plain(nbytes)
        totals.append(nbytes + sum(storage.nbytes() for ref in made if (storage := ref()) is not None))
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    pool = HostPool(allocate=allocate, budget=64 * KIB)
    small = [pool.take(8 * KIB) for _ in range(4)]
    event = Event()
    for buffer in small[:3]:
        pool.give(buffer, event)
    large = pool.take(40 * KIB)
    assert (pool.live_bytes, pool.idle_bytes) == (48 * KIB, 16 * KIB)
    assert event.waited == pool.waits == 1
    assert totals == [8 * KIB, 16 * KIB, 24 * KIB, 32 * KIB, 64 * KIB]
    with pytest.raises(CapacityError, match=f"at least {64 * KIB + 1} bytes in total, got {64 * KIB} bytes"):
        pool.take(16 * KIB + 1)
    assert pool.live_bytes == 48 * KIB
    pool.give(large)
    assert pool.take(40 * KIB).capacity == 40 * KIB
    assert pool.allocations == len(totals) == 5


def test_at_the_budget_a_much_larger_idle_buffer_is_lent_rather_than_freed() -> None:
    pool = HostPool(allocate=plain, budget=64 * KIB)
    pool.give(pool.take(64 * KIB))
    assert pool.take(KIB).capacity == 64 * KIB
    assert pool.allocations == 1


def test_a_request_that_fits_only_without_rounding_is_served() -> None:
    pool = HostPool(allocate=plain, budget=33 * KIB)
    buffer = pool.take(33 * KIB)
    assert buffer.capacity == 33 * KIB
    pool.give(buffer)
    assert pool.take(32 * KIB + 1).capacity == 33 * KIB
    assert pool.allocations == 1


def test_the_budget_bounds_what_an_allocator_takes_that_rounds_up_itself() -> None:
    def footprint(nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()

    taken: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(footprint(nbytes))
        return plain(nbytes)

    pool = HostPool(allocate=allocate, budget=32 * KIB, footprint=footprint)
    buffer = pool.take(9 * KIB)
    assert buffer.capacity == pool.allocated_bytes == sum(taken) == 16 * KIB
    with pytest.raises(CapacityError, match=f"at least {48 * KIB} bytes in total"):
        pool.take(17 * KIB)
    pool.give(buffer)
    assert pool.take(15 * KIB).capacity == 16 * KIB  # what the rounding added is of use to another
    pool.take(16 * KIB)
    assert sum(taken) == pool.allocated_bytes == 32 * KIB


@pytest.mark.parametrize("kind", ["cuda", "xpu", "cpu"])
def test_the_footprint_of_pinned_memory_holds_the_request(kind: str) -> None:
    where = torch.device(kind)
    for nbytes in (0, 1, 2, 3, 4096, 4097, 5 << 20, 1 << 30, (1 << 30) + 1):
        held = pinned_footprint(nbytes, where)
        assert nbytes <= held <= max(2 * nbytes - 1, nbytes)
        assert pinned_footprint(held, where) == held


def test_trim_frees_idle_buffers_behind_their_readers() -> None:
    pool = HostPool(allocate=plain)
    kept, *others = [pool.take(nbytes) for nbytes in (8 * KIB, 8 * KIB, 20 * KIB)]
    memory = weakref.ref(others[1].tensor.untyped_storage())
    events = [Event(), Event()]
    for buffer, event in zip(others, events, strict=True):
        pool.give(buffer, event)
    del buffer, others
    assert memory() is not None
    assert pool.trim() == 28 * KIB
    assert [event.waited for event in events] == [1, 1]
    assert (pool.live_bytes, pool.idle_bytes) == (8 * KIB, 0)
    gc.collect()
    assert memory() is None
    assert pool.trim() == 0
    assert kept.tensor.numel() == 8 * KIB


def test_an_event_that_cannot_be_waited_for_is_not_freed_over() -> None:
    pool = HostPool(allocate=plain)
    pool.give(pool.take(KIB), object())
    with pytest.raises(StateError, match="synchronize"):
        pool.trim()
    assert pool.idle_bytes == 4 * KIB


def test_a_refused_allocation_is_tried_again_without_the_idle_buffers() -> None:
    refusals = [0]

    def allocate(nbytes: int) -> torch.Tensor:
        if nbytes > 16 * KIB and refusals[0]:
            refusals[0] -= 1
            raise RuntimeError("cannot pin")
        return plain(nbytes)

    pool = HostPool(allocate=allocate)
    pool.give(pool.take(8 * KIB))
    refusals[0] = 1
    assert pool.take(32 * KIB).capacity == 32 * KIB
    assert pool.idle_bytes == 0
    refusals[0] = 2
    with pytest.raises(CapacityError, match=f"{64 * KIB} bytes in total.*cannot pin"):
        pool.take(32 * KIB)
    refusals[0] = 0
    assert pool.live_bytes == 32 * KIB
    assert pool.take(32 * KIB).capacity == 32 * KIB


def test_what_allocate_returns_is_checked() -> None:
    for wrong in (torch.empty(64 * KIB), torch.empty(1, dtype=torch.uint8)):
        pool = HostPool(allocate=functools.partial(lambda tensor, _: tensor, wrong))
        with pytest.raises(StateError, match="allocate returned another tensor"):
            pool.take(8 * KIB)
        assert pool.allocated_bytes == 0
    with pytest.raises(StateError, match="nbytes >= 0"):
        HostPool(allocate=plain).take(-1)


def test_many_threads_take_and_give() -> None:
    pool = HostPool(allocate=plain, budget=4 << 20)
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for step in range(150):
            buffers = [pool.take(dice.randrange(1, 60_000)) for _ in range(3)]
            for buffer in buffers:
                buffer.tensor.fill_(seed)
            if any(int(buffer.tensor.min()) != seed or int(buffer.tensor.max()) != seed for buffer in buffers):
                wrong.append(f"{seed}/{step}")
            for buffer in buffers:
                pool.give(buffer)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert wrong == []
    assert pool.live_bytes == 0
    assert pool.allocated_bytes == pool.idle_bytes <= 4 << 20


def test_give_is_safe_inside_a_garbage_collection() -> None:
    """Holders die by the cycle collector, which may run while this very thread is inside the pool."""

    class Holder:
        def __init__(self, buffer: HostBuffer) -> None:
            self.me = self
            weakref.finalize(self, pool.give, buffer).atexit = False

    def allocate(nbytes: int) -> torch.Tensor:
        gc.collect(0)
        return plain(nbytes)

    pool = HostPool(allocate=allocate)
    for step in range(60):
        Holder(pool.take(1 + 5000 * (step % 7)))
    gc.collect()
    assert pool.live_bytes == 0
    assert pool.idle_bytes == pool.allocated_bytes > 0
