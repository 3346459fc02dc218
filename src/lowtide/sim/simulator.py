"""The running simulation, as Python sees it.

Holds :class:`Simulator` and the plain records that it answers with. Law: it
never changes what a program computes; it only reads the device's counters,
lets the host wait, and lets virtual time pass where it is told to.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lowtide.sim.describe import Description
from lowtide.sim.labels import ModuleLabels

__all__ = ["Access", "Busy", "Copied", "Memory", "MemoryPoint", "Race", "Simulator", "Span", "Trace"]


@dataclass(frozen=True)
class Access:
    """One access of a block: the operator, the stream (or the host), and the Python stack, innermost frame first."""

    operator: str
    stream: str
    stack: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.operator} on {self.stream}", *(f"    {line}" for line in self.stack)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Race:
    """Two accesses of one block that nothing orders, at least one of which writes or frees."""

    kind: str
    block: int
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.kind}, block #{self.block}:\n  first  {self.first}\n  second {self.second}"


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
        allocated: what tensors hold.
        active: the same, and what is freed while a stream may still use it.
        reserved: what a caching allocator holds of the device (with ``caching=True``, else ``active``).
        capacity: where allocation ends.
    """

    allocated: int
    active: int
    reserved: int
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    capacity: int


@dataclass(frozen=True)
class Busy:
    """Virtual seconds for which each engine worked since the last reset; ``out`` is from the device to the host."""

    compute: float
    out: float
    inward: float
    host: float


@dataclass(frozen=True)
class Copied:
    """Bytes that crossed the link since the last reset."""

    out: int
    inward: int


@dataclass(frozen=True)
class Span:
    """One piece of work: ``kind`` is ``"kernel"``, ``"out"`` or ``"in"``; times in virtual seconds."""

    name: str
    kind: str
    device: int
    stream: int
    start: float
    end: float
    bytes: int
    module: str


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes of a device at a moment of the host's virtual time."""

    device: int
    time: float
    allocated: int
    active: int


@dataclass(frozen=True)
class Trace:
    """Everything that ran since the last reset, in the order of launches."""

    spans: list[Span]
    memory: list[MemoryPoint]


class Simulator:
    """The simulated accelerator of this process. Made by :func:`lowtide.sim.start`."""

    def __init__(self, native: ModuleType, description: Description, capacity: int) -> None:
        self._native: Any = native
        self._labels = ModuleLabels(native)
        self.description = description
        self.capacity = capacity
        # Called last: what was registered later may still run backward.
        atexit.register(native.close)

    @property
    def device(self) -> torch.device:
        """The current device."""
        return torch.device("sim", self._native.current_device())

    # ---- correctness ---------------------------------------------------------------------------

    def races(self) -> list[Race]:
        """Return the races so far. The host is part of it: its reads and writes of pinned memory in flight count."""
        return [
            Race(kind, block, *(Access(operator, stream, tuple(stack)) for operator, stream, stack in accesses))
            for kind, block, *accesses in self._native.races()
        ]

    # ---- memory --------------------------------------------------------------------------------

    def memory(self, index: int = 0) -> Memory:
        """Bytes of a device now, and their peaks since :meth:`reset_peaks`."""
        return Memory(*self._native.memory(index))

    def reset_peaks(self, index: int = 0) -> None:
        """Let the peaks begin at what is there now."""
        self._native.reset_peaks(index)

    # ---- time ----------------------------------------------------------------------------------

    def now(self) -> float:
        """Virtual seconds of the host."""
        return float(self._native.now())

    def synchronize(self) -> float:
        """Let the host wait for every stream of every device; returns :meth:`now`."""
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        return self.now()

    def spend(self, seconds: float) -> None:
        """Let the host be busy for so long, as with loading data."""
        self._native.spend(seconds)

    def busy(self, index: int = 0) -> Busy:
        """Seconds of work of each engine of a device; ``host`` is what launches (and :meth:`spend`) took."""
        return Busy(*self._native.engines(index)[:4])

    def copied(self, index: int = 0) -> Copied:
        """Bytes that crossed a device's link."""
        out, inward = self._native.engines(index)[4:]
        return Copied(int(out), int(inward))

    @property
    def launches(self) -> int:
        """Kernels and copies since the last reset."""
        return int(self._native.launches())

    def operators(self) -> dict[str, int]:
        """Launches since the last reset, by operator."""
        return dict(self._native.operators())

    def trace(self) -> Trace:
        """What ran, with ``trace=True``; see :func:`lowtide.sim.perfetto.write_trace`."""
        spans, points = self._native.trace()
        return Trace(
            [
                Span(name, kind, device, stream, start, end, int(nbytes), module)
                for name, kind, device, stream, start, end, nbytes, module in spans
            ],
            [MemoryPoint(*point) for point in points],
        )

    # ---- settings ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Wait for all work; then begin anew with the clock, the races, the counters and the trace. Memory stays."""
        self._native.reset()

    def set(
        self,
        *,
        compute: bool | None = None,
        checks: bool | None = None,
        poison: bool | None = None,
        trace: bool | None = None,
        stacks: bool | None = None,
        link_out: float | None = None,
        link_in: float | None = None,
        link_latency: float | None = None,
    ) -> None:
        """Change settings in mid-run; only what is given changes.

        Memory that was written without computing holds nothing: switch ``compute`` on before the tensors are made.

        Args:
            link_out: bytes a second from the device, from the next copy on; ``math.inf`` is allowed.
            link_in: the same to the device.
            link_latency: seconds that each copy takes besides.
        """
        given = {"compute": compute, "checks": checks, "poison": poison, "trace": trace, "stacks": stacks}
        for name, value in given.items():
            if value is not None:
                self._native.set_option(name, value)
        if trace is not None:
            self._labels.watch(on=trace)
        link = {"out": link_out, "in": link_in, "latency": link_latency}
        self._native.set_link({name: value for name, value in link.items() if value is not None})
