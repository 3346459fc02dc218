"""What every section of the device check needs: the device, the time that is left, records, failures, and a clock.

Law: times on a device are read from its own events, so that a device whose time
is simulated needs no case of its own; nothing here polls.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowtide import device as seam
from lowtide.measure import Record

__all__ = [
    "BENCH",
    "GIB",
    "MIB",
    "Check",
    "Marks",
    "Skipped",
    "clear",
    "device_free_bytes",
    "held_bytes",
    "host_free_bytes",
    "median",
    "mib",
    "seconds",
]

BENCH = "device_check"
MIB, GIB = 1 << 20, 1 << 30


class Skipped(Exception):  # noqa: N818 - no error: a section says why it does not apply here
    """A section, or a part of one, cannot run here; the message says why."""


@dataclass
class Check:
    """One run of the check.

    Args:
        device: what is checked.
        small: the form that a machine without an accelerator runs in a minute.
        deadline: on the clock of ``time.monotonic``.
        simulator: the running simulator if the device is simulated.
        facts: what later sections read from earlier ones.
    """

    device: torch.device
    small: bool
    deadline: float
    console: Console
    simulator: Any = None
    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def accelerated(self) -> bool:
        """Whether the device has streams, events and memory of its own."""
        return seam.is_accelerator(self.device)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def record(self, case: str, mode: str, metric: str, value: float | str, unit: str) -> None:
        """Note one figure; one that is not finite is written as text."""
        if isinstance(value, float) and not math.isfinite(value):
            value, unit = str(value), "text"
        self.records.append(Record(BENCH, case, mode, metric, value, unit))

    def fail(self, case: str, sentence: str) -> None:
        """Note a demand that is broken: the exit code will say so."""
        self.failures.append(f"{case}: {sentence}")
        self.record(case, "", "failure", sentence, "text")
        self.console.print(f"failed: {sentence}", style="bold red", markup=False)

    def skip(self, case: str, mode: str, reason: str) -> None:
        """Say and note that something did not run."""
        self.record(case, mode, "skipped", reason, "text")
        self.console.print(f"{mode or case}: skipped: {reason}", style="yellow", markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(*columns, title=title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


class Marks:
    """Moments of the compute stream; on a plain CPU the host is the compute stream."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.accelerated = seam.is_accelerator(where)

    def now(self, stream: Any = None) -> Any:
        """A moment after all that is queued on ``stream`` (the current one if None)."""
        if not self.accelerated:
            return time.perf_counter()
        event: Any = torch.Event(device=self.where, enable_timing=True)
        event.record(stream if stream is not None else torch.accelerator.current_stream(self.where))
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two moments; both must have happened (synchronise first)."""
        if not self.accelerated:
            return float(second - first)
        return float(first.elapsed_time(second)) / 1e3

    def host(self, simulator: Any) -> float:
        """Seconds on the host's clock, which is a virtual one where the device is simulated."""
        return float(simulator.now()) if simulator is not None else time.perf_counter()

    def repeated(self, run: Callable[[], object], repeats: int, *, warmup: int = 2, stream: Any = None) -> list[float]:
        """Seconds of each of ``repeats`` runs, back to back on one stream, after ``warmup`` more."""
        for _ in range(warmup):
            run()
        marks = [self.now(stream)]
        for _ in range(repeats):
            run()
            marks.append(self.now(stream))
        seam.synchronize(self.where)
        return [self.between(a, b) for a, b in pairwise(marks)]


def median(values: Iterable[float]) -> float:
    """The median of one or more values."""
    return statistics.median(list(values))


def clear(where: torch.device) -> None:
    """Collect garbage and give the device's cached memory back, so that what comes next starts alike."""
    gc.collect()
    if seam.is_accelerator(where):
        torch.accelerator.synchronize(where)
        torch.accelerator.empty_cache()


def device_free_bytes(where: torch.device) -> int:
    """Bytes that can still be allocated on an accelerator, or on the host where there is none."""
    if not seam.is_accelerator(where):
        return host_free_bytes()
    ask = getattr(torch.accelerator, "get_memory_info", None)  # newer than torch 2.10
    free, _ = ask(where) if ask is not None else torch.get_device_module(where).mem_get_info()
    return int(free)


def held_bytes(where: torch.device) -> int:
    """Bytes that tensors on an accelerator asked for.

    Not the allocator's blocks: it may hand out one that is larger, which looks like a leak.
    """
    stats: dict[str, int] = torch.accelerator.memory_stats(where)
    return int(stats.get("requested_bytes.all.current") or torch.accelerator.memory_allocated(where))


def host_free_bytes() -> int:
    """Bytes that this process may still take from the host: the system's word, or its container's if that is less."""
    free = [GIB]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
        free = [int(lines["MemAvailable"].split()[0]) * 1024]
    return min(free + list(_container_free()))


def _container_free() -> Iterator[int]:
    """Yield what a control group leaves, version 2 then version 1."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bound, taken = (Path(p).read_text(encoding="utf-8").strip() for p in (limit, used))
        except OSError:
            continue
        if bound.isdigit() and taken.isdigit():
            yield max(int(bound) - int(taken), 0)


def mib(nbytes: float) -> str:
    """Bytes as MiB."""
    return f"{nbytes / MIB:,.1f}"


def seconds(value: float) -> str:
    """A duration in the unit that suits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.2f} us"
