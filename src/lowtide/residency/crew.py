"""Copies between tensors and the spill file: slots, tickets, and the threads that carry them out.

Laws: every ticket ends, well or badly; at most ``threads`` chunks are at the
disk at once while one more thread copies; nothing here holds the tier, so that
a tier nobody holds can die and end its threads.

It must never choose an extent or look at what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING

from lowtide.errors import StateError, TierError, explain
from lowtide.residency.spill import Spill, aligned, tier_error

if TYPE_CHECKING:
    import torch

__all__ = ["Crew", "FileSlot", "FileTicket"]

WORTH_A_THREAD = 256 << 10


class FileSlot:
    """An extent of the spill file: ``nbytes`` asked for, at ``offset``, occupying ``span`` bytes."""

    __slots__ = ("__weakref__", "_copies", "_owner", "_token", "_write", "nbytes", "offset", "span")

    def __init__(self, nbytes: int, offset: int, span: int, owner: object) -> None:
        self.nbytes = nbytes
        self.offset = offset
        self.span = span
        self._owner = owner
        self._token = [True]
        self._copies: list[FileTicket] = []
        self._write: FileTicket | None = None

    def __repr__(self) -> str:
        state = "live" if self._token else "released"
        return f"FileSlot(nbytes={self.nbytes}, offset={self.offset}, {state})"

    def _retire(self) -> bool:
        """True for the one caller that ends the slot's life; atomic without a lock."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    def _in_flight(self) -> FileTicket | None:
        self._copies = [ticket for ticket in self._copies if not ticket.done()]
        return self._copies[0] if self._copies else None


class _Stage(Enum):
    COPY_IN = "tensor to bounce"
    DRIVE = "bounce or tensor to disk, or back"
    COPY_OUT = "bounce to tensor"


class _Chunk:
    """A part of one copy, no larger than a bounce buffer, and the stage it is in."""

    __slots__ = ("address", "bounce", "nbytes", "offset", "stage", "ticket")

    def __init__(self, ticket: FileTicket, address: int, offset: int, nbytes: int, stage: _Stage) -> None:
        self.ticket = ticket
        self.address = address
        self.offset = offset
        self.nbytes = nbytes
        self.stage = stage
        self.bounce = 0


class FileTicket:
    """One copy in flight. Holds the tensor until the copy has ended, then drops it.

    The drop happens in a thread of the tier, before ``done`` turns true.
    """

    __slots__ = (
        "__weakref__",
        "_cause",
        "_chunks",
        "_failure",
        "_finished",
        "_followers",
        "_latch",
        "_left",
        "_pid",
        "_slot",
        "_tensor",
        "_waits",
        "_writes",
    )

    def __init__(self, slot: FileSlot, tensor: torch.Tensor, *, writes: bool) -> None:
        self._slot = slot
        self._tensor: torch.Tensor | None = tensor
        self._writes = writes
        self._failure: str | None = None
        self._cause: BaseException | None = None
        self._chunks: list[_Chunk] = []
        self._left = 0
        self._waits = 0
        self._followers: list[FileTicket] = []
        self._pid = os.getpid()
        self._finished = False
        self._latch = threading.Lock()
        self._latch.acquire()

    @property
    def source(self) -> torch.Tensor | None:
        """The tensor of a write that has not ended or has failed, untouched; otherwise None."""
        return self._tensor if self._writes else None

    def done(self) -> bool:
        """Whether the copy has ended, well or badly. Never blocks."""
        return self._finished

    def wait(self) -> None:
        """Block until the copy has ended. Harmless when repeated.

        Raises:
            TierError: the copy failed; raised again by every further call. The
                tensor of a failed write is intact, that of a failed read is undefined.
            StateError: asked in a forked child for a copy that only the parent can finish.
        """
        if not self._finished:
            if os.getpid() != self._pid:
                raise StateError(
                    explain(
                        "a copy of another process cannot be waited for",
                        expected=f"process {self._pid}",
                        got=f"process {os.getpid()}",
                        where=repr(self._slot),
                        remedy="Wait for it before the fork.",
                    )
                )
            self._join()
        if self._failure is not None:
            raise TierError(self._failure) from self._cause

    def _join(self) -> None:
        with self._latch:
            pass

    def _fail(self, message: str, cause: BaseException | None) -> None:
        if self._failure is None:
            self._cause = cause
            self._failure = message

    def _end(self) -> None:
        self._finished = True
        self._latch.release()


class Crew:
    """The threads of one tier and what they have to do.

    At most ``threads`` chunks are at the disk at once; with bounce buffers one
    more thread copies meanwhile. Threads start with the first copy, and the
    last one to leave closes the file. Knows nothing of the tier, so that a
    tier nobody holds can die and end its threads.
    """

    def __init__(self, spill: Spill, *, threads: int, bounce_bytes: int, bounces: int, lost: deque[FileSlot]) -> None:
        self.spill = spill
        self.bytes_written = 0
        self.bytes_read = 0
        self._lost = lost
        self._width = threads
        self._size = threads + 1 if spill.direct and bounces > 1 else threads
        self._bounce_bytes = bounce_bytes
        self._maps = [mmap.mmap(-1, bounce_bytes) for _ in range(bounces if spill.direct else 0)]
        self._spare = [ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in self._maps]
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._fresh: deque[_Chunk] = deque()
        self._filled: deque[_Chunk] = deque()
        self._landed: deque[_Chunk] = deque()
        self._driving = 0
        self._awake = 0
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._present = 0

    def submit(self, ticket: FileTicket, address: int, after: list[FileTicket]) -> None:
        """Queue a copy behind the copies in ``after``; it fails if one of them fails."""
        slot = ticket._slot
        stage = _Stage.COPY_IN if ticket._writes and self.spill.direct else _Stage.DRIVE
        step = self._bounce_bytes
        ticket._chunks = [
            _Chunk(ticket, address + at, slot.offset + at, min(step, slot.nbytes - at), stage)
            for at in range(0, slot.nbytes, step)
        ]
        ticket._left = len(ticket._chunks)
        if not ticket._chunks:
            self._finish(ticket)
            return
        with self._lock:
            if self._closing:
                raise StateError(self._unfinished(ticket))
            if not self._threads:
                self._start()
            for blocker in after:
                if blocker._finished:
                    self._inherit(ticket, blocker)
                else:
                    ticket._waits += 1
                    blocker._followers.append(ticket)
            if not ticket._waits:
                self._enqueue(ticket)

    def shutdown(self) -> None:
        """End the threads; copies not yet begun fail. Waits for the threads unless it runs in one of them."""
        if os.getpid() != self.spill.pid:
            return
        self._closing = True
        for _ in range(self._size):
            self._bell.put(None)
        if threading.current_thread() in self._threads:
            return
        with self._lock:
            threads = list(self._threads)
        if not threads:
            self._leave()
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        for number in range(self._size):
            thread = threading.Thread(target=self._work, name=f"lowtide-file-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._present += 1

    def _work(self) -> None:
        staying = True
        while staying:
            self._bell.get()
            while (chunk := self._pick()) is not None:
                self._advance(chunk)
            with self._lock:
                staying = not self._closing or bool(self._fresh or self._filled or self._landed)
        with self._lock:
            self._present -= 1
            last = self._present == 0
        self._bell.put(None)
        if last:
            self._leave()

    def _leave(self) -> None:
        self._spare.clear()
        self._maps.clear()
        self.spill.close()

    def _enqueue(self, ticket: FileTicket) -> None:
        self._fresh.extend(ticket._chunks)
        self._call(len(ticket._chunks), ticket._chunks[0].nbytes)

    def _call(self, wanted: int, nbytes: int) -> None:
        """Wake up to ``wanted`` threads, under the lock; one that would only copy little is left asleep.

        Nothing is missed: a thread that is awake picks again before it sleeps.
        """
        limit = self._size if nbytes >= WORTH_A_THREAD else self._width
        for _ in range(min(wanted, limit - self._awake)):
            self._awake += 1
            self._bell.put(None)

    def _pick(self) -> _Chunk | None:
        """Choose the next step; without one the thread that asks counts as asleep."""
        with self._lock:
            chunk = self._next()
            if chunk is None:
                self._awake -= 1
            return chunk

    def _next(self) -> _Chunk | None:
        """What frees a bounce buffer goes first, then the order of the calls."""
        if self._landed:
            return self._landed.popleft()
        may_drive = self._driving < self._width
        if self._filled and may_drive:
            self._driving += 1
            return self._filled.popleft()
        if not self._fresh or (self.spill.direct and not self._spare):
            return None
        if self._fresh[0].stage is _Stage.DRIVE:
            if not may_drive:
                return None
            self._driving += 1
        chunk = self._fresh.popleft()
        if self._closing:
            chunk.ticket._fail(self._unfinished(chunk.ticket), None)
        if self.spill.direct:
            chunk.bounce = self._spare.pop()
        return chunk

    def _advance(self, chunk: _Chunk) -> None:
        ticket = chunk.ticket
        cause: Exception | None = None
        if ticket._failure is None:
            try:
                self._step(chunk)
            except Exception as error:  # noqa: BLE001  whatever it is, the waiter must learn of it
                cause = error.with_traceback(None)
        with self._lock:
            if cause is not None:
                ticket._fail(self._describe(ticket, cause), cause)
            ended = self._pass_on(chunk)
        if ended:
            self._finish(ticket)

    def _step(self, chunk: _Chunk) -> None:
        if chunk.stage is _Stage.COPY_IN:
            ctypes.memmove(chunk.bounce, chunk.address, chunk.nbytes)
        elif chunk.stage is _Stage.COPY_OUT:
            ctypes.memmove(chunk.address, chunk.bounce, chunk.nbytes)
        else:
            direct = self.spill.direct
            move = self.spill.write if chunk.ticket._writes else self.spill.read
            nbytes = aligned(chunk.nbytes) if direct else chunk.nbytes
            move(chunk.bounce if direct else chunk.address, chunk.offset, nbytes)

    def _pass_on(self, chunk: _Chunk) -> bool:
        """Move a chunk to its next stage, under the lock; True when it was the last of its ticket to end."""
        ticket = chunk.ticket
        drove = chunk.stage is _Stage.DRIVE
        if drove:
            self._driving -= 1
        ended = ticket._failure is not None
        if not ended and chunk.stage is _Stage.COPY_IN:
            chunk.stage = _Stage.DRIVE
            self._filled.append(chunk)
        elif not ended and drove and not ticket._writes and chunk.bounce:
            chunk.stage = _Stage.COPY_OUT
            self._landed.append(chunk)
        else:
            self._count(chunk)
            if chunk.bounce:
                self._spare.append(chunk.bounce)
            ticket._left -= 1
        if self._fresh or self._filled or self._landed:
            self._call(1, chunk.nbytes)
        return ticket._left == 0

    def _count(self, chunk: _Chunk) -> None:
        if chunk.ticket._failure is not None:
            return
        if chunk.ticket._writes:
            self.bytes_written += chunk.nbytes
        else:
            self.bytes_read += chunk.nbytes

    def _finish(self, ticket: FileTicket) -> None:
        """End a ticket: drop its tensor, wake its waiters, start what waited for it."""
        ticket._chunks = []
        if ticket._writes and ticket._failure is not None:
            if ticket._slot._retire():
                self._lost.append(ticket._slot)
        else:
            ticket._tensor = None
        with self._lock:
            ticket._end()
            for follower in ticket._followers:
                self._inherit(follower, ticket)
                follower._waits -= 1
                if not follower._waits:
                    self._enqueue(follower)
            ticket._followers = []

    def _inherit(self, ticket: FileTicket, blocker: FileTicket) -> None:
        if blocker._failure is not None:
            ticket._fail(blocker._failure, blocker._cause)

    def _unfinished(self, ticket: FileTicket) -> str:
        return explain(
            "the file tier was closed before a copy ran",
            expected="an open tier",
            got="a closed one",
            where=f"{ticket._slot!r} in {self.spill.directory}",
            remedy="Wait for every ticket before close().",
        )

    def _describe(self, ticket: FileTicket, error: Exception) -> str:
        verb = "write" if ticket._writes else "read"
        problem = f"the file tier could not {verb} {ticket._slot.nbytes} bytes"
        os_error = error if isinstance(error, OSError) else OSError(errno.EIO, f"{type(error).__name__}: {error}")
        return str(tier_error(os_error, self.spill.directory, ticket._slot.span, problem=problem))
