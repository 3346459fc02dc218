"""The steps section of the device check: time and peak of one large training step under every mode, side by side.

Law: models of all modes share weights and gradients; modes take turns, and each
turn begins with an empty allocator cache and an untimed step. A timed step
finds gradients that it adds to, as a later micro-batch does: else they would be
the peak of every mode. A mode that does not fit is a row that says so. Loss and
gradients are compared in the first step of each mode, which runs with
deterministic kernels; the timed ones do not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from device_check_base import (
    GIB,
    Check,
    Marks,
    Skipped,
    clear,
    device_free_bytes,
    held_bytes,
    host_free_bytes,
    median,
    mib,
    seconds,
)
from device_check_equality import deterministic
from device_check_modes import OURS, Packed, packed_by, step_modes, twin
from device_check_rates import Link
from torch import Tensor

from lowtide import SwapManager
from lowtide import device as seam
from lowtide.activations.certify import checksum
from lowtide.bench.models import LlamaBlock, Stack
from lowtide.bench.modes import Mode
from lowtide.errors import CapacityError

__all__ = ["Shape", "Step", "choose_layers", "choose_shape", "overlap", "steps"]

STEPS, OVERLAP, EQUAL = "steps", "copy overlap", "equal"
ROUNDS = 7


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Shape:
    """Sizes of the model: a Llama in bfloat16, blocks only."""

    width: int
    tokens: int
    most_layers: int
    batch: int = 1

    @property
    def hidden(self) -> int:
        """Width of the gated feed-forward part: 3.5 times the width, as in the Llama of eight billion parameters."""
        return 7 * self.width // 2

    def block(self, where: torch.device) -> LlamaBlock:
        """One block on the device."""
        with torch.device(where):
            block = LlamaBlock(self.width, max(self.width // 128, 2), self.hidden, self.tokens)
        return block.to(torch.bfloat16)

    def inputs(self, where: torch.device) -> Tensor:
        """The batch, drawn on the host."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.tokens, self.width, generator=draw).to(where, torch.bfloat16)


def choose_shape(free: int, *, accelerated: bool, small: bool) -> Shape:
    """The sizes for a device with so many free bytes; the number of layers follows from what a block packs.

    Activations must outweigh gradients, or the peak would be the same in every mode.

    >>> choose_shape(79 << 30, accelerated=True, small=False)
    Shape(width=4096, tokens=4096, most_layers=12, batch=4)
    """
    if small:
        return Shape(128, 256, 3)
    if not accelerated:
        return Shape(512, 512, 4)
    for least, width, tokens, batch in (
        (56, 4096, 4096, 4),
        (30, 4096, 4096, 2),
        (18, 2048, 4096, 4),
        (8, 2048, 4096, 2),
    ):
        if free >= least * GIB:
            return Shape(width, tokens, 12, batch)
    return Shape(1024, 2048, 8)


def choose_layers(most: int, packed: Packed, weights: int, *, device_bytes: int, host_bytes: int) -> int:
    """How many blocks fit in every mode: plain in 0.7 of the device, everything pinned at once in 0.6 of the host.

    What torch pins for its own offloading is cached and shared by the peers;
    ours has a pool of its own beside it. At least two blocks.
    """
    on_device = packed.unique_bytes + 2 * weights
    on_host = max(packed.pinned_every_bytes, 1) + packed.pinned_unique_bytes
    fit = min(int(0.7 * device_bytes) // on_device, int(0.6 * host_bytes) // on_host)
    return max(2, min(most, fit))


def _model(check: Check) -> tuple[Shape, Stack]:
    where = check.device
    shape = choose_shape(device_free_bytes(where), accelerated=check.accelerated, small=check.small)
    torch.manual_seed(0)
    first = shape.block(where)
    packed = packed_by(lambda: first(shape.inputs(where)))
    weights = sum(p.nbytes for p in first.parameters())
    clear(where)
    layers = choose_layers(
        shape.most_layers, packed, weights, device_bytes=device_free_bytes(where), host_bytes=host_free_bytes()
    )
    model = Stack(first, *[shape.block(where) for _ in range(layers - 1)])
    check.facts["packed"] = packed
    text = (
        f"llama in bf16: {layers} layers, width {shape.width}, feed-forward {shape.hidden}, {shape.batch} x "
        f"{shape.tokens} tokens; a layer packs {mib(packed.unique_bytes)} MiB, its weights take {mib(weights)} MiB"
    )
    check.console.print(text)
    check.record(STEPS, "", "model", text, "text")
    check.record(STEPS, "", "layers", layers, "count")
    return shape, model


# ---------------------------------------------------------------- one step


@dataclass(frozen=True)
class Step:
    """One measured step; bytes are those beyond what was held before it.

    Args:
        active_peak: with what is freed but still in use by a stream, where the allocator counts that.
    """

    forward: float
    backward: float
    loss: str
    peak: int
    active_peak: int
    reserved_peak: int
    retries: int
    out_bytes: int
    in_bytes: int
    left_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward


@dataclass
class Turn:
    """A mode, its model, and its timed steps by round.

    Args:
        ended: why it takes no more turns; empty as long as it does.
        reproducible: two first steps gave the same bits; only asked of plain.
        grown_bytes: by how much a step left more on the device than the one before.
    """

    mode: Mode
    model: Stack
    rounds: dict[int, list[Step]] = field(default_factory=dict)
    loss: str = ""
    sums: list[Tensor] = field(default_factory=list)
    ended: str = ""
    reproducible: bool = True
    grown_bytes: int = 0

    @property
    def steps(self) -> list[Step]:
        """Every timed step."""
        return [step for steps in self.rounds.values() for step in steps]

    def median(self, name: str) -> float:
        """The median of one property over all timed steps."""
        return median(getattr(step, name) for step in self.steps)

    def compared(self, other: Turn, how: Callable[[float, float], float]) -> float:
        """The median over common rounds of ``how`` of the mean steps of both."""
        common = sorted(self.rounds.keys() & other.rounds.keys())
        return median(how(_mean(self.rounds[number]), _mean(other.rounds[number])) for number in common)


def _mean(steps: list[Step]) -> float:
    return sum(step.seconds for step in steps) / len(steps)


def _allocator(where: torch.device) -> dict[str, int]:
    return dict(torch.accelerator.memory_stats(where)) if seam.is_accelerator(where) else {}


def _step(turn: Turn, inputs: Tensor, where: torch.device) -> Step:
    """Run forward and backward once; gradients that are there are added to."""
    marks, traffic = Marks(where), SwapManager().traffic
    accelerated = seam.is_accelerator(where)
    out_bytes, in_bytes = traffic.out_bytes, traffic.in_bytes
    seam.synchronize(where)
    if accelerated:
        torch.accelerator.reset_peak_memory_stats(where)
    before = _allocator(where)
    begun = marks.now()
    with turn.mode.around():
        loss = turn.model(inputs).float().square().mean()
    middle = marks.now()
    loss.backward()
    ended = marks.now()
    seam.synchronize(where)
    after = _allocator(where)
    text = float(loss.detach()).hex()
    del loss

    def beyond(name: str) -> int:
        return int(after.get(f"{name}.all.peak", 0) - before.get(f"{name}.all.current", 0))

    allocated = beyond("allocated_bytes")
    active = beyond("active_bytes") if "active_bytes.all.peak" in after else allocated
    return Step(
        forward=marks.between(begun, middle),
        backward=marks.between(middle, ended),
        loss=text,
        peak=allocated,
        active_peak=active,
        reserved_peak=int(after.get("reserved_bytes.all.peak", 0)),
        retries=int(after.get("num_alloc_retries", 0) - before.get("num_alloc_retries", 0)),
        out_bytes=traffic.out_bytes - out_bytes,
        in_bytes=traffic.in_bytes - in_bytes,
        left_bytes=held_bytes(where) if accelerated else 0,
    )


def _guarded(turn: Turn, inputs: Tensor, where: torch.device) -> Step | None:
    """One step, or None and a word in ``turn.ended`` if it does not fit."""
    try:
        return _step(turn, inputs, where)
    except torch.OutOfMemoryError:
        turn.ended = "OOM"
    except CapacityError:
        turn.ended = "no host memory"
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        turn.ended = "OOM on the host"
    # Only here is the exception gone, and with it the frames that hold tensors.
    clear(where)
    return None


# ---------------------------------------------------------------- turns


def steps(check: Check) -> None:
    """Run every mode in turns, then compare."""
    shape, model = _model(check)
    inputs = shape.inputs(check.device)
    turns = [Turn(mode, twin(model)) for mode in step_modes(check.device).values()]
    for turn in turns:
        turn.mode.prepare(turn.model)
    until = check.left * 0.25  # what the sections after this one get
    _first_steps(check, turns, inputs, until)
    gc.disable()
    try:
        for number in range(2 if check.small else ROUNDS):
            _round(check, turns, inputs, number, until)
    finally:
        gc.enable()
    check.record(STEPS, "", "rounds", len(turns[0].rounds), "count")
    _compare(check, turns)
    for turn in turns:
        turn.model, turn.sums = Stack(), []  # the next section reads figures only
    check.facts["turns"] = {turn.mode.name: turn for turn in turns}


def _first_steps(check: Check, turns: list[Turn], inputs: Tensor, until: float) -> None:
    """Take the bits of every mode, and of plain twice."""
    plain = turns[0]
    _first_step(plain, inputs, check.device)
    if plain.ended:
        raise Skipped(f"the plain model itself: {plain.ended}")
    again = Turn(plain.mode, plain.model)
    _first_step(again, inputs, check.device)
    plain.reproducible = _bits(again, plain) == EQUAL
    if not plain.reproducible:
        check.record(STEPS, "plain", "reproducible", "no", "text")
        check.console.print("the plain step does not give the same bits twice: bits are not judged")
    for turn in turns[1:]:
        if check.left < until:
            turn.ended = "out of time"
        else:
            _first_step(turn, inputs, check.device)


def _first_step(turn: Turn, inputs: Tensor, where: torch.device) -> None:
    """Run one step for its bits. It also makes pinned buffers, which takes long, and the libraries' handles."""
    turn.model.zero_grad(set_to_none=True)
    clear(where)
    with deterministic(poison=False):
        step = _guarded(turn, inputs, where)
    if step is not None:
        turn.loss = step.loss
        turn.sums = [checksum(p.grad) for p in turn.model.parameters() if p.grad is not None]
    turn.model.zero_grad(set_to_none=True)


def _round(check: Check, turns: list[Turn], inputs: Tensor, number: int, until: float) -> None:
    """One turn for every mode that fits; the first round is cut short only where no time at all is left."""
    for turn in turns:
        if turn.ended or check.left < (until if number else until / 2):
            continue
        for parameter in turn.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        clear(check.device)
        taken: list[Step] = []
        while not turn.ended and len(taken) < (2 if check.small else 3):
            step = _guarded(turn, inputs, check.device)
            taken += [step] if step is not None else []
        if not turn.ended:
            turn.rounds[number] = taken[1:]
            turn.grown_bytes = max(turn.grown_bytes, taken[-1].left_bytes - taken[-2].left_bytes)


# ---------------------------------------------------------------- comparison


def _bits(turn: Turn, plain: Turn) -> str:
    """Whether the first step gave plain's loss and gradients; empty if there was none."""
    if not turn.loss:
        return ""
    if turn.loss != plain.loss:
        return "loss differs"
    same = len(turn.sums) == len(plain.sums) and all(map(torch.equal, turn.sums, plain.sums))
    return EQUAL if same else "gradients differ"


def _compare(check: Check, turns: list[Turn]) -> None:
    plain = turns[0]
    rows = []
    for turn in turns:
        name, bits = turn.mode.name, _bits(turn, plain)
        if not turn.rounds and not turn.ended:
            turn.ended = "out of time"
        check.record(STEPS, name, "outcome", turn.ended or "ran", "text")
        if bits:
            check.record(STEPS, name, "bits", bits, "text")
        if name in OURS and bits not in {EQUAL, ""} and plain.reproducible:
            check.fail(STEPS, f"{name}: {bits}, compared with plain")
        if name in OURS and turn.grown_bytes > 0:
            check.fail(STEPS, f"{name}: a step leaves {turn.grown_bytes} bytes more on the device than the one before")
        if turn.rounds and plain.rounds:
            rows.append(_row(check, turn, plain, bits))
        else:
            rows.append([name, turn.ended, *[""] * 5, bits])
    if not check.accelerated:
        check.console.print("peaks are read on an accelerator only; on a CPU lowtide bench counts them")
    columns = ("mode", "step", "of plain", "peak MiB", "of plain", "allocated MiB", "reserved MiB", "bits")
    check.table("steps (peak: active bytes beyond weights, gradients and input)", columns, rows)


def _row(check: Check, turn: Turn, plain: Turn, bits: str) -> list[str]:
    name, slower = turn.mode.name, turn.compared(plain, lambda ours, theirs: ours / theirs)
    figures = {
        "step": (turn.median("seconds"), "s"),
        "forward": (turn.median("forward"), "s"),
        "backward": (turn.median("backward"), "s"),
        "step_over_plain": (slower, "ratio"),
        "peak_bytes": (turn.median("active_peak"), "B"),
        "allocated_peak_bytes": (turn.median("peak"), "B"),
        "reserved_peak_bytes": (turn.median("reserved_peak"), "B"),
        "alloc_retries": (sum(step.retries for step in turn.steps), "count"),
        "out_bytes": (turn.median("out_bytes"), "B"),
        "in_bytes": (turn.median("in_bytes"), "B"),
    }
    for metric, (value, unit) in figures.items():
        check.record(STEPS, name, metric, value, unit)
    peak, base = turn.median("active_peak"), plain.median("active_peak")
    sizes = (
        [mib(peak), f"{peak / base:.2f}", mib(turn.median("peak")), mib(turn.median("reserved_peak"))] if base else []
    )
    ended = f" (later: {turn.ended})" if turn.ended else ""
    return [name + ended, seconds(turn.median("seconds")), f"{slower:.3f}", *(sizes or ["-"] * 4), bits]


# ---------------------------------------------------------------- overlap


def overlap(check: Check) -> None:
    """Time by which copies lengthen a step, against the time that they would take alone."""
    turns: dict[str, Turn] = check.facts.get("turns", {})
    link: Link | None = check.facts.get("link")
    rows = []
    for name, base in (
        ("recompute, swap inputs", "recompute"),
        ("swap mm+sdpa", "save mm+sdpa"),
        ("swap mm+sdpa, inputs", "save mm+sdpa"),
        ("swap all", "plain"),
    ):
        swap, save = turns.get(name), turns.get(base)
        if swap is None or save is None or not swap.rounds.keys() & save.rounds.keys():
            check.skip(OVERLAP, name, "its step or that of its base was not measured")
            continue
        rows.append(_exposed(check, swap, save, link))
    columns = ("mode", "against", "out MiB", "in MiB", "exposed", "copies alone", "hidden", "out GB/s", "in GB/s")
    if rows:
        check.table("copy overlap (rates: bytes by the length of forward and of backward)", columns, rows)


def _exposed(check: Check, swap: Turn, save: Turn, link: Link | None) -> list[str]:
    name = swap.mode.name
    exposed = swap.compared(save, lambda ours, theirs: ours - theirs)
    out, inward = swap.median("out_bytes"), swap.median("in_bytes")
    rates = out / swap.median("forward"), inward / swap.median("backward")
    figures = [("exposed", exposed, "s"), ("rate_out", rates[0], "B/s"), ("rate_in", rates[1], "B/s")]
    alone = out / link.out + inward / link.inward if link is not None else 0.0
    if alone:
        figures += [("copies_alone", alone, "s"), ("hidden", 1 - exposed / alone, "ratio")]
    for metric, value, unit in figures:
        check.record(OVERLAP, name, metric, value, unit)
    hidden = [seconds(alone), f"{1 - exposed / alone:.0%}"] if alone else ["-", "-"]
    return [
        name,
        save.mode.name,
        mib(out),
        mib(inward),
        seconds(exposed),
        *hidden,
        f"{rates[0] / 1e9:.2f}",
        f"{rates[1] / 1e9:.2f}",
    ]
