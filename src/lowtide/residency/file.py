"""The file tier: bytes of tensors kept in a nameless file, for machines whose plain RAM is the device.

It holds one spill file per tier, the map of its extents, the threads that copy,
and a few page-aligned bounce buffers. A copy is cut into chunks; each chunk
passes a bounce buffer (``O_DIRECT`` refuses the memory of a tensor, which is
aligned to 64 bytes), so that one chunk is copied while another is at the disk.
Where the file system refuses ``O_DIRECT`` the chunks go through the page cache
straight from the tensor.

Laws:

1. Every launched copy is one :class:`FileTicket`; it ends, well or badly, and
   ``wait`` tells which. Nothing is queued before directory and budget are known to be good.
2. An extent is used again only after every copy from or to it has ended.
3. The file has no name: it is gone when the process is, however it ends.
4. The file grows only when no free extent fits; a tail that a training loop
   has stopped using is cut off.
5. ``release`` and the end of a tier take no lock that they could wait for,
   because a garbage collection may call them in the midst of anything else.

It must never look at what the bytes mean, choose what to move, or touch a stream.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import torch

from lowtide.errors import CapacityError, StateError, explain
from lowtide.residency.crew import Crew, FileSlot, FileTicket
from lowtide.residency.extents import Extents
from lowtide.residency.spill import Spill, aligned, tier_error

__all__ = ["FileSlot", "FileTicket", "FileTier", "measure_bandwidth"]


class FileTier:
    """Keeps the bytes of tensors in a file and brings them back, in threads of its own.

    Costs disk space for what is live (in whole pages; the file is grown in
    steps of 64 MiB), ``bounces * bounce_bytes`` of memory once the first copy
    ran, and one memory copy per byte. On a file system in RAM (see
    ``in_memory``) it saves no memory.

    Thread safe. After a fork the child must make its own tier: every call but
    ``release`` and ``close``, which do nothing there, raises ``StateError``.

    >>> tier = FileTier()
    >>> slot, written = tier.write(torch.arange(8, dtype=torch.uint8))
    >>> target = torch.empty(slot.nbytes, dtype=torch.uint8)
    >>> tier.read(slot, target, after=written).wait()
    >>> target.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> tier.release(slot)
    >>> tier.close()

    Args:
        directory: where the file lies; the temporary directory by default. Looked at by the first write.
        threads: how many chunks are at the disk at once.
        bounce_bytes: size of a bounce buffer and of a chunk, rounded up to pages.
        bounces: number of bounce buffers; with one, copying and disk take turns.
        direct: True insists on ``O_DIRECT``, False avoids it, None uses it where it works.
        budget: the most bytes the file may have, rounded up to pages.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        threads: int = 1,
        bounce_bytes: int = 4 << 20,
        bounces: int = 4,
        direct: bool | None = None,
        budget: int | None = None,
    ) -> None:
        if min(threads, bounce_bytes, bounces) < 1 or (budget is not None and budget < 0):
            raise StateError(
                explain(
                    "a file tier cannot be built so",
                    expected="threads, bounce_bytes, bounces >= 1 and budget >= 0",
                    got=f"{threads}, {bounce_bytes}, {bounces} and {budget}",
                    where="FileTier",
                    remedy="Correct them.",
                )
            )
        self._directory = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        self._threads = threads
        self._bounce_bytes = aligned(bounce_bytes)
        self._bounces = bounces
        self._direct = direct
        self._budget = None if budget is None else aligned(budget)
        self._lock = threading.Lock()
        self._extents = Extents()
        self._live_bytes = 0
        self._returned: deque[FileSlot] = deque()
        self._leaving: list[FileSlot] = []
        self._crew: Crew | None = None
        self._closer: weakref.finalize[[], FileTier] | None = None
        self._closed = False
        # What slots know their tier by: a reference to the tier would be a cycle that keeps the file open.
        self._identity = object()

    @property
    def directory(self) -> str:
        """The directory the file lies in."""
        return self._directory

    @property
    def direct(self) -> bool:
        """Whether ``O_DIRECT`` is in use. Opens the file to find out."""
        self._require_usable()
        with self._lock:
            return self._open().spill.direct

    @property
    def in_memory(self) -> bool:
        """Whether the directory lies on a file system in RAM, where swapping saves no memory (Linux only)."""
        try:
            device = Path(self._directory).stat().st_dev
            with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
                lines = [line.split() for line in mounts]
        except OSError:
            return False
        wanted = f"{os.major(device)}:{os.minor(device)}"
        return any(line[2] == wanted and line[line.index("-") + 1] in {"tmpfs", "ramfs"} for line in lines)

    @property
    def live_bytes(self) -> int:
        """Sum of ``nbytes`` over the slots that are neither released nor lost to a failed write."""
        if self._foreign():
            return 0
        with self._lock:
            self._settle()
            return self._live_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the file as far as extents were ever handed out and not cut off since."""
        return self._extents.end

    @property
    def file_bytes_written(self) -> int:
        """Bytes of tensors that reached the file, without padding."""
        return self._crew.bytes_written if self._crew else 0

    @property
    def file_bytes_read(self) -> int:
        """Bytes of tensors that came back from the file, without padding."""
        return self._crew.bytes_read if self._crew else 0

    def write(self, source: torch.Tensor) -> tuple[FileSlot, FileTicket]:
        """Launch a copy of ``source`` (1-D uint8, CPU, contiguous) into a new slot.

        ``source`` must not change until the ticket is done; the ticket keeps it
        alive until then. Returns at once, except that a write over the budget
        first waits for copies whose slots are already released.

        Raises:
            CapacityError: the budget is too small; nothing was queued.
            TierError: the directory cannot be used or the disk is full; nothing was queued.
            StateError: the tensor is of another kind, the tier is closed or of another process.
        """
        nbytes = source.numel()
        self._require_bytes(source, nbytes)
        self._require_usable()
        with self._lock:
            crew = self._open()
            slot = FileSlot(nbytes, self._place(aligned(nbytes), crew.spill), aligned(nbytes), self._identity)
            self._live_bytes += nbytes
            slot._write = FileTicket(slot, source, writes=True)
            try:
                self._launch(slot._write, source, [])
            except BaseException:
                self.release(slot)
                raise
        return slot, slot._write

    def read(self, slot: FileSlot, target: torch.Tensor, *, after: FileTicket | None = None) -> FileTicket:
        """Launch a copy of a slot's bytes into ``target`` (1-D uint8, CPU, contiguous, of ``slot.nbytes``).

        It runs after the slot's own write and after ``after``, and fails if they
        failed. ``target`` is undefined until the ticket is done.

        Raises:
            StateError: the slot was released or is of another tier, the tensor is of another kind,
                the tier is closed or of another process.
        """
        self._require_bytes(target, slot.nbytes)
        self._require_usable()
        with self._lock:
            lost = slot._write is not None and slot._write._failure is not None
            if slot._owner is not self._identity or not (slot._token or lost):
                raise StateError(
                    explain(
                        "this slot cannot be read",
                        expected="a live slot of this tier",
                        got="a released one" if slot._owner is self._identity else "one of another tier",
                        where=repr(slot),
                        remedy="Read before release(slot), from the tier that wrote it.",
                    )
                )
            ticket = FileTicket(slot, target, writes=False)
            self._launch(ticket, target, [blocker for blocker in {slot._write, after} if blocker is not None])
        return ticket

    def release(self, slot: FileSlot) -> None:
        """Give a slot's extent back; it is used again once the copies in flight from or to it have ended.

        Never blocks; harmless twice, after ``close``, after a failed write and in a forked child.
        """
        if slot._owner is not self._identity:
            raise StateError(
                explain(
                    "this slot cannot be released",
                    expected="a slot of this tier",
                    got="one of another tier",
                    where=repr(slot),
                    remedy="Release it at the tier that wrote it.",
                )
            )
        if not self._foreign() and slot._retire():
            self._returned.append(slot)

    def trim(self) -> int:
        """Cut off the file's free tail now; returns the bytes given back to the disk. Costs about 0.2 s a GB."""
        self._require_usable()
        with self._lock:
            self._settle()
            lost = self._extents.cut()
            if self._crew is not None:
                self._crew.spill.cut(self._extents.end)
        return lost

    def close(self) -> None:
        """End the threads and drop the file with all it holds. Copies not yet begun fail. Harmless twice."""
        self._closed = True
        if self._closer is not None:
            self._closer()

    def _launch(self, ticket: FileTicket, tensor: torch.Tensor, after: list[FileTicket]) -> None:
        self._open().submit(ticket, tensor.data_ptr(), after)
        ticket._slot._in_flight()
        ticket._slot._copies.append(ticket)

    def _foreign(self) -> bool:
        return self._crew is not None and self._crew.spill.pid != os.getpid()

    def _require_usable(self) -> None:
        if self._closed or self._foreign():
            state = "closed" if self._closed else f"opened by process {self._crew.spill.pid if self._crew else '?'}"
            raise StateError(
                explain(
                    "this file tier cannot be used",
                    expected="an open tier of this process",
                    got=f"one that was {state}",
                    where=f"directory {self._directory}, process {os.getpid()}",
                    remedy="Make a new FileTier here.",
                )
            )

    def _require_bytes(self, tensor: torch.Tensor, nbytes: int) -> None:
        fits = tensor.dtype is torch.uint8 and tensor.device.type == "cpu" and tensor.dim() == 1
        if not fits or not tensor.is_contiguous() or tensor.numel() != nbytes:
            raise StateError(
                explain(
                    "the file tier moves plain bytes",
                    expected=f"a contiguous 1-D uint8 CPU tensor of {nbytes} elements",
                    got=f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}",
                    where=f"directory {self._directory}",
                    remedy="Pass a uint8 view of the storage.",
                )
            )

    def _open(self) -> Crew:
        """Open the file at the first use, under the lock."""
        if self._crew is None:
            spill = Spill(self._directory, direct=self._direct)
            try:
                self._crew = Crew(
                    spill,
                    threads=self._threads,
                    bounce_bytes=self._bounce_bytes,
                    bounces=self._bounces,
                    lost=self._returned,
                )
            except OSError as error:
                spill.close()
                raise tier_error(error, self._directory, self._bounce_bytes, problem="no bounce buffers") from error
            self._closer = weakref.finalize(self, self._crew.shutdown)
        return self._crew

    def _place(self, span: int, spill: Spill) -> int:
        """Find room for ``span`` bytes, under the lock; grows the file only when no free extent fits."""
        if not span:
            return 0
        self._settle()
        while short := self._extents.shortfall(span):
            size = self._extents.end + short
            if self._budget is not None and size > self._budget:
                self._await_leaving(size)
                continue
            spill.reserve(size, self._budget)
            self._extents.grow(short)
        offset = self._extents.take(span)
        if self._extents.cut_unused():
            spill.cut(self._extents.end)
        return offset

    def _await_leaving(self, size: int) -> None:
        """Wait for one copy whose slot is released already; without any the budget is too small."""
        for slot in self._leaving:
            ticket = slot._in_flight()
            if ticket is not None:
                ticket._join()
                self._settle()
                return
        raise CapacityError(
            explain(
                "the budget of the file tier is too small",
                expected=f"at least {size} bytes in total",
                got=f"{self._budget} bytes, {self._live_bytes} of them live",
                where=f"directory {self._directory}",
                remedy="Raise the budget, or swap less.",
            )
        )

    def _settle(self) -> None:
        """Take in what was released meanwhile, under the lock; extents with copies in flight stay taken."""
        while self._returned:
            slot = self._returned.popleft()
            self._live_bytes -= slot.nbytes
            self._leaving.append(slot)
        staying = []
        for slot in self._leaving:
            if slot._in_flight() is not None:
                staying.append(slot)
            elif slot.span:
                self._extents.give(slot.offset, slot.span)
        self._leaving = staying


def measure_bandwidth(
    directory: str | os.PathLike[str], nbytes: int, *, threads: int = 1, direct: bool | None = None
) -> tuple[float, float]:
    """Time the tier's own path: bytes per second written and read in the steady state.

    Writes ``nbytes`` three times (the first time grows the file, unmeasured; the
    rest is averaged) and reads them once, in pieces of at most 16 MiB. Costs that much disk and
    80 MiB of memory. Without ``O_DIRECT`` it measures the page cache.
    """
    piece = max(1, min(nbytes, 16 << 20))
    count = max(1, nbytes // piece)
    source = torch.arange(piece, dtype=torch.int64, device="cpu").to(torch.uint8)
    targets = [torch.empty_like(source) for _ in range(min(4, count))]
    tier = FileTier(directory, threads=threads, direct=direct)
    try:
        slots: list[FileSlot] = []
        written = 0.0
        for measured in (False, True, True):
            for slot in slots:
                tier.release(slot)
            started = time.perf_counter()
            launched = [tier.write(source) for _ in range(count)]
            for _, ticket in launched:
                ticket.wait()
            written += measured * (time.perf_counter() - started)
            slots = [slot for slot, _ in launched]
        started = time.perf_counter()
        tickets: deque[FileTicket] = deque()
        for index, slot in enumerate(slots):
            if len(tickets) == len(targets):
                tickets.popleft().wait()
            tickets.append(tier.read(slot, targets[index % len(targets)]))
        for ticket in tickets:
            ticket.wait()
        read = time.perf_counter() - started
    finally:
        tier.close()
    return 2 * count * piece / written, count * piece / read
