"""``lowtide bench sim-optimizer``: the optimizer of a real model on a simulated device, plain and swapped.

Law: no kernel runs and nothing is timed by the clock on the wall. The floor is that of the link: the bytes that a
parameter needs in each direction, by the direction's bandwidth. ``peak`` is what a step holds beside what is there
between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lowtide
import lowtide.sim
from lowtide.bench.sim import described, shape_of
from lowtide.bench.sim_step import Work
from lowtide.device import current_stream
from lowtide.measure import Record, write_records
from lowtide.optim.swap import SwapOptimizer
from lowtide.residency.room import assuming_host_bytes
from lowtide.sim import Simulator

__all__ = ["run"]

BENCH = "bench sim-optimizer"
GIB = 1 << 30
PLAIN = "masters stay"


@dataclass(frozen=True)
class _Mode:
    """How masters and state are kept, and the bytes of a parameter that must cross the link each way."""

    name: str
    master: str
    tier: str | None
    moving: int
    overlap: bool = False


_MODES = (
    _Mode(PLAIN, "fp32", "device", 0),
    _Mode("masters and state swapped", "fp32", None, 12),
    _Mode("residual and state swapped", "residual", None, 10),
    _Mode("the same, overlap=True", "residual", None, 10, overlap=True),
)


@dataclass(frozen=True)
class _Stepped:
    """One step of the optimizer: virtual seconds, bytes at its peak and between steps, beside weights and gradients."""

    seconds: float
    out: float
    inward: float
    peak: int
    resident: int
    whole: float  # seconds of all micro-batches and the step after them


@dataclass(frozen=True)
class _Setting:
    """What all modes share: parameters with gradients, a micro-batch, and the link's bytes a second."""

    sim: Simulator
    parameters: list[nn.Parameter]
    micro_batch: Callable[[], None]
    accumulation: int
    rate: float
    swap_times: int

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters)


def _micro_batch(work: Work) -> Callable[[], None]:
    """A forward and a backward in which every layer recomputes; gradients are added to those that are there."""
    for layer in work.model.blocks:
        lowtide.checkpoint_wrapper(layer)

    def run() -> None:
        work.model(work.inputs).backward(work.gradient)

    return run


def _whole(setting: _Setting, optimizer: torch.optim.Optimizer) -> float:
    """Seconds from the end of one step to that of the next, as the compute sees them: what runs on beside it counts."""
    ends = []
    for _ in range(2):
        for _ in range(setting.accumulation):
            setting.micro_batch()
        optimizer.step()
        current_stream(setting.sim.device).synchronize()  # type: ignore[attr-defined]
        ends.append(setting.sim.now())
    return ends[1] - ends[0]


def _measured(setting: _Setting, mode: _Mode) -> tuple[_Stepped, SwapOptimizer]:
    """The third step: the first makes the state, the second starts from it."""
    sim = setting.sim
    sim.synchronize()
    own = sim.memory().active
    inner = torch.optim.AdamW(setting.parameters, lr=1e-3, fused=True)
    with assuming_host_bytes(1 << 60):  # without computing, nothing is written to it
        optimizer = lowtide.swap_optimizer(
            inner, master=mode.master, tier=mode.tier, swap_times=setting.swap_times, overlap=mode.overlap
        )
    for _ in range(2):
        optimizer.step()
    sim.synchronize()
    sim.reset()
    sim.reset_peaks()
    resident = sim.memory().active
    optimizer.step()
    seconds = sim.synchronize()
    busy = sim.busy()
    peak = sim.memory().peak_active - resident
    whole = _whole(setting, optimizer)
    return _Stepped(seconds, busy.out, busy.inward, peak, resident - own, whole), optimizer


def _figures(setting: _Setting, mode: _Mode, plain: _Stepped | None) -> tuple[_Stepped, dict[str, tuple[float, str]]]:
    seen, optimizer = _measured(setting, mode)
    report = optimizer.report()
    elements = setting.elements
    floor = mode.moving * elements / setting.rate
    found: dict[str, tuple[float, str]] = {
        "step_seconds": (seen.seconds, "s"),
        "floor_seconds": (floor, "s"),
        "over_floor": (seen.seconds / floor - 1 if floor else 0.0, "ratio"),
        "peak_bytes": (seen.peak, "B"),
        "two_buckets_bytes": (report.window_bytes if mode.tier is None else 0, "B"),
        "over_plain_with_accumulation": (seen.whole / (plain or seen).whole - 1, "ratio"),
        "whole_seconds": (seen.whole, "s"),
        "resident_bytes_a_parameter": (seen.resident / elements, "B"),
        "moving_bytes_a_parameter": (report.moving_bytes / elements, "B"),
        "out_utilisation": (seen.out / seen.seconds, "ratio"),
        "in_utilisation": (seen.inward / seen.seconds, "ratio"),
    }
    return seen, found


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f}"


def _share(value: float) -> str:
    return f"{value * 100:.2f} %"


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step, ms", _milliseconds),
    "floor_seconds": ("link floor, ms", _milliseconds),
    "over_floor": ("over floor", _share),
    "peak_bytes": ("peak, GiB", lambda value: f"{value / GIB:.3f}"),
    "two_buckets_bytes": ("two buckets, GiB", lambda value: f"{value / GIB:.3f}"),
    "resident_bytes_a_parameter": ("resident, B a parameter", "{:.3f}".format),
    "over_plain_with_accumulation": ("whole step over plain", _share),
}


def _measure(setting: _Setting) -> Iterator[tuple[str, dict[str, tuple[float, str]]]]:
    plain: _Stepped | None = None
    for mode in _MODES:
        seen, figures = _figures(setting, mode, plain)
        plain = plain or seen
        yield mode.name, figures


def run(
    device: str,
    model: str,
    json: Path | None,
    *,
    layers: int | None,
    seq: int,
    batch: int,
    accumulation: int,
    swap_times: int,
    link: float | None,
) -> int:
    """Measure every mode, print a table, and write records. Memory is taken to be enough for the plain one."""
    shape = shape_of(model, layers)
    # As much memory as the plain one needs, so that it can be compared.
    description = described(device, link, capacity=1e9)
    sim = lowtide.sim.start(description, compute=False, checks=False)
    rate = min(description.link_out, description.link_in)
    work = Work.build(shape, seq, batch, ends=True)
    parameters = list(work.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    setting = _Setting(sim, parameters, _micro_batch(work), accumulation, rate, swap_times)
    table = Table(title=f"{model}, {setting.elements / 1e9:.2f} billion bf16 parameters, {device}: simulated")
    table.add_column("AdamW, fused")
    for title, _ in _COLUMNS.values():
        table.add_column(title, justify="right")
    found: list[Record] = []
    for name, figures in _measure(setting):
        table.add_row(name, *(shown(figures[metric][0]) for metric, (_, shown) in _COLUMNS.items()))
        found += [
            Record(BENCH, f"{model} on {device}", name, key, value, unit) for key, (value, unit) in figures.items()
        ]
    Console().print(table)
    if json is not None:
        write_records(json, found)
    return 0
