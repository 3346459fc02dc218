"""One training step whose activations go to a file, against the plain step and a closed form.

Law: the closed form uses the bandwidth measured in the same run on the same
directory, and says what an ideal overlap would cost: each half of the step
takes the longer of its computation and its copies.
"""

from __future__ import annotations

import copy
import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

import lowtide
from lowtide import SwapManager, swap_wrapper
from lowtide.bench.models import Gpt
from lowtide.bench.timing import Seconds
from lowtide.measure import MemoryCurve, memory_curve

__all__ = ["SwapToFile", "file_bandwidth", "swap_to_file"]

_CHUNK = 4 << 20
RESIDENT = 2  # layers whose values are on the device in backward: the running one, and one in flight behind it
BLOCKS = "backward of the blocks"


@dataclass(frozen=True)
class SwapToFile:
    """What the swapped and the plain step took, and what they should have taken.

    Args:
        plain, swapped: median seconds of one step.
        closed_form: seconds of the step with ideal overlap at the measured bandwidth.
        out_bytes: bytes that one step wrote to the lower tier.
        peak_bytes, plain_peak_bytes: most bytes of one step.
        peak_without_gradients: the same where each parameter gradient is dropped as soon as it is complete.
        formula_bytes: what that should be, from the plain curve: less the layers that are away at each moment.
        write_rate, read_rate: bytes a second of the directory, alone.
    """

    plain: float
    swapped: float
    closed_form: float
    out_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    peak_without_gradients: int
    formula_bytes: int
    write_rate: float
    read_rate: float

    @property
    def ratio(self) -> float:
        """Swapped over plain."""
        return self.swapped / self.plain

    @property
    def allowed(self) -> float:
        """The ratio that the step may cost: the larger of 1.10 and 1.05 of the closed form."""
        return max(1.10, 1.05 * self.closed_form / self.plain)


def _open(path: Path, flags: int) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def file_bandwidth(directory: Path, size: int) -> tuple[float, float]:
    """Write and read a file of ``size`` bytes in 4 MiB pieces, uncached where the file system can.

    Returns:
        Bytes a second of writing and of reading.
    """
    path, count = directory / "bandwidth.probe", max(1, size // _CHUNK)
    with mmap.mmap(-1, _CHUNK) as buffer:
        buffer.write(os.urandom(_CHUNK))
        try:
            handle = _open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            try:
                begun = time.perf_counter()
                for number in range(count):
                    os.pwrite(handle, buffer, number * _CHUNK)
                written = time.perf_counter() - begun
            finally:
                os.close(handle)
            handle = _open(path, os.O_RDONLY)
            try:
                begun = time.perf_counter()
                for number in range(count):
                    os.preadv(handle, [buffer], number * _CHUNK)
                taken = time.perf_counter() - begun
            finally:
                os.close(handle)
        finally:
            path.unlink(missing_ok=True)
    return count * _CHUNK / written, count * _CHUNK / taken


def _step(model: Gpt, tokens: Tensor) -> Seconds:
    for p in model.parameters():
        p.grad = None
    begun = time.perf_counter()
    loss = model(tokens).square().mean()
    middle = time.perf_counter()
    loss.backward()
    return Seconds(middle - begun, time.perf_counter() - middle)


def swap_to_file(
    *, layers: int = 8, width: int = 256, rounds: int = 5, batch: int = 8, length: int = 256
) -> SwapToFile:
    """Train a GPT plainly and with every layer's saved tensors in a file, step by step in turn."""
    torch.manual_seed(0)
    plain = Gpt(width, 4, layers)
    swapped = copy.deepcopy(plain)
    tokens = torch.randint(0, 256, (batch, length))
    with tempfile.TemporaryDirectory(prefix="lowtide-bench-") as directory:
        SwapManager().reset()
        SwapManager().configure(file_dir=directory)
        for block in swapped.blocks:
            swap_wrapper(block)
        handle = lowtide.auto(swapped)
        try:
            return _measure(plain, swapped, tokens, rounds, Path(directory))
        finally:
            handle.undo()
            SwapManager().reset()


def _measure(plain: Gpt, swapped: Gpt, tokens: Tensor, rounds: int, directory: Path) -> SwapToFile:
    for _ in range(3):
        _step(plain, tokens)
        _step(swapped, tokens)
    before = SwapManager().traffic.out_bytes
    _step(swapped, tokens)
    out_bytes = SwapManager().traffic.out_bytes - before
    write_rate, read_rate = file_bandwidth(directory, out_bytes)
    pairs = [(_step(plain, tokens), _step(swapped, tokens)) for _ in range(rounds)]
    base, moved = [p for p, _ in pairs], [s for _, s in pairs]
    ideal = max(_median(base, "forward"), out_bytes / write_rate) + max(
        _median(base, "backward"), out_bytes / read_rate
    )
    layers = len(plain.blocks)
    return SwapToFile(
        plain=_median(base, "step"),
        swapped=_median(moved, "step"),
        closed_form=ideal,
        out_bytes=out_bytes,
        peak_bytes=_curve(swapped, tokens).peak_bytes,
        plain_peak_bytes=_curve(plain, tokens).peak_bytes,
        peak_without_gradients=_without_gradients(swapped, tokens).peak_bytes,
        formula_bytes=_formula(_without_gradients(plain, tokens), layers, out_bytes // (layers - 1)),
        write_rate=write_rate,
        read_rate=read_rate,
    )


def _median(times: list[Seconds], part: str) -> float:
    return float(statistics.median(getattr(seconds, part) for seconds in times))


def _formula(plain: MemoryCurve, layers: int, layer_bytes: int) -> int:
    """Take off the plain curve what is away: all layers but the last before the blocks' backward, then all but two."""
    begin = next(p.start for p in plain.phases if p.name == BLOCKS)
    head = max(size for when, size in plain.points if when < begin)
    blocks = max(size for when, size in plain.points if when >= begin)
    return max(head - (layers - 1) * layer_bytes, blocks - (layers - RESIDENT) * layer_bytes)


def _curve(model: Gpt, tokens: Tensor) -> MemoryCurve:
    """Measure one step; the moment when backward reaches the last block is marked as a phase."""

    def mark(grad: Tensor) -> None:
        with record_function(BLOCKS):
            pass

    def watch(block: object, args: object, out: Tensor) -> None:
        out.register_hook(mark)

    for p in model.parameters():
        p.grad = None
    handle = model.blocks[-1].register_forward_hook(watch)
    try:
        return memory_curve(lambda: model(tokens).square().mean().backward())
    finally:
        handle.remove()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _without_gradients(model: Gpt, tokens: Tensor) -> MemoryCurve:
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters()]
    try:
        return _curve(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
