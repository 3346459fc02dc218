"""Where the time of a swapped step goes: to the link, to the arithmetic, and to waiting for the one or the other.

Law: what the compute does and waits for is read from the compute's own clock, segment by segment; what the link takes
is the bytes of a bucket by the rates of the link, measured beside. Taking times changes no bit and no order.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import device
from lowtide.optim.segment import HeldSegment
from lowtide.residency.file import measure_bandwidth
from lowtide.residency.manager import SwapManager

__all__ = ["BucketTimes", "StepTimes", "Stopwatch", "best_seconds", "link_rates", "tier_rates"]

# Large enough that a copy's launch does not count.
_LINK_BYTES = 64 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step, in seconds: the link's each way, the update's, and the compute's wait before updates."""

    nbytes: int
    load_seconds: float
    store_seconds: float
    update_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class StepTimes:
    """A whole step: its buckets, and the wait for the last stores. ``str`` is a table, in milliseconds."""

    buckets: tuple[BucketTimes, ...]
    last_stores_seconds: float

    @property
    def update_seconds(self) -> float:
        """Of all arithmetic."""
        return sum(bucket.update_seconds for bucket in self.buckets)

    @property
    def link_seconds(self) -> float:
        """Of the busier direction of the link."""
        return max(sum(b.load_seconds for b in self.buckets), sum(b.store_seconds for b in self.buckets))

    @property
    def exposed_seconds(self) -> float:
        """In which the compute waited for the link."""
        return sum(bucket.exposed_seconds for bucket in self.buckets) + self.last_stores_seconds

    @property
    def seconds(self) -> float:
        """From the first wait to the last."""
        return self.update_seconds + self.exposed_seconds

    def __str__(self) -> str:
        lines = ["bucket        MiB   load ms  store ms  update ms  exposed ms"]
        for number, one in enumerate(self.buckets):
            figures = (one.load_seconds, one.store_seconds, one.update_seconds, one.exposed_seconds)
            times = " ".join(f"{value * 1e3:9.2f}" for value in figures)
            lines.append(f"{number:6d} {one.nbytes / (1 << 20):10.1f} {times}")
        lines.append(
            f"step {self.seconds * 1e3:.2f} ms: link {self.link_seconds * 1e3:.2f}, "
            f"update {self.update_seconds * 1e3:.2f}, exposed {self.exposed_seconds * 1e3:.2f}, "
            f"of which {self.last_stores_seconds * 1e3:.2f} for the last stores"
        )
        return "\n".join(lines)


class Stopwatch:
    """Marks on the compute's clock: before and after each segment's update."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._began = {where: _mark(where) for where in devices}
        self._laps: dict[torch.device, list[tuple[HeldSegment, Any, Any]]] = {where: [] for where in devices}
        self._ended: dict[torch.device, Any] = {}

    @contextmanager
    def lap(self, segment: HeldSegment) -> Iterator[None]:
        """Around one update."""
        before = _mark(segment.device)
        yield
        self._laps[segment.device].append((segment, before, _mark(segment.device)))

    def end(self) -> None:
        """After the last stores."""
        self._ended = {where: _mark(where) for where in self._began}

    def times(self, bucket_bytes: int, rates: Callable[[torch.device], tuple[float, float]]) -> StepTimes:
        """What was found; waits for the compute. ``rates`` gives the bytes a second down and up."""
        buckets: list[BucketTimes] = []
        last = 0.0
        for where, laps in self._laps.items():
            device.synchronize(where)
            down, up = rates(where)
            ends = [self._began[where], *(after for _, _, after in laps)]
            waits = [_between(end, before) for end, (_, before, _) in zip(ends, laps, strict=False)]
            updates = [_between(before, after) for _, before, after in laps]
            done = itertools.accumulate(segment.nbytes for segment, _, _ in laps)
            numbers = [(total - 1) // bucket_bytes for total in done]
            for _, group in itertools.groupby(range(len(laps)), key=numbers.__getitem__):
                chosen = list(group)
                moved = sum(laps[i][0].nbytes for i in chosen if laps[i][0].moves)
                nbytes = sum(laps[i][0].nbytes for i in chosen)
                update, wait = sum(updates[i] for i in chosen), sum(waits[i] for i in chosen)
                buckets.append(BucketTimes(nbytes, moved / up, moved / down, update, wait))
            last += _between(ends[-1], self._ended[where])
        return StepTimes(tuple(buckets), last)


def _mark(where: torch.device) -> Any:
    if not device.is_accelerator(where):
        return time.perf_counter()
    event = torch.Event(device=where, enable_timing=True)
    event.record(device.current_stream(where))  # type: ignore[arg-type]
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(max(0.0, second - first))
    return float(max(0.0, first.elapsed_time(second) / 1e3))


# ---- the link ------------------------------------------------------------------------------------


def best_seconds(where: torch.device, work: Callable[[], Any]) -> float:
    """The shortest of a few runs by the device's own clock."""
    found = []
    for _ in range(_ROUNDS + 1):  # the first warms up, and is not the fastest
        began = _mark(where)
        work()
        ended = _mark(where)
        device.synchronize(where)
        found.append(_between(began, ended))
    return min(found)


def link_rates(where: torch.device) -> tuple[float, float]:
    """Bytes a second down and up between a device and pinned host memory. Takes 64 MiB of both for a moment."""
    below = device.pinned_bytes(_LINK_BYTES)
    above = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=where)
    down = best_seconds(where, lambda: below.copy_(above, non_blocking=True))
    up = best_seconds(where, lambda: above.copy_(below, non_blocking=True))
    return _LINK_BYTES / down, _LINK_BYTES / up


def tier_rates(where: torch.device, tier: str | None) -> tuple[float, float]:
    """Bytes a second down to the tier that is used, and up."""
    rates = [link_rates(where)] if device.is_accelerator(where) else []
    if tier == "file" or not rates:
        rates.append(measure_bandwidth(SwapManager().settings.file_dir or tempfile.gettempdir(), _LINK_BYTES))
    return min(down for down, _ in rates), min(up for _, up in rates)
