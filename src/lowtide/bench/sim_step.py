"""One training step of a model on the simulated device, under one policy: times, bytes, and what its copies cost.

Law: every figure is of the step after the first, which warms up and is thrown
away; virtual time only, so the same program gives the same figures. The
parameters' gradients are made anew in each step, and no optimizer runs.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.bench.sim_formula import Layers, Link
from lowtide.bench.sim_models import Llama, Shape
from lowtide.bench.sim_policies import Policy, worn
from lowtide.sim import Simulator
from lowtide.sim.perfetto import write_trace

__all__ = ["Seen", "Work", "layers_of", "lead_of", "link_of", "measure"]

DEVICE = "sim"  # a name of torch only once the simulator runs


@dataclass(frozen=True)
class Work:
    """A model on the simulated device, its input, and the gradient of its output.

    Without embedding and head a step is its layers and nothing else: backward
    starts from a given gradient. With several micro-batches it is that of a
    pipeline's stage: ``warm_up`` forwards, then a forward and the backward of the
    oldest in turn, then the backwards that are left.
    """

    shape: Shape
    tokens: int
    batch: int
    model: Llama
    inputs: Tensor
    gradient: Tensor
    micro_batches: int = 1
    warm_up: int = 0

    @staticmethod
    def build(
        shape: Shape, tokens: int, batch: int, *, ends: bool = False, micro_batches: int = 1, warm_up: int = 0
    ) -> Work:
        """Allocate the model in bfloat16; no kernel runs."""
        with torch.device("meta"):
            model = Llama(shape.with_layers(1), tokens, ends=ends)
            # One layer is initialised, which is slow, and copied.
            model.blocks.extend([copy.deepcopy(model.blocks[0]) for _ in range(shape.layers - 1)])
        model = model.to(torch.bfloat16).to_empty(device=DEVICE)
        width = shape.vocabulary if ends else shape.width
        gradient = torch.empty(batch, tokens, width, dtype=torch.bfloat16, device=DEVICE)
        if ends:
            inputs = torch.zeros(batch, tokens, dtype=torch.int64, device=DEVICE)
        else:
            inputs = torch.empty(batch, tokens, shape.width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        return Work(shape, tokens, batch, model, inputs, gradient, micro_batches, warm_up)

    @property
    def layers(self) -> int:
        """How often a layer runs forward in a step."""
        return self.shape.layers * self.micro_batches

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input."""
        return self.batch * self.tokens * self.shape.width * 2

    def clear(self) -> None:
        """Drop every gradient."""
        self.model.zero_grad(set_to_none=True)
        self.inputs.grad = None


@dataclass(frozen=True)
class Seen:
    """What one step took.

    Args:
        step: virtual seconds from its begin until every stream was idle.
        forward, compute: seconds of the compute engine in forward, and in the whole step.
        host: seconds that the host was busy.
        out, inward: seconds of each direction of the link.
        out_bytes, in_bytes: what they moved.
        peak: most bytes in use, parameters and gradients included.
        kept: most bytes that a forward left in use, the output included.
        layer_bytes: what one layer moved out, of those that moved most.
        inputs_resident: most bytes in use between two layers, in inputs of a layer: the activation or gradient that
            is handed on is one, the model's own input is none.
        exposed, exposed_out, exposed_in: seconds that the step would be shorter if the link cost nothing, and if
            one direction of it moved bytes in no time.
        launches: operators and copies.
    """

    step: float
    forward: float
    compute: float
    host: float
    out: float
    inward: float
    out_bytes: int
    in_bytes: int
    layer_bytes: int
    peak: int
    kept: int
    inputs_resident: float
    launches: int
    exposed: float = 0.0
    exposed_out: float = 0.0
    exposed_in: float = 0.0


def _step(work: Work, sim: Simulator) -> tuple[float, int]:
    """Run one step; return the compute engine's seconds in forward, and the most bytes in use after one."""
    waiting: deque[Tensor] = deque()
    forward, active = 0.0, 0
    for _ in range(work.micro_batches):
        before = sim.busy().compute
        waiting.append(work.model(work.inputs))
        forward += sim.busy().compute - before
        active = max(active, sim.memory().active)
        if len(waiting) > work.warm_up:
            waiting.popleft().backward(work.gradient)
    while waiting:
        waiting.popleft().backward(work.gradient)
    return forward, active


@contextmanager
def _between_layers(work: Work, sim: Simulator) -> Iterator[list[int]]:
    """Collect the bytes in use whenever a layer's forward has ended or its backward is about to begin.

    Less the parameters' gradients, which belong to no layer's activations.
    """
    found: list[int] = []
    parameters = list(work.model.parameters())

    def look(*_: object) -> None:
        gradients = sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)
        found.append(sim.memory().active - gradients)

    def watch(layer: nn.Module, args: Any, out: Tensor) -> None:
        look()
        out.register_hook(look)

    hooks = [layer.register_forward_hook(watch) for layer in work.model.blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def lead_of(work: Work, sim: Simulator, part: str) -> float:
    """Seconds of the compute engine from a layer's backward to that of one of its parts, in a plain step."""
    seen: list[float] = []

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda _grad: seen.append(sim.busy().compute))

    layer = work.model.blocks[-1]
    hooks = [module.register_forward_hook(watch) for module in (layer, layer.get_submodule(part))]
    try:
        _timed(work, sim)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[1] - seen[0]


def _clean(work: Work, sim: Simulator) -> int:
    """Make the device idle and forget what was; return the bytes in use."""
    work.clear()
    sim.synchronize()
    sim.reset()
    sim.reset_peaks()
    return sim.memory().active


def _timed(work: Work, sim: Simulator) -> float:
    _clean(work, sim)
    _step(work, sim)
    return sim.synchronize()


def _seen(work: Work, sim: Simulator) -> Seen:
    before = _clean(work, sim)
    with _between_layers(work, sim) as between:
        forward, active = _step(work, sim)
    step = sim.synchronize()
    busy, copied, memory = sim.busy(), sim.copied(), sim.memory()
    resident = max(seen - before for seen in between) / work.input_bytes
    return Seen(
        step=step,
        forward=forward,
        compute=busy.compute,
        host=busy.host,
        out=busy.out,
        inward=busy.inward,
        out_bytes=copied.out,
        in_bytes=copied.inward,
        layer_bytes=max((row.swapped_bytes for row in lowtide.report(work.model).rows), default=0),
        peak=memory.peak_active,
        kept=active - before,
        inputs_resident=resident,
        launches=sim.launches,
    )


def _with_exposed(seen: Seen, work: Work, sim: Simulator) -> Seen:
    """Run the step again with a link that costs nothing, and with one direction each that moves bytes in no time."""
    device, step = sim.description, seen.step

    def shorter(out: float, inward: float, latency: float) -> float:
        sim.set(link_out=out, link_in=inward, link_latency=latency)
        return step - _timed(work, sim)

    try:
        return replace(
            seen,
            exposed=shorter(math.inf, math.inf, 0.0),
            exposed_out=shorter(math.inf, device.link_in, device.link_latency),
            exposed_in=shorter(device.link_out, math.inf, device.link_latency),
        )
    finally:
        sim.set(link_out=device.link_out, link_in=device.link_in, link_latency=device.link_latency)


def measure(
    policy: Policy, work: Work, sim: Simulator, *, in_flight: int | None = None, trace: Path | None = None
) -> Seen:
    """Run a policy on the simulated device: two steps to warm up, one to measure, and three with a faster link.

    ``in_flight`` is the bound on bytes that are leaving or coming at once; None for lowtide's own.

    Raises:
        torch.OutOfMemoryError: the device has not enough memory for it.
    """
    try:
        with worn(policy, work.model):
            if in_flight is not None:
                lowtide.SwapManager().configure(in_flight_bytes=in_flight)
            for _ in range(2):  # in which layers of a chunk also compare what stands between them
                _timed(work, sim)
            if trace is not None:
                sim.set(trace=True)
            seen = _seen(work, sim)
            if trace is not None:
                write_trace(sim.trace(), trace)
                sim.set(trace=False)
            if not policy.moves:
                return seen
            return _with_exposed(seen, work, sim)
    finally:
        work.clear()
        sim.synchronize()


def layers_of(plain: Seen, count: int, seen: Seen | None = None, lead: float = 0.0) -> Layers:
    """Seconds of one layer, from the compute engine in a plain step and in one that recomputes."""
    forward, backward = plain.forward / count, (plain.compute - plain.forward) / count
    again = 0.0 if seen is None else (seen.compute - plain.compute) / count
    return Layers(count, forward, backward, max(0.0, again), lead)


def link_of(sim: Simulator, seen: Seen | None = None) -> Link:
    """The link's rates; with a step also the latency of one layer's copies, from how long all copies took."""
    device = sim.description
    latency = 0.0
    if seen is not None and seen.out_bytes:
        latency = max(0.0, seen.out - seen.out_bytes / device.link_out) * seen.layer_bytes / seen.out_bytes
    return Link(device.link_out, device.link_in, latency)
