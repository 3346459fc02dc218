"""What a mode keeps, what its step peaks at, and what its backward computes again.

Law: bytes from the allocator's events, operations from the operators that ran;
the same input, weights and kept set for every mode. Takes no times.
"""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lowtide.bench.flops import backward_flops
from lowtide.bench.modes import KEPT_SETS, Kept, Mode, operator_counts
from lowtide.device import training_device
from lowtide.measure import MemoryCurve, memory_curve

__all__ = ["Footprint", "Llama", "bytes_at", "footprint", "tape_bytes"]

FORWARD = "forward"


@dataclass(frozen=True)
class Llama:
    """The shape of the notes' table: blocks of width 256, 4 heads, hidden width 688, 4 sequences of 512."""

    blocks: int = 1
    batch: int = 4
    tokens: int = 512
    width: int = 256

    def inputs(self) -> Tensor:
        """Return the input on the training device, made from its own seed."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.tokens, self.width, generator=draw).to(training_device())

    @property
    def input_bytes(self) -> int:
        """Bytes of one block's input."""
        return self.batch * self.tokens * self.width * 4


@dataclass(frozen=True)
class Footprint:
    """Bytes and operations of one training step.

    Args:
        kept_bytes: alive when forward has ended, input and output included.
        peak_bytes: most bytes of the step, parameter gradients included.
        peak_without_gradients: the same where each gradient is dropped as soon as it is complete.
        backward_flops: operations of backward, those computed again included.
    """

    kept_bytes: int
    peak_bytes: int
    peak_without_gradients: int
    backward_flops: int


def bytes_at(curve: MemoryCurve, phase: str) -> int:
    """Return the bytes in use when a phase of the curve ended."""
    end = next(p.end for p in curve.phases if p.name == phase)
    return [size for when, size in curve.points if when <= end][-1]


def _step(model: nn.Module, mode: Mode, inputs: Tensor) -> None:
    x = inputs.clone().requires_grad_()
    with record_function(FORWARD), mode.around():
        y = model(x)
        loss = y.sum()
    loss.backward()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def prepared(origin: nn.Module, mode: Mode, kept: str | None, inputs: Tensor) -> nn.Module:
    """Copy the model to the input's device and wrap its blocks for the mode, with the named kept set if any."""
    model = copy.deepcopy(origin).to(inputs.device)
    blocks: Any = model.blocks
    policy: Callable[[Any, Any], Kept] | None = None
    if kept is not None and mode.selective:
        counts = operator_counts(blocks[0], inputs)

        def policy(yes: Any, no: Any) -> Kept:
            return Kept(KEPT_SETS[kept], counts, yes, no)

    mode.prepare(model, policy)
    return model


def footprint(origin: nn.Module, mode: Mode, kept: str | None, inputs: Tensor, *, flops: bool = True) -> Footprint:
    """Measure one mode on a copy of the model; runs four steps, two of them under the profiler."""
    model = prepared(origin, mode, kept, inputs)
    _step(model, mode, inputs)  # learns the order, fills caches
    _clear(model)
    whole = memory_curve(lambda: _step(model, mode, inputs))
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters()]
    _clear(model)
    without = memory_curve(lambda: _step(model, mode, inputs))
    for hook in hooks:
        hook.remove()
    operations = 0
    if flops:
        _clear(model)
        with mode.around():
            loss = model(inputs.clone().requires_grad_()).sum()
        operations = backward_flops(loss)
    return Footprint(bytes_at(whole, FORWARD), whole.peak_bytes, without.peak_bytes, operations)


def tape_bytes(origin: nn.Module, mode: Mode, inputs: Tensor) -> int:
    """Return the bytes of Python objects that one block's region holds after forward, by tracemalloc."""
    model = prepared(origin, mode, None, inputs)
    blocks = len(list(model.blocks))  # type: ignore[arg-type]
    model(inputs).sum().backward()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        loss = model(inputs).sum()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    loss.backward()
    return held // blocks
