"""Gradients in host memory: copied down while backward runs, added up there, and used once.

Law: a gradient has left the device when the stream that computed it has waited for its copy, and not before; what the
host adds or reads has arrived. Gradients of several backwards are added in the order in which they came, in float32.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from lowtide import device
from lowtide._torch import NO_BACKWARD, current_backward, queue_after_backward

__all__ = ["HostGradient", "Lane", "Lanes", "Slabs", "host_memory"]

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
        self._stream: Any = device.new_stream(where) if device.is_accelerator(where) else None
        self._where = where
        self._leaving: deque[tuple[Tensor, device.Event, Any]] = deque()
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
        self._leaving_bytes += _bytes_of(source)
        # The newest may always be under way, however large it is: else its copy could never overlap anything.
        while self._leaving_bytes > IN_FLIGHT_BYTES and len(self._leaving) > 1:
            self._release_oldest()
        if current_backward() not in {NO_BACKWARD, self._backward}:
            self._backward = current_backward()
            queue_after_backward(self.release)
        return event

    def _release_oldest(self) -> None:
        source, event, stream = self._leaving.popleft()
        # The stream that computed it, not today's: its memory goes back to that one.
        device.wait_event(stream, event)
        self._leaving_bytes -= _bytes_of(source)

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


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class HostGradient:
    """One parameter's gradient in host memory, as a row: what has landed last, and the sum of what came before."""

    def __init__(self, dtype: torch.dtype, landing: Tensor) -> None:
        """``landing`` is where copies arrive; ``dtype`` is that of the parameter."""
        self.landing = landing
        self._wide = torch.promote_types(dtype, torch.float32)
        self._sum: Tensor | None = None
        self._summed = self._landed = False
        self._event: device.Event | None = None
        self._factor: Tensor | None = None
        self._seen = False

    @property
    def pending(self) -> bool:
        """Whether there is a gradient for the next step."""
        return self._landed or self._summed

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum, which is made when a second gradient comes."""
        return 0 if self._sum is None else _bytes_of(self._sum)

    def arrive(self, grad: Tensor, lane: Lane) -> None:
        """Launch the copy of a gradient, given as a row, that adds to what is there. The host waits for the last one.

        Cost: from the second gradient of a step on, an addition on the host.
        """
        self._fold()
        if grad.dtype != self.landing.dtype:
            self.landing = host_memory(grad.numel(), grad.dtype, pinned=self.landing.is_pinned())
        self._event = lane.copy_down(grad, self.landing)
        self._landed = self._seen = True

    def _fold(self) -> None:
        """Add what has landed to the sum, and apply the factor that was waiting for the whole of it."""
        if not self.pending:
            return
        self.wait()
        if self._sum is None:
            self._sum = host_memory(self.landing.numel(), self._wide, pinned=False)
        if self._landed:
            # The first is copied: zero and a negative zero would be a zero.
            self._sum.add_(self.landing) if self._summed else self._sum.copy_(self.landing)
        if self._factor is not None:
            self._sum.mul_(self._factor)
        self._landed, self._summed, self._factor = False, True, None

    def wait(self) -> None:
        """Block the host until what was launched has arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def value(self) -> Tensor:
        """The gradient, in float32 or wider; to be read before :meth:`used`."""
        self.wait()
        if self._summed:
            factor, self._factor = self._factor, None
            if self._landed:
                self._fold()
            self._factor = factor
            assert self._sum is not None
            value = self._sum
        else:
            value = self.landing.to(self._wide)
        return value if self._factor is None else value * self._factor

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient so far by ``factor``, when it is used."""
        if self._factor is not None:
            self._fold()
        self._factor = factor

    def used(self) -> None:
        """There is no gradient any more. The next one's copy may still be behind one that nobody waits for."""
        self._event = self._factor = None
        self._landed = self._summed = False

    def zero(self, *, set_to_none: bool) -> None:
        """As ``zero_grad`` does: forget it, or make it zeros if there was one since it was last forgotten."""
        seen = self._seen and not set_to_none
        self.used()
        self._seen = seen
        if seen:
            if self._sum is None:
                self._sum = host_memory(self.landing.numel(), self._wide, pinned=False)
            self._sum.zero_()
            self._summed = True
