"""Bytes in use over the course of one call, exact to the byte.

Holds the curve and the function that records it. Law: every point is one
allocation or release that torch's allocator reported, in its order; nothing is
sampled. Must never name a backend, and never keep a tensor alive.

[Note: what the allocator's events miss]
    On a CPU torch's profiler reports allocations of the thread that it was
    started in, and of a block that was allocated before the profiler started it
    never reports the release: it does not know the size. So a curve is exact if
    what the call releases was allocated inside it, or in a warm-up call under
    the same profiler, and if no other thread allocates tensors. Memory that does
    not come from torch's allocator (the page-aligned buffers of the file tier,
    workspaces inside a math library) is no part of the curve.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from lowtide.errors import UnsupportedError, explain

__all__ = ["MemoryCurve", "Phase", "memory_curve"]

_MEASURED = "lowtide.measure.memory_curve"
_ALLOCATOR_EVENT = "[memory]"
# What the profiler of torch 2.10 calls every backend from outside of torch; later ones use the backend's own name.
_OUTSIDE = "privateuse1"


@dataclass(frozen=True, slots=True)
class Phase:
    """A named stretch of the call, such as ``forward``; seconds since the call began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes that one call held beyond what was held when it began.

    Args:
        points: (seconds since the call began, bytes) after each allocation or release; the first is ``(0.0, 0)``.
        phases: what the call marked with ``torch.profiler.record_function``, in order; marks inside marks (torch's
            optimizers set their own) are left out.
        peak_bytes: the most bytes held at once; on an accelerator the allocator's own maximum.
    """

    points: tuple[tuple[float, int], ...]
    phases: tuple[Phase, ...]
    peak_bytes: int

    @property
    def end_bytes(self) -> int:
        """Bytes that the call left behind; negative if it released more than it allocated."""
        return self.points[-1][1]


def memory_curve(fn: Callable[[], object], *, warmup: int = 0) -> MemoryCurve:
    """Run ``fn`` once and return the bytes it held, allocation by allocation.

    Costs one run under the profiler, several times slower than a bare one: take
    times elsewhere. What ``fn`` returns is dropped before the curve ends. Releases
    of tensors that were allocated before the profiler started are not seen (see
    the note at the head of this file): a step that frees the gradients of the
    step before needs ``warmup=1``.

    Args:
        fn: the call to measure.
        warmup: how often to run ``fn`` under the same profiler first, unmeasured.

    >>> memory_curve(lambda: torch.empty(1000, dtype=torch.float32)).peak_bytes
    4000
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    # The class behind torch.profiler.profile, which keeps the allocator's events one by one;
    # torch.profiler's own list adds most of them up per operator.
    with profile(profile_memory=True) as profiler:
        for _ in range(warmup):
            fn()
        gc.collect()
        base = _start_counting(device)
        with record_function(_MEASURED):
            fn()
        peak = _stop_counting(device, base)
    if profiler.kineto_results is None:
        raise UnsupportedError(
            explain(
                "torch's profiler gave no events",
                expected="a torch built with kineto",
                got="one without it",
                where=f"torch {torch.__version__}",
                remedy="Measure with a released build of torch.",
            )
        )
    return _curve(profiler.kineto_results.events(), None if device is None else device.type, peak)


def _start_counting(device: torch.device | None) -> int:
    """Reset the accelerator's own maximum and return its bytes in use; nothing to do on a CPU."""
    if device is None:
        return 0
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def _stop_counting(device: torch.device | None, base: int) -> int | None:
    """Return the accelerator's maximum beyond ``base``; None on a CPU."""
    if device is None:
        return None
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - base


def _curve(events: Iterable[Any], device_type: str | None, peak: int | None) -> MemoryCurve:
    """Add up the allocator's events that lie inside the measured call, on the one device that is measured."""
    ordered = sorted(events, key=lambda event: event.start_ns())
    whole = next(event for event in ordered if event.name() == _MEASURED)
    begin, end = whole.start_ns(), whole.start_ns() + whole.duration_ns()
    inside = [event for event in ordered if begin <= event.start_ns() <= end and event is not whole]
    points = [(0.0, 0)]
    wanted = {"cpu"} if device_type is None else {device_type, _OUTSIDE}
    for event in inside:
        if event.name() == _ALLOCATOR_EVENT and event.device_type().name.lower() in wanted:
            points.append(((event.start_ns() - begin) / 1e9, points[-1][1] + event.nbytes()))
    phases: list[Phase] = []
    for event in inside:
        since = (event.start_ns() - begin) / 1e9
        if event.is_user_annotation() and (not phases or since >= phases[-1].end):
            phases.append(Phase(event.name(), since, since + event.duration_ns() / 1e9))
    return MemoryCurve(tuple(points), tuple(phases), max(size for _, size in points) if peak is None else peak)
