"""Copies between a device and the tier below it, each with exactly one wait.

Two carriers with one interface: :class:`PinnedCarrier` moves to pooled pinned
host memory on two streams, one a direction; :class:`FileCarrier` serves a
machine without an accelerator, where plain RAM is the device and a file the
lower tier. Law: a copy is ordered by events. On an accelerator ``wait`` makes
the current stream wait and never the host; on a plain CPU the host is the
compute stream, so there it blocks and is counted. Memory of either side stays
alive until its copy was waited for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowtide import device
from lowtide.residency.file import FileSlot, FileTicket, FileTier
from lowtide.residency.pool import HostBuffer, HostPool

__all__ = ["Carrier", "Copy", "FileCarrier", "PinnedCarrier", "Settings", "Traffic"]

Tensor = torch.Tensor


@dataclass
class Settings:
    """What may move, how much at once, and where to; see :meth:`SwapManager.configure`."""

    min_bytes: int = 64 << 10
    in_flight_bytes: int | None = None
    prefetch: int = 1
    host_bytes: int | None = None
    file_dir: str | None = None


@dataclass
class Traffic:
    """Bytes and waits so far; every counter is a host integer and costs no synchronisation."""

    out_bytes: int = 0
    in_bytes: int = 0
    waits: int = 0
    late_loads: int = 0
    file_bytes_written: int = 0
    file_bytes_read: int = 0
    bound_waits: int = 0


class Copy(Protocol):
    """A launched copy."""

    def wait(self) -> None:
        """Order the compute after it. Raises TierError if it failed. Repeating it is harmless."""

    def let_run(self) -> bool:
        """Leave a copy that cannot fail alone: the device's memory is free when it is over. False: wait for it."""


class Carrier(Protocol):
    """Moves flat byte tensors down and up."""

    def copy_out(self, sources: Sequence[Tensor], stream: Any = None) -> list[tuple[Any, Copy]]:
        """Launch copies to the lower tier as one batch: (slot, copy) for each source."""

    def copy_in(self, slots: Sequence[tuple[Any, Copy]], where: torch.device, stream: Any = None) -> list[Any]:
        """Launch copies back as one batch: (bytes, copy) for each (slot, its way out)."""

    def put(self, source: Tensor) -> tuple[Any, Copy]:
        """Write bytes of host memory to the lower tier, past the device. Blocks the host."""

    def peek(self, slot: Any, out: Copy) -> Tensor:
        """A copy of a slot's bytes in host memory, past the device. Blocks the host; the slot stays as it is."""

    def release(self, slot: Any, copies: Sequence[Copy]) -> None:
        """Give a slot back; it is reused only after ``copies``."""

    def live_bytes(self) -> int:
        """Bytes of live copies on the lower tier."""

    def note(self) -> str | None:
        """What a user should know of the lower tier, if anything."""

    def close(self) -> None:
        """Give everything back to the system."""


# ---- plain CPU: RAM is the device, a file is the lower tier --------------------------------------


class _FileCopy:
    __slots__ = ("_ticket", "_traffic")

    def __init__(self, ticket: FileTicket, traffic: Traffic) -> None:
        self._ticket: FileTicket | None = ticket
        self._traffic = traffic

    @property
    def ticket(self) -> FileTicket | None:
        return self._ticket

    def wait(self) -> None:
        ticket = self._ticket
        if ticket is None:
            return
        if not ticket.done():
            self._traffic.waits += 1
        ticket.wait()
        self._ticket = None

    def let_run(self) -> bool:
        """See :class:`Copy`: a disk can fail."""
        return False


class FileCarrier:
    """Moves between RAM and a spill file on I/O threads."""

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        self._traffic = traffic
        self.tier = FileTier(settings.file_dir, budget=settings.host_bytes)

    def copy_out(self, sources: Sequence[Tensor], stream: Any = None) -> list[tuple[FileSlot, Copy]]:
        """See :class:`Carrier`. A failure to start gives back what was started."""
        started: list[tuple[FileSlot, Copy]] = []
        try:
            for source in sources:
                slot, ticket = self.tier.write(source)
                started.append((slot, _FileCopy(ticket, self._traffic)))
                self._traffic.out_bytes += slot.nbytes
                self._traffic.file_bytes_written += slot.nbytes
        except BaseException:
            for slot, copy in started:
                self.release(slot, [copy])
            raise
        return started

    def copy_in(self, slots: Sequence[tuple[Any, Copy]], where: torch.device, stream: Any = None) -> list[Any]:
        """See :class:`Carrier`."""
        started = []
        for slot, out in slots:
            target = torch.empty(slot.nbytes, dtype=torch.uint8, device=where)
            after = out.ticket if isinstance(out, _FileCopy) else None
            started.append((target, _FileCopy(self.tier.read(slot, target, after=after), self._traffic)))
            self._traffic.in_bytes += slot.nbytes
            self._traffic.file_bytes_read += slot.nbytes
        return started

    def put(self, source: Tensor) -> tuple[FileSlot, Copy]:
        """See :class:`Carrier`."""
        ((slot, copy),) = self.copy_out([source])
        try:
            copy.wait()
        except BaseException:
            self.release(slot, [copy])
            raise
        return slot, copy

    def peek(self, slot: FileSlot, out: Copy) -> Tensor:
        """See :class:`Carrier`."""
        target = torch.empty(slot.nbytes, dtype=torch.uint8, device="cpu")
        self.tier.read(slot, target, after=out.ticket if isinstance(out, _FileCopy) else None).wait()
        return target

    def release(self, slot: FileSlot, copies: Sequence[Copy]) -> None:
        """See :class:`Carrier`. The tier itself keeps the extent until copies in flight are over."""
        self.tier.release(slot)

    def live_bytes(self) -> int:
        """See :class:`Carrier`."""
        return self.tier.live_bytes

    def note(self) -> str | None:
        """See :class:`Carrier`. A file that lies in memory saves none."""
        if not self.tier.in_memory:
            return None
        return (
            f"the spill file's directory {self.tier.directory} lies in memory: what is swapped stays there and "
            "nothing is saved. Name one on a disk: SwapManager().configure(file_dir=...)."
        )

    def close(self) -> None:
        """See :class:`Carrier`."""
        self.tier.close()


# ---- an accelerator: pinned host memory on two streams -------------------------------------------


class _StreamCopy:
    """A copy queued on a stream; keeps both sides alive until somebody was ordered after it."""

    __slots__ = ("_keep", "_stream", "device", "event")

    def __init__(self, event: Any, stream: Any, where: torch.device, keep: tuple[Tensor, ...]) -> None:
        self.event = event
        self._stream = stream
        self.device = where
        self._keep: tuple[Tensor, ...] = keep

    def wait(self) -> None:
        if self._keep:
            device.wait_event(device.current_stream(self.device), self.event)
            self._keep = ()

    def let_run(self) -> bool:
        """See :class:`Copy`."""
        with device.use_stream(self._stream):
            for tensor in self._keep:
                device.note_reader(tensor)
        self._keep = ()
        return True

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        # Never waited for: its blocks may only be reused after it.
        self.wait()


class _HostWrite:
    """Bytes that the host wrote to pinned memory itself: whatever reads them is queued after that."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing."""

    def let_run(self) -> bool:
        """It is over."""
        return True


class PinnedCarrier:
    """Moves between an accelerator and pinned host memory, one stream a direction."""

    def __init__(self, where: torch.device, settings: Settings, traffic: Traffic) -> None:
        self._device = where
        self._traffic = traffic
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.pool = HostPool(
            allocate=device.pinned_bytes,
            budget=settings.host_bytes,
            footprint=lambda nbytes: device.pinned_footprint(nbytes, where),
        )

    def stream(self, direction: str) -> Any:
        """The stream of a direction, ``out`` or ``in``."""
        with self._lock:
            if direction not in self._streams:
                self._streams[direction] = device.new_stream(self._device)
            return self._streams[direction]

    def copy_out(self, sources: Sequence[Tensor], stream: Any = None) -> list[tuple[HostBuffer, Copy]]:
        """See :class:`Carrier`: one event for the batch, recorded after its last copy."""
        buffers: list[HostBuffer] = []
        try:
            for source in sources:
                buffers.append(self.pool.take(source.numel()))  # noqa: PERF401 - what was taken is given back on failure
        except BaseException:
            for buffer in buffers:
                self.pool.give(buffer, buffer.ready)
            raise
        stream = stream or self.stream("out")
        device.wait_stream(stream, device.current_stream(self._device))
        with device.use_stream(stream):
            for source, buffer in zip(sources, buffers, strict=True):
                if buffer.ready is not None:
                    device.wait_event(stream, buffer.ready)
                buffer.tensor.copy_(source, non_blocking=True)
                self._traffic.out_bytes += source.numel()
        event = device.record_event(stream)
        return [(b, _StreamCopy(event, stream, self._device, (s,))) for b, s in zip(buffers, sources, strict=True)]

    def copy_in(self, slots: Sequence[tuple[Any, Copy]], where: torch.device, stream: Any = None) -> list[Any]:
        """See :class:`Carrier`: allocated on the compute stream, which the copy stream waits for first."""
        targets = [torch.empty(slot.nbytes, dtype=torch.uint8, device=where) for slot, _ in slots]
        stream = stream or self.stream("in")
        device.wait_stream(stream, device.current_stream(where))
        for _, out in slots:
            if isinstance(out, _StreamCopy):
                device.wait_event(stream, out.event)
        with device.use_stream(stream):
            for (slot, _), target in zip(slots, targets, strict=True):
                target.copy_(slot.tensor, non_blocking=True)
                self._traffic.in_bytes += slot.nbytes
        event = device.record_event(stream)
        return [(t, _StreamCopy(event, stream, where, (t, s.tensor))) for t, (s, _) in zip(targets, slots, strict=True)]

    def put(self, source: Tensor) -> tuple[HostBuffer, Copy]:
        """See :class:`Carrier`."""
        buffer = self.pool.take(source.numel())
        if buffer.ready is not None:
            buffer.ready.synchronize()  # type: ignore[attr-defined]
        buffer.tensor.copy_(source)
        return buffer, _HostWrite()

    def peek(self, slot: HostBuffer, out: Copy) -> Tensor:
        """See :class:`Carrier`."""
        if isinstance(out, _StreamCopy):
            out.event.synchronize()
        return slot.tensor.clone()

    def release(self, slot: HostBuffer, copies: Sequence[Copy]) -> None:
        """See :class:`Carrier`. The next writer of the buffer is ordered after the last copy that touched it."""
        events = [copy.event for copy in copies if isinstance(copy, _StreamCopy)]
        self.pool.give(slot, events[-1] if events else None)

    def live_bytes(self) -> int:
        """See :class:`Carrier`."""
        return self.pool.live_bytes

    def note(self) -> str | None:
        """See :class:`Carrier`. Nothing."""
        return None

    def close(self) -> None:
        """See :class:`Carrier`."""
        self.pool.trim()
