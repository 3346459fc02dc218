"""One training run in one memory mode, with everything measured that the comparison needs.

Holds an ordinary training loop. Law: the loop is the same in every mode, and
what it measures (the allocator's events of the last step, the library's own
counters) changes no value. Must never know which mode it runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

import lowtide
from lowtide.demo.data import Corpus
from lowtide.demo.model import GPT, Shape
from lowtide.demo.modes import Mode
from lowtide.measure import MemoryCurve, memory_curve

__all__ = ["LayerBytes", "Run", "Settings", "train"]

# One to time and one to measure.
_FEWEST_STEPS = 2
# Large enough that the loss of the held-out text does not hang on a single window.
_HELD_OUT_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, for how long, and from which seed. The defaults take three to four minutes on two cores.

    Args:
        threads: compute threads on a CPU. With one, another core is left for the threads that copy to the file; two on
            two cores wait for each other as soon as anything else runs (three times slower, measured).
    """

    steps: int = 60
    batch: int = 3
    seed: int = 1234
    threads: int = 1
    learning_rate: float = 2e-3
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        if self.steps < _FEWEST_STEPS:
            raise ValueError(f"steps: expected at least {_FEWEST_STEPS}, got {self.steps}.")
        for name in ("batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one region did with its bytes in its last forward."""

    name: str
    kept: int
    recomputed: int
    swapped: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run gave: its losses and weights, to compare bit for bit, and its costs.

    Args:
        losses: one a step, as torch computed it.
        held_out_loss: the trained model's loss on text that it has not seen.
        weights: the parameters after the last step, on the CPU.
        rng_state: the state of torch's generators after the last step.
        step_seconds: wall time of each step but the last, which ran under the profiler.
        curve: memory over the last step, from the moment before its forward.
        layers: bytes by fate, one entry a wrapped layer.
        lower_tier_bytes: what the last step sent to the lower tier.
        file_bytes: how much of that was written to a file.
        remarks: refusals and notes of the library about this run.
    """

    mode: Mode
    losses: tuple[float, ...]
    held_out_loss: float
    weights: tuple[Tensor, ...]
    rng_state: tuple[Tensor, ...]
    step_seconds: tuple[float, ...]
    curve: MemoryCurve
    layers: tuple[LayerBytes, ...]
    lower_tier_bytes: int
    file_bytes: int
    remarks: tuple[str, ...]


def train(mode: Mode, corpus: Corpus, settings: Settings, on_step: Callable[[int, float], None]) -> Run:
    """Train a new model from the seed in one memory mode and measure its last step.

    Args:
        on_step: called after each step with the number of steps done and the loss.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(settings.seed)
    model = GPT(settings.shape).to(device)
    mode.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps)
    batches = corpus.batches(settings.batch, settings.shape.context, seed=settings.seed)
    losses: list[Tensor] = []
    seconds: list[float] = []

    def step() -> None:
        tokens, targets = (part.to(device) for part in batches.next())
        with record_function("forward"):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        with record_function("backward"):
            loss.backward()
        with record_function("update"):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())

    for done in range(1, settings.steps):
        began = time.perf_counter()
        step()
        value = losses[-1].item()
        seconds.append(time.perf_counter() - began)
        on_step(done, value)

    traffic = lowtide.SwapManager().traffic
    sent, written = traffic.out_bytes, traffic.file_bytes_written
    curve = memory_curve(step)
    on_step(settings.steps, losses[-1].item())
    sent, written = traffic.out_bytes - sent, traffic.file_bytes_written - written
    report = lowtide.report(model)
    return Run(
        mode=mode,
        losses=tuple(loss.item() for loss in losses),
        held_out_loss=_held_out_loss(model, corpus, settings, device),
        weights=tuple(parameter.detach().cpu() for parameter in model.parameters()),
        rng_state=_rng_state(device),
        step_seconds=tuple(seconds),
        curve=curve,
        layers=_layers(report),
        lower_tier_bytes=sent,
        file_bytes=written,
        remarks=_remarks(report),
    )


def _held_out_loss(model: GPT, corpus: Corpus, settings: Settings, device: torch.device) -> float:
    batches = corpus.batches(_HELD_OUT_WINDOWS, settings.shape.context, seed=settings.seed, part="held out")
    tokens, targets = (part.to(device) for part in batches.next())
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()


def _rng_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of the CPU's generator and, on an accelerator, of its own."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state()


def _layers(report: lowtide.Report) -> tuple[LayerBytes, ...]:
    return tuple(LayerBytes(row.name, row.kept_bytes, row.recomputed_bytes, row.swapped_bytes) for row in report.rows)


def _remarks(report: lowtide.Report) -> tuple[str, ...]:
    """Put refusals and notes into sentences, one a reason however many regions it concerns."""
    refused: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in report.rows:
        for reason, refusal in row.refused.items():
            refused.setdefault((reason, refusal.remedy), []).append((refusal.count, refusal.bytes))
    refusals = (
        f"{reason}: {sum(count for count, _ in cases)} tensors, {sum(size for _, size in cases) / 1024:.1f} KiB, "
        f"in {_regions(len(cases))}. {remedy}"
        for (reason, remedy), cases in refused.items()
    )
    names = tuple(f"{row.name}: " for row in report.rows)
    said = Counter(next((note[len(name) :] for name in names if note.startswith(name)), note) for note in report.notes)
    return (*refusals, *(f"In {_regions(count)}: {note}" for note, count in said.items()))


def _regions(count: int) -> str:
    return f"{count} region{'s' if count > 1 else ''}"
