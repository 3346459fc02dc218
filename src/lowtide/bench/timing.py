"""Step times of one model under several modes, interleaved so that neighbours and clocks hit all alike.

Law: one compute thread; every mode starts from equal weights and runs once per
round; the figure of a mode is the median over rounds of its ratio to the plain
step of the same round. No figure here is a test.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowtide.bench.modes import Mode
from lowtide.device import synchronize, training_device

__all__ = ["Seconds", "Workload", "interleave", "ratios"]


@dataclass(frozen=True)
class Workload:
    """A model builder, an input, and how often a step is timed."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    rounds: int


@dataclass(frozen=True)
class Seconds:
    """Seconds of forward and backward of one step."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward


def _step(model: nn.Module, mode: Mode, inputs: Tensor) -> Seconds:
    for p in model.parameters():
        p.grad = None
    begun = _now(inputs)
    with mode.around():
        loss = model(inputs).square().mean()
    middle = _now(inputs)
    loss.backward()
    return Seconds(middle - begun, _now(inputs) - middle)


def _now(inputs: Tensor) -> float:
    """Seconds, with all work of the input's device done."""
    synchronize(inputs.device)
    return time.perf_counter()


def interleave(work: Workload, modes: Sequence[Mode]) -> dict[str, list[Seconds]]:
    """Time every mode once per round; three rounds before the first timed one warm all up.

    Holds one copy of the weights per mode. Garbage is collected between rounds,
    never inside a timed step.
    """
    torch.manual_seed(0)
    where = training_device()
    origin, inputs = work.build().to(where), work.inputs().to(where)
    models = {}
    for mode in modes:
        model = copy.deepcopy(origin)
        mode.prepare(model)
        models[mode.name] = model
    times: dict[str, list[Seconds]] = {mode.name: [] for mode in modes}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(-3, work.rounds):
            for mode in modes:
                taken = _step(models[mode.name], mode, inputs)
                if number >= 0:
                    times[mode.name].append(taken)
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return times


def ratios(times: dict[str, list[Seconds]], name: str, base: str = "plain") -> dict[str, float]:
    """Median over rounds of the ratio of a mode's forward, backward and step to the base's in the same round."""
    pairs = list(zip(times[name], times[base], strict=True))
    return {
        "step": statistics.median(a.step / b.step for a, b in pairs),
        "forward": statistics.median(a.forward / b.forward for a, b in pairs),
        "backward": statistics.median(a.backward / b.backward for a, b in pairs),
    }
