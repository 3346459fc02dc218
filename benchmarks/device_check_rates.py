"""The rates section of the device check: link, kernels, memory, and the host's time per operator.

Law: every figure is a median over repeats, after warm-up; link and kernels are
timed by the device's events, the host by its own clock. What a plain CPU has
not is left out and said.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device_check_base import MIB, Check, Marks, clear, device_free_bytes, median, seconds
from torch import Tensor, nn

from lowtide import checkpoint_wrapper
from lowtide import device as seam

__all__ = ["Link", "link_rates", "rates"]

CASE = "rates"


@dataclass(frozen=True)
class Link:
    """Measured rates of the link with large copies of pinned memory, in bytes a second.

    Args:
        duplex: time of both directions one after the other, by their time at once: 2 is full, 1 is half.
    """

    out: float
    inward: float
    duplex: float


def rates(check: Check) -> None:
    """Measure everything, most needed first."""
    if check.accelerated:
        _link(check)
        if check.simulator is None:  # pinning takes the host's time, which is not simulated
            _pinning(check)
    else:
        check.skip(CASE, "link", "not available on this device")
    clear(check.device)
    _kernels(check)
    clear(check.device)
    _host(check)
    _tape(check)


# ---------------------------------------------------------------- link


def _link(check: Check) -> None:
    largest = 4 if check.small else 256
    sizes = [size for size in (1, 4, 16, 64, 256) if size <= largest]
    rows = []
    for size in sizes:
        link = link_rates(check.device, size * MIB, repeats=3 if check.small else 10)
        check.facts["link"] = link
        rows.append([f"{size} MiB", f"{link.out / 1e9:.2f}", f"{link.inward / 1e9:.2f}", f"{link.duplex:.2f}"])
        for metric, value, unit in (
            ("link_out", link.out, "B/s"),
            ("link_in", link.inward, "B/s"),
            ("duplex", link.duplex, "ratio"),
        ):
            check.record(CASE, f"{size} MiB", metric, value, unit)
    check.table(
        "link, pinned memory (duplex: 2 full, 1 half)", ("copy", "to host GB/s", "to device GB/s", "duplex"), rows
    )


def link_rates(where: torch.device, nbytes: int, *, repeats: int) -> Link:
    """Time copies out, in, and both at once on two streams."""
    marks, out, inward = Marks(where), seam.new_stream(where), seam.new_stream(where)
    hosts = [seam.pinned_bytes(nbytes) for _ in range(2)]
    devices = [torch.zeros(nbytes, dtype=torch.uint8, device=where) for _ in range(2)]
    seam.synchronize(where)

    def send() -> None:
        with seam.use_stream(out):
            hosts[0].copy_(devices[0], non_blocking=True)

    def fetch() -> None:
        with seam.use_stream(inward):
            devices[1].copy_(hosts[1], non_blocking=True)

    alone = [median(marks.repeated(run, repeats, stream=stream)) for stream, run in ((out, send), (inward, fetch))]
    together = _together(marks, (out, send), (inward, fetch), repeats)
    return Link(nbytes / alone[0], nbytes / alone[1], sum(alone) / together)


Way = tuple[Any, Callable[[], None]]  # a stream, and one copy on it


def _together(marks: Marks, there: Way, back: Way, repeats: int) -> float:
    """Seconds of one copy in each direction when many of both are queued at once."""
    spans = []
    for _ in range(3):
        begun = marks.now(there[0])
        back[0].wait_event(begun)
        for _ in range(repeats):
            there[1]()
            back[1]()
        there[0].wait_stream(back[0])
        ended = marks.now(there[0])
        seam.synchronize(marks.where)
        spans.append(marks.between(begun, ended) / repeats)
    return median(spans)


def _pinning(check: Check) -> None:
    """Time the first allocation of a pinned buffer, which the pool pays once per buffer."""
    nbytes = (8 if check.small else 128) * MIB
    forget = getattr(torch.accelerator, "empty_host_cache", None)  # newer than torch 2.10
    if forget is not None:
        forget()
    taken, kept = [], []
    for _ in range(3):
        begun = time.perf_counter()
        kept.append(seam.pinned_bytes(nbytes))
        taken.append(time.perf_counter() - begun)
    check.record(CASE, "", "pinning_rate", nbytes / median(taken), "B/s")
    check.table(
        "pinning",
        ("buffer", "time", "GB/s"),
        [[f"{nbytes // MIB} MiB", seconds(median(taken)), f"{nbytes / median(taken) / 1e9:.2f}"]],
    )


# ---------------------------------------------------------------- kernels


def _kernels(check: Check) -> None:
    where, marks = check.device, Marks(check.device)
    big = check.accelerated and not check.small
    repeats = 10 if big else 5
    rows = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        side = (8192 if dtype is torch.bfloat16 else 4096) if big else 256
        a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
        taken = median(marks.repeated(lambda a=a, b=b: a @ b, repeats))  # type: ignore[misc]
        check.record(CASE, name, "matmul_rate", 2 * side**3 / taken, "FLOP/s")
        rows.append([f"matmul {name} {side}", seconds(taken), f"{2 * side**3 / taken / 1e12:.2f} TFLOP/s"])
    nbytes = min((1024 if big else 16) * MIB, device_free_bytes(where) // 8)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=where) for _ in range(2))
    taken = median(marks.repeated(lambda: target.copy_(source), repeats))
    check.record(CASE, "", "memory_copy_rate", 2 * nbytes / taken, "B/s")
    rows.append([f"copy {nbytes // MIB} MiB", seconds(taken), f"{2 * nbytes / taken / 1e9:.1f} GB/s"])
    check.table("kernels (fp32 as torch is set; a copy reads and writes)", ("kernel", "time", "rate"), rows)


# ---------------------------------------------------------------- host


def _host(check: Check) -> None:
    """Host time of one launch, and the least device time of one kernel."""
    where, marks = check.device, Marks(check.device)
    small, many = torch.zeros(16, device=where), 200
    launches = []
    for _ in range(10):
        seam.synchronize(where)
        begun = marks.host(check.simulator)
        for _ in range(many):
            small.add_(1.0)
        launches.append((marks.host(check.simulator) - begun) / many)
    seam.synchronize(where)
    rows = [["launch of one operator, host", seconds(median(launches))]]
    check.record(CASE, "", "launch", median(launches), "s")
    if check.accelerated:
        latency = _latency(check, marks, small, many)
        rows.append(["a smallest kernel in a full queue, device", seconds(latency)])
        check.record(CASE, "", "kernel_latency", latency, "s")
    check.table("per operator", ("what", "time"), rows)


def _latency(check: Check, marks: Marks, small: Tensor, many: int) -> float:
    """Queue small kernels behind a long one, so that the host is ahead and the device never waits for it."""
    side = 256 if check.small else 8192
    long = torch.zeros(side, side, device=check.device, dtype=torch.bfloat16)
    found = []
    for _ in range(5):
        for _ in range(4):
            long @ long
        begun = marks.now()
        for _ in range(many):
            small.add_(1.0)
        ended = marks.now()
        seam.synchronize(check.device)
        found.append(marks.between(begun, ended) / many)
    return median(found)


class _Chain(nn.Module):
    """Many operators on a tensor so small that only the host's time counts."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """Each result is needed by backward."""
        for _ in range(self.length):
            x = x.sin()
        return x


def _tape(check: Check) -> None:
    """Host time that the tape adds per operator: recorded in forward, replayed in backward (its launch included)."""
    length = 100 if check.small else 200
    plain, wrapped = _Chain(length), checkpoint_wrapper(_Chain(length), recompute="replay")
    spans: dict[str, list[tuple[float, float]]] = {"plain": [], "wrapped": []}
    gc.disable()
    try:
        for number in range(5 if check.small else 20):
            for name, module in (("plain", plain), ("wrapped", wrapped)):
                taken = _host_spans(check, module)
                if number >= 2:  # noqa: PLR2004 - the first two warm up
                    spans[name].append(taken)
    finally:
        gc.enable()
    added = [
        median(ours[part] - theirs[part] for ours, theirs in zip(spans["wrapped"], spans["plain"], strict=True))
        for part in (0, 1)
    ]
    rows = []
    for what, metric, value in (
        ("recorded in forward", "host_recorded", added[0] / length),
        ("replayed in backward, launch included", "host_replayed", added[1] / length),
    ):
        check.record(CASE, "", metric, value, "s")
        rows.append([what, seconds(value)])
    check.table("the tape, added per operator", ("operator", "time"), rows)


def _host_spans(check: Check, module: nn.Module) -> tuple[float, float]:
    marks = Marks(check.device)
    x = torch.ones(16, device=check.device, requires_grad=True)
    seam.synchronize(check.device)
    begun = marks.host(check.simulator)
    out = module(x).sum()
    middle = marks.host(check.simulator)
    out.backward()
    ended = marks.host(check.simulator)
    seam.synchronize(check.device)
    return middle - begun, ended - middle
