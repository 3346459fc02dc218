"""The way between a device and host memory for gradients and parameters, and the memory at its end.

Law: a gradient has left the device when the stream that computed it has waited for its copy, and not before.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lowtide import device
from lowtide._torch import NO_BACKWARD, current_backward, queue_after_backward

__all__ = ["Lane", "Lanes", "Slabs", "bytes_of", "host_memory"]

Tensor = torch.Tensor

# Gradients that are on their way down keep their memory; more than this at once makes the compute stream wait.
IN_FLIGHT_BYTES = 64 << 20
# Page-locked memory is asked for in blocks of this size where there is use for so much.
_SLAB_BYTES = 256 << 20
_ALIGNMENT = 64


def host_memory(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A flat tensor in host memory, not filled."""
    if pinned and numel:
        return device.pinned_bytes(numel * dtype.itemsize).view(dtype)
    return torch.empty(numel, dtype=dtype, device="cpu")


class Slabs:
    """Rows of host memory for one device, page-locked under an accelerator.

    Where the allocator below rounds page-locked memory up, which can double it, rows come out of few large blocks, and
    what a large row leaves of its block serves smaller ones.
    """

    def __init__(self, where: torch.device, *, expected: int = 0) -> None:
        """``expected``: bytes that will be asked for in all."""
        self._where = where
        self._expected = expected
        self._free: list[Tensor] = []
        self.pinned_bytes = 0  # in all blocks

    def row(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, not filled."""
        nbytes = numel * dtype.itemsize
        pinned = device.is_accelerator(self._where)
        if not pinned or device.pinned_footprint(nbytes, self._where) == nbytes:
            self.pinned_bytes += nbytes if pinned else 0
            return host_memory(numel, dtype, pinned=pinned)
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        number = next((i for i, free in enumerate(self._free) if free.numel() >= room), None)
        if number is None:
            number = len(self._free)
            size = device.pinned_footprint(max(room, min(_SLAB_BYTES, self._expected)), self._where)
            self._free.append(device.pinned_bytes(size))
            self.pinned_bytes += size
        self._expected = max(0, self._expected - room)
        taken, self._free[number] = self._free[number][:nbytes], self._free[number][room:]
        return taken.view(dtype)


class Lane:
    """The way between one device and host memory; on a plain CPU the same calls copy at once.

    One stream serves both directions, so that a row of host memory may be read by a copy up and then be the target of
    the next copy down.
    """

    def __init__(self, where: torch.device) -> None:
        self._leaving: deque[tuple[Tensor, device.Event, Any]] = deque()
        self._stream: Any = device.new_stream(where) if device.is_accelerator(where) else None
        self._where = where
        self._leaving_bytes = 0
        self._backward = NO_BACKWARD
        self._sent = False
        self.down_bytes = self.up_bytes = 0

    def copy_down(self, source: Tensor, row: Tensor) -> device.Event | None:
        """Launch a copy of ``source`` to host memory; ``source`` is kept as long as it is needed."""
        self.down_bytes += row.numel() * row.element_size()
        if self._stream is None:
            row.copy_(source)
            return None
        current = device.current_stream(self._where)
        device.wait_stream(self._stream, current)
        with device.use_stream(self._stream):
            row.copy_(source, non_blocking=True)
            event = device.record_event(self._stream)
        self._leaving.append((source, event, current))
        self._leaving_bytes += bytes_of(source)
        # The newest may always be under way, however large it is: else its copy could never overlap anything.
        while self._leaving_bytes > IN_FLIGHT_BYTES and len(self._leaving) > 1:
            self._release_oldest()
        if current_backward() not in {NO_BACKWARD, self._backward}:
            self._backward = current_backward()
            queue_after_backward(self.release)
        return event

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # After a backward that raised there is nobody else to do it.
        if not _exiting():
            self.release()

    def _release_oldest(self) -> None:
        source, event, stream = self._leaving.popleft()
        # The stream that computed it, not today's: its memory goes back to that one.
        device.wait_event(stream, event)
        self._leaving_bytes -= bytes_of(source)

    def release(self) -> None:
        """Let go of everything that is on its way down, its stream ordered after the copies."""
        while self._leaving:
            self._release_oldest()

    def copy_up(self, row: Tensor, target: Tensor) -> None:
        """Launch a copy of host memory to ``target``, whose readers so far the host has waited for.

        ``row`` must stay as it is until the host has read ``target``.
        """
        self.up_bytes += row.numel() * row.element_size()
        self._sent = True
        if self._stream is None:
            target.copy_(row)
            return
        with device.use_stream(self._stream):
            target.copy_(row, non_blocking=True)

    def mark(self) -> device.Event | None:
        """What has arrived once all copies up so far have; None if they have already."""
        return None if self._stream is None else device.record_event(self._stream)

    def end(self) -> None:
        """After copies up: what is computed from now on sees them."""
        if self._stream is not None and self._sent:
            device.wait_stream(device.current_stream(self._where), self._stream)
        self._sent = False
        self.release()


class Lanes:
    """One :class:`Lane` a device, made when it is first needed."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._lock = threading.Lock()  # backward has a thread for each device

    def of(self, where: torch.device) -> Lane:
        """The lane of a device."""
        with self._lock:
            if where not in self._lanes:
                self._lanes[where] = Lane(where)
            return self._lanes[where]

    def all(self) -> list[Lane]:
        """Every lane so far."""
        with self._lock:
            return list(self._lanes.values())


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
