"""The simulated accelerator: a device of torch that needs no hardware.

``lowtide.sim.start()`` gives torch a device ``sim``. Its kernels compute what
the CPU's do; its streams, events and copies behave as an accelerator's, in a
virtual time that depends on the program alone; its memory has a capacity and
exact counters. Every access is checked against every other: what nothing
orders is reported as a race, with both places in the program. Without
computing, a model that fits no machine at hand shows its memory and its time.

The rest of lowtide never imports this package. Times are simulated: they are
as good as the device's description, and no measurement.

>>> import torch
>>> import lowtide.sim                                # doctest: +SKIP
>>> sim = lowtide.sim.start("tiny")                   # doctest: +SKIP
>>> (torch.ones(4, device="sim") * 2).sum().item()    # doctest: +SKIP
8.0
>>> sim.races()                                       # doctest: +SKIP
[]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import UnsupportedError, explain
from lowtide.sim import backend, build, tape_cost
from lowtide.sim.describe import Description, DescriptionError
from lowtide.sim.simulator import Access, Busy, Copied, Memory, MemoryPoint, Race, Simulator, Span, Trace

__all__ = [
    "Access",
    "Busy",
    "Copied",
    "Description",
    "DescriptionError",
    "Memory",
    "MemoryPoint",
    "Race",
    "Simulator",
    "Span",
    "Trace",
    "active",
    "start",
]


@dataclass(frozen=True)
class _Settings:
    description: Description
    capacity: int
    count: int
    shared_link: bool
    caching: bool


_running: tuple[_Settings, Simulator] | None = None


def active() -> Simulator | None:
    """Return the simulator of this process, or None if none was started."""
    return _running[1] if _running is not None else None


def _rates(description: Description, *, shared_link: bool) -> dict[str, float]:
    d = description
    return {
        "half": d.flops_half * d.flops_efficiency,
        "single": d.flops_single * d.flops_efficiency,
        "memory": d.memory_rate * d.memory_efficiency,
        "out": d.link_out,
        "in": d.link_in,
        "pageable": d.pageable_share,
        "link_latency": d.link_latency,
        "kernel": d.kernel_latency,
        "launch": d.launch,
        "half_duplex": d.duplex == "half",
        "shared_link": shared_link,
    }


def start(
    device: str | Description = "h100-80gb",
    *,
    compute: bool = True,
    capacity: int | None = None,
    link: float | None = None,
    count: int = 1,
    shared_link: bool = False,
    checks: bool = True,
    poison: bool = True,
    caching: bool = False,
    trace: bool = False,
) -> Simulator:
    """Make the simulated accelerator this process's accelerator.

    Compiles the device the first time (half a minute). One process has one: it
    takes ``torch.accelerator`` over, so that a program that picks its device
    there runs unchanged; CUDA cannot be used beside it.

    Args:
        device: name of a description (:meth:`Description.names`), or one of your own.
        compute: False runs no kernel: shapes, bytes, times and races are the same, values are not there.
        capacity: bytes of memory, instead of the description's.
        link: bytes a second in each direction, instead of the description's.
        count: how many such devices.
        shared_link: all devices and both directions share one link.
        checks: look for races.
        poison: NaN in memory that is fresh, freed, or whose copy has not arrived.
        caching: also model a caching allocator, for :attr:`Memory.reserved`, and let it run out of memory.
        trace: keep every kernel and copy, for :func:`lowtide.sim.perfetto.write_trace`.

    Raises:
        UnsupportedError: it runs already with other settings, torch has another accelerator, or nothing compiles it.
        DescriptionError: no such device.
    """
    global _running  # noqa: PLW0603 - torch has one such device, so has the process
    description = Description.named(device) if isinstance(device, str) else device
    if link is not None:
        description = description.with_(link=link)
    if capacity is not None:
        description = description.with_(capacity=capacity)
    wanted = _Settings(description, description.capacity, count, shared_link, caching)
    if _running is None:
        _running = (wanted, _start(wanted))
    elif _running[0] != wanted:
        raise UnsupportedError(
            explain(
                "a process has one simulated accelerator",
                expected=f"the settings that it was started with, {_running[0]}",
                got=str(wanted),
                where="lowtide.sim.start",
                remedy="Start another process.",
            )
        )
    simulator = _running[1]
    simulator.set(compute=compute, checks=checks, poison=poison, trace=trace, stacks=checks)
    return simulator


def _start(settings: _Settings) -> Simulator:
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is not None:
        raise UnsupportedError(
            explain(
                "the simulated accelerator takes torch.accelerator over",
                expected="a process in which torch sees no other accelerator",
                got=str(present),
                where="lowtide.sim.start",
                remedy="Hide it, as with CUDA_VISIBLE_DEVICES= in the environment.",
            )
        )
    description = settings.description
    native = build.load()
    rates = _rates(description, shared_link=settings.shared_link)
    native.start(settings.count, settings.capacity, description.allocation_round, settings.caching, rates)
    backend.install(native, settings.count)
    tape_cost.charge(native.spend, recorded=description.host_recorded, replayed=description.host_replayed)
    return Simulator(native, description, settings.capacity)
