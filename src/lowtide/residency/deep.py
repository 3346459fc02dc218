"""From a device through pinned host memory into a file, and back: for what neither the device nor the host shall hold.

Each way has a thread that joins its two legs. Laws: host memory is taken for what is on its way and for nothing else.
A way out has ended when the bytes are in the file, so one that fails leaves them where they were. ``wait`` blocks the
host until the thread has done its part, because no stream can wait for a disk; the device it orders by an event. Memory
of the device is given back to its stream behind the copy, whoever waits or does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lowtide import device
from lowtide.residency.copies import Copy, FileCarrier, PinnedCarrier, Settings, Traffic
from lowtide.residency.file import FileSlot
from lowtide.residency.pool import HostBuffer

__all__ = ["DeepCarrier"]

Tensor = torch.Tensor


class _Place:
    """Where bytes will lie in the file, once the thread has asked for room."""

    __slots__ = ("dropped", "nbytes", "slot")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.slot: FileSlot | None = None
        self.dropped = False


class _WayOut:
    """A copy to the file: behind it the bytes are there, and the device's memory is free."""

    __slots__ = ("_first", "_traffic", "done")

    def __init__(self, done: Future[None], first: Copy, traffic: Traffic) -> None:
        self.done = done
        self._first: Copy | None = first
        self._traffic = traffic

    def wait(self) -> None:
        """See :class:`Copy`."""
        if self._first is None:
            return
        if not self.done.done():
            self._traffic.waits += 1
        self.done.result()
        self._first.wait()
        self._first = None

    def let_run(self) -> bool:
        """See :class:`Copy`: a disk can fail."""
        return False


class _WayIn:
    """A copy from the file, which the compute stream is ordered behind once it was launched."""

    __slots__ = ("_done", "_stream", "_traffic", "_where")

    def __init__(self, done: Future[tuple[Any, Tensor]], where: torch.device, stream: Any, traffic: Traffic) -> None:
        self._done: Future[tuple[Any, Tensor]] | None = done
        self._where = where
        self._stream = stream
        self._traffic = traffic

    def wait(self) -> None:
        """See :class:`Copy`."""
        if self._done is None:
            return
        if not self._done.done():
            self._traffic.waits += 1
        event, _ = self._done.result()
        device.wait_event(device.current_stream(self._where), event)
        self._done = None

    def let_run(self) -> bool:
        """See :class:`Copy`: a disk can fail."""
        return False

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        # Never waited for: whether it was launched or will be, its target may only be reused after it.
        if self._done is not None:
            self._done.add_done_callback(functools.partial(_keep_until_arrived, self._stream))


def _keep_until_arrived(stream: Any, done: Future[tuple[Any, Tensor]]) -> None:
    if not done.cancelled() and done.exception() is None:
        with device.use_stream(stream):
            device.note_reader(done.result()[1])


class _Written:
    """What the host has written to the file itself."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing."""

    def let_run(self) -> bool:
        """It is over."""
        return True


class DeepCarrier:
    """Moves between an accelerator and a file; see :class:`Carrier`. A budget of host bytes bounds the file as well."""

    def __init__(self, where: torch.device, settings: Settings, traffic: Traffic) -> None:
        self._device = where
        self._traffic = traffic
        self._pinned = PinnedCarrier(where, settings, traffic)
        self._file = FileCarrier(settings, traffic)
        self._out = ThreadPoolExecutor(1, thread_name_prefix="lowtide-to-file")
        self._in = ThreadPoolExecutor(1, thread_name_prefix="lowtide-from-file")

    def copy_out(self, sources: Sequence[Tensor], stream: Any = None) -> list[tuple[Any, Copy]]:
        """See :class:`Carrier`."""
        started: list[tuple[Any, Copy]] = []
        for buffer, first in self._pinned.copy_out(sources, stream):
            place = _Place(buffer.nbytes)
            done = self._out.submit(self._to_file, buffer, first, place)
            started.append((place, _WayOut(done, first, self._traffic)))
        return started

    def _to_file(self, buffer: HostBuffer, first: Any, place: _Place) -> None:
        try:
            first.event.synchronize()
            place.slot, ticket = self._file.tier.write(buffer.tensor)
            if place.dropped:
                self._file.tier.release(place.slot)
            ticket.wait()
            self._traffic.file_bytes_written += place.nbytes
        finally:
            self._pinned.release(buffer, [first])

    def copy_in(self, slots: Sequence[tuple[Any, Copy]], where: torch.device, stream: Any = None) -> list[Any]:
        """See :class:`Carrier`: allocated on the compute stream, which the copy stream waits for first."""
        started = []
        stream = stream or self._pinned.stream("in")
        for place, out in slots:
            target = torch.empty(place.nbytes, dtype=torch.uint8, device=where)
            free = device.record_event(device.current_stream(where))
            done = self._in.submit(self._from_file, place, out, target, free, stream)
            started.append((target, _WayIn(done, where, stream, self._traffic)))
        return started

    def _from_file(self, place: _Place, out: Copy, target: Tensor, free: Any, stream: Any) -> tuple[Any, Tensor]:
        if isinstance(out, _WayOut):
            out.done.result()
        assert place.slot is not None
        buffer = self._pinned.pool.take(place.nbytes)
        event = None
        try:
            if buffer.ready is not None:
                buffer.ready.synchronize()  # type: ignore[attr-defined]
            self._file.tier.read(place.slot, buffer.tensor).wait()
            self._traffic.file_bytes_read += place.nbytes
            with torch.no_grad(), device.use_stream(stream):
                device.wait_event(stream, free)
                target.copy_(buffer.tensor, non_blocking=True)
                event = device.record_event(stream)
            self._traffic.in_bytes += place.nbytes
        finally:
            self._pinned.pool.give(buffer, event)
        return event, target

    def put(self, source: Tensor) -> tuple[Any, Copy]:
        """See :class:`Carrier`."""
        place = _Place(source.numel())
        place.slot, ticket = self._file.tier.write(source)
        try:
            ticket.wait()
        except BaseException:
            self._file.tier.release(place.slot)
            raise
        self._traffic.file_bytes_written += place.nbytes
        return place, _Written()

    def peek(self, slot: Any, out: Copy) -> Tensor:
        """See :class:`Carrier`."""
        if isinstance(out, _WayOut):
            out.done.result()
        target = torch.empty(slot.nbytes, dtype=torch.uint8, device="cpu")
        self._file.tier.read(slot.slot, target).wait()
        return target

    def release(self, slot: Any, copies: Sequence[Copy]) -> None:
        """See :class:`Carrier`. The tier itself keeps the extent until copies in flight are over."""
        slot.dropped = True
        if slot.slot is not None:
            self._file.tier.release(slot.slot)

    def live_bytes(self) -> int:
        """See :class:`Carrier`."""
        return self._file.live_bytes()

    def note(self) -> str | None:
        """See :class:`Carrier`."""
        return self._file.note()

    def close(self) -> None:
        """See :class:`Carrier`."""
        for thread in (self._out, self._in):
            thread.shutdown()
        self._file.close()
        self._pinned.close()
