"""Copies to pinned memory, proved without an accelerator.

The carrier gets a device whose streams are queues. A copy runs at the *latest*
legal moment (when the host's own stream is ordered after it), what it will
write holds poison until then, and it holds neither side alive. Beside that,
every access is checked by happens-before: two that touch the same bytes, one of
them writing, must be ordered by events. So a wait that is left out shows either
as other bits or as a race.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Storage, SwapManager, SwapState, SwapTensor, checkpoint_wrapper, swap_wrapper
from lowtide.demo.model import GPT, Shape
from lowtide.errors import CapacityError
from lowtide.residency import copies
from lowtide.residency.copies import PinnedCarrier, Settings, Traffic

CPU = torch.device("cpu")
POISON = 0xFF  # as a float: NaN
Clock = dict["FakeStream", int]


class FakeStream:
    """A queue of copies, and what is known to have happened before its next one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def tick(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def learn(self, clock: Clock) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)


class FakeEvent:
    """A moment of a stream."""

    def __init__(self, owner: FakeDevice, stream: FakeStream, copies_before: int) -> None:
        self.owner = owner
        self.stream = stream
        self.clock = dict(stream.clock)
        self.copies = copies_before  # launched since the event before
        self.waits = 0  # by a stream that computes

    def synchronize(self) -> None:
        self.owner.catch_up(self.clock)


class Access:
    """One use of bytes ``[start, stop)`` by a stream."""

    def __init__(self, stream: FakeStream, time: int, start: int, nbytes: int, *, write: bool) -> None:
        self.stream, self.time, self.write = stream, time, write
        self.start, self.stop = start, start + nbytes

    def known_to(self, stream: FakeStream) -> bool:
        return self.stream is stream or stream.clock.get(self.stream, 0) >= self.time

    def conflicts(self, other: Access) -> bool:
        return (self.write or other.write) and self.start < other.stop and other.start < self.stop


class Task:
    """A copy that was launched and has not run; it holds neither side alive."""

    def __init__(self, device: FakeDevice, target: Tensor, source: Tensor) -> None:
        self.stream = device.using
        self.time = self.stream.tick()
        self.target, self.source = device.hold_weakly(target), device.hold_weakly(source)

    def run(self) -> None:
        target, source = self.target(), self.source()
        assert source is not None, "the source was freed before its copy ran"
        assert target is not None, "the target was freed before its copy ran"
        with torch.no_grad():
            PLAIN_COPY(target, source)


PLAIN_COPY = torch.Tensor.copy_


class FakeDevice:
    """Stands in for ``lowtide.device`` where the carrier looks for it."""

    def __init__(self) -> None:
        self.compute = FakeStream("compute")
        self.now = self.compute  # the stream that the host computes on
        self.using = self.compute
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.queue: list[Task] = []
        self.blocks: list[weakref.ref[Tensor]] = []
        self.open_accesses: list[Access] = []  # of copies, not yet known to every stream that computes
        self.touched: dict[int, Access] = {}  # by computing, newest per address
        self.launched = 0
        self.since_event = 0
        self.races: list[str] = []

    # ---- what the carrier calls -----------------------------------------------------------------

    def current_stream(self, _where: torch.device) -> FakeStream:
        return self.now

    def new_stream(self, _where: torch.device) -> FakeStream:
        self.streams.append(FakeStream(f"copy {len(self.streams)}"))
        return self.streams[-1]

    def pinned_footprint(self, nbytes: int, _where: torch.device) -> int:
        return nbytes

    def pinned_bytes(self, nbytes: int) -> Tensor:
        block = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.blocks.append(weakref.ref(block))
        return block

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        def launch(target: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
            assert non_blocking, "a copy that blocks the host"
            return self._launch(target, source)

        before, self.using = self.using, stream
        torch.Tensor.copy_ = launch  # type: ignore[method-assign]
        try:
            yield
        finally:
            del torch.Tensor.copy_
            self.using = before

    def record_event(self, stream: FakeStream) -> FakeEvent:
        self.events.append(FakeEvent(self, stream, self.since_event))
        self.since_event = 0
        return self.events[-1]

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.learn(event.clock)
        if stream is self.now:
            event.waits += 1
            self.catch_up(stream.clock)

    def wait_stream(self, stream: FakeStream, other: FakeStream) -> None:
        stream.learn(other.clock)

    # ---- how it runs ------------------------------------------------------------------------------

    def _launch(self, target: Tensor, source: Tensor) -> Tensor:
        task = Task(self, target, source)
        self.launched += 1
        self.since_event += 1
        for tensor, write in ((source, False), (target, True)):
            self._check(Access(task.stream, task.time, tensor.data_ptr(), tensor.numel(), write=write), keep=True)
        fresh = self._block_of(target) is None
        if fresh:
            # Allocated a moment ago where the host computes: whatever it computed before may have used these bytes.
            ordered = task.stream.clock.get(self.now, 0) >= self.now.clock.get(self.now, 0)
            if not ordered:
                self.races.append(f"{task.stream.name} writes to memory that {self.now.name} may still use")
            target.fill_(POISON)
        self.queue.append(task)
        return target

    def catch_up(self, clock: Clock) -> None:
        """Run every copy that the clock covers, in the order of their launches."""
        due = [task for task in self.queue if clock.get(task.stream, 0) >= task.time]
        self.queue = [task for task in self.queue if clock.get(task.stream, 0) < task.time]
        for task in due:
            task.run()

    def hold_weakly(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """A pinned buffer lives as long as its block in the pool, anything else as long as somebody holds it."""
        block = self._block_of(tensor)
        if block is None:
            return weakref.ref(tensor)
        nbytes = tensor.numel()

        def view() -> Tensor | None:
            memory = block()
            return None if memory is None else memory[:nbytes]

        return view

    def _block_of(self, tensor: Tensor) -> weakref.ref[Tensor] | None:
        for block in self.blocks:
            memory = block()
            if memory is not None and memory.data_ptr() == tensor.data_ptr():
                return block
        return None

    def _check(self, access: Access, *, keep: bool) -> None:
        for other in [*self.open_accesses, *self.touched.values()]:
            if access.conflicts(other) and not other.known_to(access.stream):
                self.races.append(f"{access.stream.name} races with {other.stream.name} on {access.start:#x}")
        if keep:
            self.open_accesses.append(access)

    def computes(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """The host computes on its present stream; what it touches must not be in the hands of a copy."""
        time = self.now.tick()
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                access = Access(self.now, time, storage.data_ptr(), storage.nbytes(), write=write)
                self._check_against_copies(access)
                known = self.touched.get(access.start)
                access.write = write or (known is not None and known.write and known.stop == access.stop)
                self.touched[access.start] = access

    def _check_against_copies(self, access: Access) -> None:
        # What this stream is ordered after can race with nothing it does from now on.
        self.open_accesses = [a for a in self.open_accesses if not a.known_to(self.now)]
        for other in self.open_accesses:
            if access.conflicts(other):
                self.races.append(f"{access.stream.name} races with {other.stream.name} on {access.start:#x}")

    def settle(self) -> None:
        """The end of a program: what was never waited for runs now, and finds its two sides alive or not."""
        queue, self.queue = self.queue, []
        for task in queue:
            task.run()


class Computing(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells the fake device what every operator of the host's own reads and writes."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = [
            args[i] for i, a in enumerate(func._schema.arguments) if i < len(args) and a.alias_info and a.is_write
        ]
        self.fake.computes(_tensors([*args, *kwargs.values()]), _tensors([out]) + _tensors(written))
        return out


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The manager moves CPU tensors by a pinned carrier over the fake device."""
    device = FakeDevice()
    monkeypatch.setattr(copies, "device", device)
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager._carriers["cpu"] = PinnedCarrier(CPU, manager.settings, manager.traffic)
    yield device
    device.settle()
    assert not device.races, device.races[:5]
    assert device.launched == sum(event.copies for event in device.events)


def carrier(host_bytes: int | None = None) -> PinnedCarrier:
    return PinnedCarrier(CPU, Settings(host_bytes=host_bytes), Traffic())


# ---- whole steps ----------------------------------------------------------------------------------------

SHAPE = Shape(layers=4, heads=2, width=16, context=8, vocabulary=16)


def _learned(model: GPT) -> None:
    for layer in model.layers:
        checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
    lowtide.auto(model)


def _chained(model: GPT) -> None:
    layers = list(model.layers)
    for layer in layers:
        checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
    for first, second in itertools.pairwise(layers):
        SwapManager().set_forward_prefetch_layer(first, second)


def _everything(model: GPT) -> None:
    for layer in model.layers:
        swap_wrapper(layer)
    lowtide.auto(model)


def _narrow(model: GPT) -> None:
    SwapManager().configure(in_flight_bytes=2000)
    _everything(model)


def _far(model: GPT) -> None:
    SwapManager().configure(prefetch=3)
    _everything(model)


def _called(model: GPT) -> None:
    for layer in model.layers:
        checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True, recompute="call")
    lowtide.auto(model)


MODES = {
    "learned": _learned,
    "chained": _chained,
    "everything": _everything,
    "narrow": _narrow,
    "far": _far,
    "call": _called,
}


def _train(model: nn.Module, order: str) -> list[Tensor | None]:
    torch.manual_seed(2)
    batches = [torch.randint(0, 16, (2, 8)) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor | None] = []
    for _ in range(2):
        losses = []
        for batch in batches:
            loss = model(batch).square().mean()
            losses.append(loss)
            seen.append(loss.detach().clone())
            if order == "one by one":
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        del losses, loss
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["one by one", "interleaved"])
def test_whole_steps_are_bit_equal_and_every_copy_has_one_wait(mode: str, order: str, fake: FakeDevice) -> None:
    plain = GPT(SHAPE)
    other = copy.deepcopy(plain)
    MODES[mode](other)
    want = _train(plain, order)
    with Computing(fake):
        got = _train(other, order)
    assert all(torch.equal(w, g) if w is not None and g is not None else w is g for w, g in zip(want, got, strict=True))
    assert fake.launched > 20
    assert not fake.queue
    assert [event.waits for event in fake.events] == [event.copies for event in fake.events]
    assert SwapManager().lower_bytes() == 0
    traffic = SwapManager().traffic
    assert traffic.out_bytes >= traffic.in_bytes > 0
    assert traffic.waits == 0  # the host never waits for a copy


def test_an_evaluation_and_a_dropped_graph_leave_no_copy_unordered(fake: FakeDevice) -> None:
    model = GPT(SHAPE)
    _everything(model)
    batch = torch.randint(0, 16, (2, 8))
    with Computing(fake):
        for _ in range(2):
            loss = model(batch).square().mean()
            del loss  # without a backward
            with torch.no_grad():
                model(batch)
            model(batch).square().mean().backward()
    assert not fake.queue
    assert [event.waits for event in fake.events] == [event.copies for event in fake.events]
    assert SwapManager().lower_bytes() == 0


# ---- one tensor -----------------------------------------------------------------------------------------


def test_nothing_is_read_before_its_copy_and_memory_is_freed_after_it(fake: FakeDevice) -> None:
    tensor = torch.randn(1000)
    want = tensor.clone()
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    swap = SwapTensor(tensor)
    del tensor
    swap.async_offload()
    assert len(fake.queue) == 1 and not storage.expired()
    swap.wait_offload()
    assert not fake.queue, "the compute was not ordered after the copy"
    assert storage.expired(), "the device's bytes are still there"
    swap.async_load()
    assert swap.state is SwapState.H2D and len(fake.queue) == 1
    swap.wait_load()
    assert torch.equal(swap.get_val(), want)
    assert [event.waits for event in fake.events] == [1, 1]


def test_every_verb_waits_by_itself_and_not_by_what_dies_with_it(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that dies unwaited waits too; here it must not need to."""
    monkeypatch.delattr(copies._StreamCopy, "__del__")
    for launches in (1, 2, 3, 4):
        tensor = torch.randn(100)
        swap = SwapTensor(tensor.clone())
        swap.async_offload()
        if launches > 1:
            swap.wait_offload()
        if launches > 2:
            swap.async_load()
        if launches > 3:
            swap.wait_load()
        assert torch.equal(swap.bring_back("here"), tensor)
        assert not fake.queue
    assert [event.waits for event in fake.events] == [event.copies for event in fake.events]


def test_a_tensor_that_is_needed_while_it_leaves_or_comes_is_waited_for(fake: FakeDevice) -> None:
    tensor = torch.randn(100)
    for launches in (1, 2, 3):
        swap = SwapTensor(tensor.clone())
        swap.async_offload()
        if launches > 1:
            swap.wait_offload()
        if launches > 2:
            swap.async_load()
        assert torch.equal(swap.bring_back("here"), tensor)
        assert swap.state is SwapState.DEVICE
        assert not fake.queue
    assert [event.waits for event in fake.events] == [event.copies for event in fake.events]


@pytest.mark.parametrize("state", ["leaving", "coming"])
def test_a_tensor_dropped_in_flight_keeps_both_sides_until_the_compute_is_ordered_after_it(
    state: str, fake: FakeDevice
) -> None:
    swap = SwapTensor(torch.randn(100))
    swap.async_offload()
    if state == "coming":
        swap.wait_offload()
        swap.async_load()
    assert len(fake.queue) == 1
    del swap
    assert not fake.queue
    assert SwapManager().lower_bytes() == 0
    assert [event.waits for event in fake.events] == [1] * len(fake.events)


def test_a_batch_has_one_event_and_one_wait_per_tensor(fake: FakeDevice) -> None:
    tensors = [torch.randn(n) for n in (10, 200, 3000)]
    want = [t.clone() for t in tensors]
    storage = Storage("layer")
    for tensor in tensors:
        storage.swap(SwapTensor(tensor))
    del tensors, tensor
    storage.launch_offload()
    storage.wait_offload()
    storage.launch_load()
    storage.wait_load()
    assert [event.copies for event in fake.events] == [3, 3]
    assert [event.waits for event in fake.events] == [3, 3]
    assert all(torch.equal(t.get_val(), w) for t, w in zip(storage.tensors, want, strict=True))


def test_a_copy_waits_for_what_was_computed_before_it(fake: FakeDevice) -> None:
    with Computing(fake):
        tensor = torch.ones(100) * 3
        swap = SwapTensor(tensor)
        swap.async_offload()
    (stream,) = fake.streams
    assert stream.clock[fake.compute] == fake.compute.clock[fake.compute]
    swap.wait_offload()


def test_streams_are_one_a_direction_and_a_given_one_is_used(fake: FakeDevice) -> None:
    own = FakeStream("mine")
    first, second = SwapTensor(torch.randn(10)), SwapTensor(torch.randn(10))
    first.async_offload(own)
    assert fake.queue[0].stream is own and not fake.streams
    second.async_offload()
    first.wait_offload()
    second.wait_offload()
    first.async_load(own)
    second.async_load()
    assert [task.stream for task in fake.queue] == [own, fake.streams[1]]
    first.wait_load()
    second.wait_load()
    assert len(fake.streams) == 2


# ---- several streams that compute ----------------------------------------------------------------------


def _one_buffer_for_two(fake: FakeDevice, between: Callable[[], None]) -> None:
    """A buffer goes from a tensor of one compute stream to a tensor of another, which knows nothing of the first."""
    first = SwapTensor(torch.randn(100))
    first.async_offload()
    first.wait_offload()
    first.async_load()
    first.wait_load()  # gives the buffer back with the event of its way up
    between()
    fake.now = FakeStream("another compute")
    second = SwapTensor(torch.randn(100))
    second.async_offload()
    second.wait_offload()
    second.async_load()
    second.wait_load()


@pytest.mark.cpu
def test_a_host_buffer_is_reused_only_after_its_last_copy(fake: FakeDevice) -> None:
    _one_buffer_for_two(fake, lambda: None)
    assert SwapManager().carrier_for(CPU).pool.allocations == 1


def test_a_buffer_that_was_taken_and_never_used_passes_its_event_on(fake: FakeDevice) -> None:
    """Where one buffer of a batch is refused, those that were taken go back with the event they came with."""
    manager = SwapManager()
    pinned = PinnedCarrier(CPU, Settings(host_bytes=8192), manager.traffic)
    manager._carriers["cpu"] = pinned

    def refused() -> None:
        with pytest.raises(CapacityError):
            pinned.copy_out([torch.zeros(4000, dtype=torch.uint8), torch.zeros(9000, dtype=torch.uint8)])
        assert pinned.live_bytes() == 0

    _one_buffer_for_two(fake, refused)
    assert pinned.pool.allocations == 1


def test_a_load_from_another_stream_waits_for_the_way_out(fake: FakeDevice) -> None:
    want = torch.randn(100)
    swap = SwapTensor(want.clone())
    swap.async_offload()
    swap.wait_offload()
    fake.now = FakeStream("another compute")
    swap.async_load()
    swap.wait_load()
    assert torch.equal(swap.get_val(), want)


def test_a_buffer_is_freed_only_after_its_last_copy(fake: FakeDevice) -> None:
    """Trimming the pool blocks the host until the event of each buffer, and only then."""
    pinned = carrier()
    source = torch.zeros(5000, dtype=torch.uint8)
    ((slot, way_out),) = pinned.copy_out([source])
    pinned.release(slot, [way_out])
    assert len(fake.queue) == 1
    pinned.close()
    assert not fake.queue
    assert pinned.pool.waits == 1
    way_out.wait()
    assert pinned.pool.allocated_bytes == 0


def test_a_batch_that_is_refused_gives_back_what_it_took(fake: FakeDevice) -> None:
    pinned = carrier(host_bytes=8192)
    with pytest.raises(CapacityError, match="bytes"):
        pinned.copy_out([torch.zeros(4096, dtype=torch.uint8) for _ in range(3)])
    assert pinned.live_bytes() == 0
    assert not fake.queue


# ---- the fake itself -----------------------------------------------------------------------------------------


@pytest.mark.values
def test_the_fake_notices_a_missing_wait() -> None:
    fake = FakeDevice()
    out = fake.new_stream(CPU)
    source, target = torch.zeros(8, dtype=torch.uint8), fake.pinned_bytes(8)
    fake.computes([], [source])
    with fake.use_stream(out):
        target.copy_(source, non_blocking=True)
    assert any("races" in race for race in fake.races), "the copy was not ordered after the compute"
    assert target.tolist() == [POISON] * 8
    fake.races.clear()
    fake.computes([], [source])
    assert fake.races, "the compute overwrote what the copy still reads"
    event = fake.record_event(out)
    fake.wait_event(fake.now, event)
    assert target.tolist() == [0] * 8 and event.waits == 1


def test_the_fake_notices_a_source_that_died() -> None:
    fake = FakeDevice()
    source, target = torch.zeros(8, dtype=torch.uint8), fake.pinned_bytes(8)
    with fake.use_stream(fake.new_stream(CPU)):
        target.copy_(source, non_blocking=True)
    del source
    with pytest.raises(AssertionError, match="source was freed"):
        fake.settle()
    assert torch.Tensor.copy_ is PLAIN_COPY


@pytest.mark.sim
def test_the_lower_tier_lies_on_the_host_whatever_the_default_device() -> None:
    torch.set_default_device("sim")
    try:
        assert lowtide.device.pinned_bytes(4096).device.type == "cpu"
        before = torch.accelerator.memory_allocated()
        tensor = SwapTensor(torch.randn(300, 300))
        tensor.async_offload()
        tensor.wait_offload()
        assert torch.accelerator.memory_allocated() == before
    finally:
        torch.set_default_device(None)
