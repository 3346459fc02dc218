"""The host pool: (pinned) host buffers that are handed out, given back and handed out again.

Pinning costs about a millisecond a megabyte, so a buffer is made once and kept.
Requests are rounded up to a size class, so that shapes which change from step
to step (packing, mixtures of experts) meet a buffer that is there already.

Laws:

1. Allocated bytes, those of the allocator's own rounding included, never exceed the budget; idle buffers are freed
   before a request is refused.
2. A buffer is lent to one holder at a time; giving it back twice raises.
3. A buffer comes back with the event of its last reader. The pool never asks
   whether that event is complete (a host that runs ahead would never see it):
   the next taker orders its copy behind it, and only freeing waits for it.
4. ``give`` takes no lock, because a garbage collection may call it in the midst of anything else.

It must never copy, pin or record anything itself: ``allocate`` and the events belong to the caller.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from lowtide.errors import CapacityError, StateError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HostBuffer", "HostPool", "size_class"]

SMALLEST = 4096
_ROOMY = 4


def size_class(nbytes: int) -> int:
    """Round up to 4, 5, 6 or 7 times a power of two: at most a quarter is wasted above 4 KiB.

    >>> [size_class(n) for n in (1, 4097, 1 << 20, (1 << 20) + 1)]
    [4096, 5120, 1048576, 1310720]
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class _Block:
    """The memory behind a buffer, and the event after which it may be written again."""

    __slots__ = ("capacity", "memory", "ready")

    def __init__(self, memory: torch.Tensor, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self.ready: object | None = None


class HostBuffer:
    """A lent piece of host memory: ``nbytes`` usable, ``capacity`` occupied.

    ``ready`` is the event of the last reader or None: a write into ``tensor``
    must be ordered behind it.
    """

    __slots__ = ("__weakref__", "_block", "_owner", "_view", "capacity", "nbytes", "ready")

    def __init__(self, block: _Block, nbytes: int, owner: HostPool) -> None:
        self.nbytes = nbytes
        self.capacity = block.capacity
        self.ready = block.ready
        self._owner = owner
        self._block = [block]
        self._view: torch.Tensor | None = block.memory[:nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The 1-D uint8 view of exactly ``nbytes``. Raises ``StateError`` once the buffer was given back."""
        if self._view is None:
            raise StateError(
                explain(
                    "this host buffer is not yours any more",
                    expected="a buffer that is lent",
                    got="one that was given back",
                    where=repr(self),
                    remedy="Use the tensor before give(buffer).",
                )
            )
        return self._view

    def __repr__(self) -> str:
        state = "lent" if self._block else "given back"
        return f"HostBuffer(nbytes={self.nbytes}, capacity={self.capacity}, {state})"


class HostPool:
    """Lends host buffers by size class within a byte budget.

    Costs what ``allocate`` costs per new buffer, and holds every buffer until
    :meth:`trim` or until the budget needs it. A buffer that is dropped without
    ``give`` stays counted as live. Thread safe.

    >>> pool = HostPool(allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    >>> buffer = pool.take(5000)
    >>> buffer.tensor.numel(), buffer.capacity
    (5000, 5120)
    >>> pool.give(buffer)
    >>> pool.take(4500).capacity, pool.allocations
    (5120, 1)

    Args:
        allocate: returns a 1-D uint8 tensor of the bytes asked for, pinned where that helps.
        budget: the most bytes allocated at once, lent or idle.
        footprint: the bytes that ``allocate`` really takes for a request, where its own rounding adds some.
            Such a buffer has all of them as its capacity.
    """

    def __init__(
        self,
        *,
        allocate: Callable[[int], torch.Tensor],
        budget: int | None = None,
        footprint: Callable[[int], int] = int,
    ) -> None:
        self._allocate = allocate
        self._footprint = footprint
        self._budget = budget
        self._lock = threading.Lock()
        self._idle: dict[int, deque[_Block]] = {}
        self._given: deque[_Block] = deque()
        self._live_bytes = 0
        self._idle_bytes = 0
        self._allocations = 0
        self._waits = 0

    @property
    def live_bytes(self) -> int:
        """Capacity of the buffers that are lent."""
        with self._lock:
            self._settle()
            return self._live_bytes

    @property
    def idle_bytes(self) -> int:
        """Capacity of the buffers that wait for a taker."""
        with self._lock:
            self._settle()
            return self._idle_bytes

    @property
    def allocated_bytes(self) -> int:
        """``live_bytes`` and ``idle_bytes`` together: what the budget bounds."""
        with self._lock:
            return self._live_bytes + self._idle_bytes

    @property
    def allocations(self) -> int:
        """How often ``allocate`` was called with success."""
        return self._allocations

    @property
    def waits(self) -> int:
        """How often the host was blocked by an event because a buffer had to be freed."""
        return self._waits

    def take(self, nbytes: int) -> HostBuffer:
        """Lend a buffer: an idle one of the smallest capacity that fits, at most four times its class, or a new one.

        At the budget a larger idle one is lent too, then idle ones are freed,
        which blocks the host until their readers are done (see ``waits``).

        Raises:
            CapacityError: the budget cannot hold it beside what is lent, or ``allocate`` failed.
        """
        if nbytes < 0:
            raise StateError(
                explain(
                    "no buffer has this size",
                    expected="nbytes >= 0",
                    got=str(nbytes),
                    where="HostPool.take",
                    remedy="Pass the size of the storage.",
                )
            )
        with self._lock:
            self._settle()
            wanted = self._footprint(size_class(nbytes))
            block = self._reuse(nbytes, _ROOMY * wanted) or self._within_budget(nbytes, wanted)
            self._live_bytes += block.capacity
        return HostBuffer(block, nbytes, self)

    def give(self, buffer: HostBuffer, ready: object | None = None) -> None:
        """Take a buffer back. Never blocks.

        Args:
            buffer: a buffer that this pool lent.
            ready: the event of its last reader; the next taker finds it as
                ``buffer.ready``. To be freed, it must have ``synchronize()``.
                Who took a buffer and never ordered anything behind its ``ready`` passes that on.

        Raises:
            StateError: the buffer was given back before, or belongs to another pool.
        """
        if buffer._owner is not self:
            raise StateError(
                explain(
                    "this buffer cannot be given back here",
                    expected="the pool that lent it",
                    got="another pool",
                    where=repr(buffer),
                    remedy="Give it to the pool it was taken from.",
                )
            )
        try:
            block = buffer._block.pop()
        except IndexError:
            raise StateError(
                explain(
                    "this buffer was given back before",
                    expected="one give for each take",
                    got="a second one",
                    where=repr(buffer),
                    remedy="Call take() for another buffer.",
                )
            ) from None
        buffer._view = None
        block.ready = ready
        self._given.append(block)

    def trim(self) -> int:
        """Free every idle buffer; returns the bytes freed. Blocks the host until their readers are done."""
        with self._lock:
            self._settle()
            return self._free(self._idle_bytes)

    def _settle(self) -> None:
        """Take in what was given back meanwhile, under the lock."""
        while self._given:
            block = self._given.popleft()
            self._live_bytes -= block.capacity
            self._idle_bytes += block.capacity
            self._idle.setdefault(block.capacity, deque()).append(block)

    def _reuse(self, nbytes: int, most: int | None) -> _Block | None:
        """Take the idle block of the smallest capacity from ``nbytes`` to ``most``, the longest idle first."""
        fitting = [size for size in self._idle if size >= nbytes and (most is None or size <= most)]
        if not fitting:
            return None
        return self._withdraw(min(fitting))

    def _withdraw(self, capacity: int) -> _Block:
        blocks = self._idle[capacity]
        block = blocks.popleft()
        if not blocks:
            del self._idle[capacity]
        self._idle_bytes -= capacity
        return block

    def _within_budget(self, nbytes: int, wanted: int) -> _Block:
        """Make a new block; short of budget, use or free idle ones first, and do without the rounding last."""
        if self._budget is not None and self._live_bytes + self._idle_bytes + wanted > self._budget:
            block = self._reuse(nbytes, None)
            if block is not None:
                return block
            wanted = self._footprint(nbytes)
            if self._live_bytes + wanted > self._budget:
                raise CapacityError(
                    explain(
                        "the host budget is too small",
                        expected=f"at least {self._live_bytes + wanted} bytes in total",
                        got=f"{self._budget} bytes, {self._live_bytes} of them lent",
                        where=f"take({nbytes})",
                        remedy="Raise host_bytes, or swap less.",
                    )
                )
            self._free(self._live_bytes + self._idle_bytes + wanted - self._budget)
        return self._make(wanted)

    def _make(self, capacity: int) -> _Block:
        """Allocate; when the system refuses, once more with every idle block freed."""
        try:
            memory = self._allocate(capacity)
        except (RuntimeError, MemoryError, OSError) as first:
            if not self._idle_bytes:
                raise self._refused(capacity, first) from first
            self._free(self._idle_bytes)
            try:
                memory = self._allocate(capacity)
            except (RuntimeError, MemoryError, OSError) as error:
                raise self._refused(capacity, error) from error
        if memory.dtype is not torch.uint8 or memory.dim() != 1 or memory.numel() < capacity:
            raise StateError(
                explain(
                    "allocate returned another tensor",
                    expected=f"1-D uint8 of {capacity} elements",
                    got=f"{tuple(memory.shape)} of {memory.dtype}",
                    where="HostPool",
                    remedy="Correct allocate.",
                )
            )
        self._allocations += 1
        return _Block(memory, capacity)

    def _refused(self, capacity: int, error: BaseException) -> CapacityError:
        return CapacityError(
            explain(
                "no more host memory",
                expected=f"{self._live_bytes + capacity} bytes in total",
                got=f"{type(error).__name__}: {error}",
                where=f"{self._live_bytes} bytes lent",
                remedy="Set a smaller host_bytes, or swap less.",
            )
        )

    def _free(self, nbytes: int) -> int:
        """Free at least ``nbytes`` of idle blocks, the largest first; returns how many were freed."""
        freed = 0
        while freed < nbytes and self._idle:
            capacity = max(self._idle)
            self._await(self._idle[capacity][0].ready)
            self._withdraw(capacity)
            freed += capacity
        return freed

    def _await(self, ready: object | None) -> None:
        if ready is None:
            return
        synchronize = getattr(ready, "synchronize", None)
        if synchronize is None:
            raise StateError(
                explain(
                    "a buffer cannot be freed safely",
                    expected="an event with synchronize()",
                    got=repr(ready),
                    where="HostPool",
                    remedy="Pass the last reader's event as give(buffer, ready=...).",
                )
            )
        self._waits += 1
        synchronize()
