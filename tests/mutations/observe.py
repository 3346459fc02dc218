"""Runs one workload and writes down all that can tell a fault: races, bits, what is left, peak and time."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .kit import Kit
from .workloads import Workload

__all__ = ["Kill", "Observation", "count_pins", "judge", "observe"]

# What a graph owns.
_MORTAL = frozenset(
    (
        "Tape",
        "Value",
        "Handle",
        "Node",
        "FunctionNode",
        "StorageRecord",
        "SwapTensor",
        "Storage",
        "Visit",
        "_StreamCopy",
    )
)


@dataclass
class Observation:
    """One run of one workload: plain data."""

    error: str | None = None
    races: int = 0
    race: str = ""
    values: list[int] = field(default_factory=list)
    nans: int = 0
    device_left: int = 0
    host_left: int = 0
    visits_left: int = 0
    pins_left: int = 0
    objects_left: int = 0
    peaks: list[int] = field(default_factory=list)  # peak and bytes held, phase by phase
    seconds: float = 0.0
    launches: int = 0
    copied_out: int = 0
    copied_in: int = 0
    host_bytes: int = 0
    traffic: dict[str, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)  # how many copies ran on which stream, named by first use


@dataclass(frozen=True)
class Kill:
    """One reason why a mutant does not survive."""

    kind: str  # race, values, error, leak, law
    what: str


class _Pins:
    """Counts the weak pins of storages that lowtide takes and does not give back."""

    def __init__(self) -> None:
        self.open = 0

    def install(self, shim: Any) -> None:
        take, again, free = shim.take_weak_storage, shim.pin_again, shim.free_weak_storage

        def counted_take(storage: Any) -> Any:
            self.open += 1
            return take(storage)

        def counted_again(key: Any) -> Any:
            made = again(key)
            self.open += made is not None
            return made

        def counted_free(key: Any) -> None:
            self.open -= 1
            free(key)

        shim.take_weak_storage, shim.pin_again, shim.free_weak_storage = counted_take, counted_again, counted_free


_pins = _Pins()


def count_pins(shim: Any) -> None:
    """Begin to count; called once in a process that has imported lowtide."""
    _pins.install(shim)


def observe(sim: Any, workload: Workload, *, plain: bool) -> Observation:
    """Run a workload on a device and a manager that remember nothing."""
    seen = Observation()
    unraisable: list[str] = []
    sys.unraisablehook = lambda event: unraisable.append(f"{type(event.exc_value).__name__}: {event.exc_value}")
    gc.collect()
    gc.disable()
    sim.reset()
    sim.reset_peaks()
    kit = Kit(sim, plain=plain)
    kit.configure(min_bytes=0)
    before, pins = sim.memory().allocated, _pins.open
    try:
        torch.manual_seed(3)
        # On one thread: a worker of autograd lets go of its last buffers when it comes to it, and bytes would vary.
        with torch.autograd.set_multithreading_enabled(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some programs leave a swap without a schedule on purpose
            workload(kit)
        seen.seconds = sim.synchronize()
        kit.mark()
        seen.peaks = kit.peaks
        _count(seen, sim, plain=plain)
        if not plain:
            _close(seen, kit.manager())
    except Exception as error:  # noqa: BLE001 - whatever a mutant raises is the finding
        seen.error = _describe(error)
    seen.races, seen.race = _describe_races(sim.races())
    seen.values = [int(bits.item()) for bits, _ in kit.seen]
    seen.nans = sum(bool(total.isnan().item()) for _, total in kit.seen)
    kit.seen.clear()
    if seen.error is None and unraisable:
        seen.error = f"in a destructor: {unraisable[0]}"
    seen.device_left = sim.memory().allocated - before
    seen.pins_left = _pins.open - pins
    seen.objects_left = _count_objects()
    gc.enable()
    return seen


def _describe_races(races: Sequence[Any]) -> tuple[int, str]:
    if not races:
        return 0, ""
    first, second = races[0].first, races[0].second
    return len(races), (
        f"{races[0].kind}: {first.operator} on {first.stream}, then {second.operator} on {second.stream}"
    )


def _count_objects() -> int:
    """What dies with its graph, by reference counting alone: nothing is collected here."""
    kinds = [type(thing) for thing in gc.get_objects()]
    return sum(kind.__name__ in _MORTAL and kind.__module__.startswith("lowtide.") for kind in kinds)


def _describe(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first} [{frame.name}]"


def _count(seen: Observation, sim: Any, *, plain: bool) -> None:
    seen.launches = sim.launches
    copied = sim.copied()
    seen.copied_out, seen.copied_in = copied.out, copied.inward
    if plain:
        return
    names: dict[tuple[str, int], str] = {}
    for span in sim.trace().spans:
        if span.kind != "kernel":
            name = names.setdefault((span.kind, span.stream), f"{span.kind} {len(names)}")
            seen.streams[name] = seen.streams.get(name, 0) + 1


def _close(seen: Observation, manager: Any) -> None:
    """Count what the manager still has, and let it give everything back."""
    seen.visits_left = len(manager.sequence().schedule)
    seen.traffic = {name: getattr(manager.traffic, name) for name in ("waits", "late_loads", "bound_waits")}
    pools = [carrier.pool for carrier in manager._carriers.values()]
    idle = sum(pool.idle_bytes for pool in pools)
    seen.host_left = manager.lower_bytes()
    seen.host_bytes = sum(pool.allocated_bytes for pool in pools)
    if idle + seen.host_left != seen.host_bytes:
        raise AssertionError(f"the pool counts {idle} idle, {seen.host_left} lent and {seen.host_bytes} in all")
    manager.reset()
    seen.host_left += sum(pool.allocated_bytes for pool in pools)


def judge(got: Observation, want: Observation) -> list[Kill]:
    """Why a run is not that of the unmutated library; empty if it is."""
    if got.error is not None:
        return [Kill("error", got.error)]
    kills = []
    if got.races:
        kills.append(Kill("race", f"{got.races}: {got.race}"))
    if got.nans > want.nans:
        kills.append(Kill("values", f"NaN in {got.nans} of {len(got.values)} results"))
    elif got.values != want.values:
        differ = sum(g != w for g, w in zip(got.values, want.values, strict=False))
        kills.append(Kill("values", f"{differ} of {len(want.values)} results have other bits"))
    for name, unit in (
        ("device_left", "bytes of the device"),
        ("host_left", "bytes of the host"),
        ("visits_left", "visits of the schedule"),
        ("pins_left", "pinned storages"),
        ("objects_left", "objects of lowtide"),
    ):
        more = getattr(got, name) - getattr(want, name)
        if more:
            kills.append(Kill("leak", f"{more} {unit} left"))
    kills.extend(Kill("law", text) for text in _laws(got, want))
    return kills


def _laws(got: Observation, want: Observation) -> list[str]:
    broken = []
    if len(got.peaks) != len(want.peaks):
        broken.append(f"{len(got.peaks)} phases, not {len(want.peaks)}")
    for phase, (is_now, was) in enumerate(zip(got.peaks, want.peaks, strict=False)):
        if is_now > was:
            what = "held after" if phase % 2 else "at the peak of"
            broken.append(f"{is_now:,} bytes {what} phase {phase // 2}, not {was:,}")
            break
    for name, unit, factor in (
        ("seconds", "ns of virtual time", 1e9),
        ("host_bytes", "bytes of host memory", 1),
    ):
        is_now, was = getattr(got, name), getattr(want, name)
        if is_now > was:
            broken.append(f"{is_now * factor:,.0f} {unit}, not {was * factor:,.0f}")
    if got.launches > want.launches:
        broken.append(f"{got.launches} kernels, not {want.launches}")
    if (got.copied_out, got.copied_in) != (want.copied_out, want.copied_in):
        broken.append(
            f"bytes down and up {got.copied_out} and {got.copied_in}, not {want.copied_out} and {want.copied_in}"
        )
    if got.streams != want.streams:
        broken.append(f"copies by stream {got.streams}, not {want.streams}")
    broken.extend(
        f"{name} {got.traffic[name]}, not {count}" for name, count in want.traffic.items() if got.traffic[name] > count
    )
    return broken
