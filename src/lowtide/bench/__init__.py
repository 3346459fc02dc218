"""``lowtide bench``: lowtide against plain torch and its own remedies, in one process.

Holds the order of the measurements and their records. Law: every figure is a
ratio or a count of one run, peers and lowtide interleaved on one compute
thread; missing a goal is reported, never hidden, and is no failure of the
command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import lowtide
from lowtide.bench.footprint import Llama, footprint, tape_bytes
from lowtide.bench.models import GptBlock, LigerBlock, LlamaBlock, MegatronBlock, Stack, fused_classes
from lowtide.bench.modes import KEPT_SETS, MODES, Mode, reset
from lowtide.bench.swapfile import swap_to_file
from lowtide.bench.table import Figures, print_figures, print_goals
from lowtide.bench.timing import Workload, interleave, ratios
from lowtide.measure import Record, write_records

__all__ = ["run"]

BENCH = "bench"
FEW = ("none", "sdpa", "sdpa, gate, up")


def _record(case: str, mode: str, metric: str, value: float, unit: str) -> Record:
    return Record(BENCH, case, mode, metric, value, unit)


def _workloads(*, quick: bool) -> list[Workload]:
    rounds = 1 if quick else 5
    return [
        Workload(
            "host-bound",
            lambda: Stack(*[GptBlock(64, 4) for _ in range(12)]),
            lambda: torch.randn(1, 16, 64),
            20 * rounds,
        ),
        Workload(
            "compute-bound",
            lambda: Stack(*[GptBlock(512, 8) for _ in range(4)]),
            lambda: torch.randn(1, 512, 512),
            2 + 2 * rounds,
        ),
    ]


def _times(modes: Sequence[Mode], *, quick: bool) -> Iterator[Record]:
    for work in _workloads(quick=quick):
        reset()
        times = interleave(work, modes)
        for mode in modes:
            for part, ratio in ratios(times, mode.name).items():
                yield _record(work.name, mode.name, f"{part}_over_plain", ratio, "ratio")


def _llama(modes: Sequence[Mode], blocks: int, *, sets: Sequence[str]) -> Iterator[Record]:
    shape = Llama(blocks)
    torch.manual_seed(0)
    origin, inputs = Stack(*[LlamaBlock() for _ in range(blocks)]), shape.inputs()
    plain = footprint(origin, MODES["plain"], None, inputs)
    for kept in sets:
        for mode in modes:
            if mode.name == "save_on_cpu":
                continue
            reset()
            seen = footprint(origin, mode, kept, inputs)
            case = f"llama x{blocks} ({kept})"
            yield _record(case, mode.name, "kept_bytes", seen.kept_bytes, "B")
            yield _record(case, mode.name, "peak_bytes", seen.peak_bytes, "B")
            yield _record(case, mode.name, "peak_without_gradients_bytes", seen.peak_without_gradients, "B")
            yield _record(case, mode.name, "recomputed_flops", seen.backward_flops - plain.backward_flops, "FLOP")


def _fused(build: Callable[[tuple[object, object, object]], nn.Module], case: str, modes: Sequence[Mode]) -> Iterator[Record]:
    """Measure a block made of Functions, once with its classes declared pure and once with new ones that are not."""
    shape = Llama(1)
    for label in ("declared", "undeclared"):
        classes = fused_classes()
        if label == "declared":
            for function in classes:
                lowtide.pure(function)
        torch.manual_seed(0)
        origin, inputs = Stack(build(classes)), shape.inputs()
        for mode in modes:
            if mode.name not in {"plain", "checkpoint", "recompute"}:
                continue
            reset()
            seen = footprint(origin, mode, None, inputs, flops=False)
            name = f"{mode.name} {label}"
            yield _record(case, name, "kept_bytes", seen.kept_bytes, "B")
            yield _record(case, name, "peak_bytes", seen.peak_bytes, "B")
            beyond = seen.kept_bytes - shape.input_bytes
            yield _record(case, name, "kept_over_input", beyond / shape.input_bytes, "ratio")


def _tape(modes: Sequence[Mode]) -> Iterator[Record]:
    origin, inputs = Stack(*[LlamaBlock() for _ in range(4)]), Llama(4).inputs()
    for mode in modes:
        reset()
        yield _record("llama tape", mode.name, "tape_bytes", tape_bytes(origin, mode, inputs), "B")


def _swapped() -> Iterator[Record]:
    seen = swap_to_file()
    case, mode = "swap-to-file", "swap all"
    yield _record(case, mode, "step_over_plain", seen.ratio, "ratio")
    yield _record(case, mode, "step_over_plain_allowed", seen.allowed, "ratio")
    yield _record(case, mode, "closed_form_over_plain", seen.closed_form / seen.plain, "ratio")
    yield _record(case, mode, "peak_bytes", seen.peak_bytes, "B")
    yield _record(case, mode, "formula_bytes", seen.formula_bytes, "B")
    yield _record(case, "plain", "peak_bytes", seen.plain_peak_bytes, "B")
    yield _record(case, mode, "swapped_bytes", seen.out_bytes, "B")
    yield _record(case, mode, "write_rate", seen.write_rate, "B/s")
    yield _record(case, mode, "read_rate", seen.read_rate, "B/s")


def measure(modes: Sequence[Mode], *, quick: bool) -> Iterator[Record]:
    """Run every measurement for the modes, one record at a time, most telling first."""
    yield from _times(modes, quick=quick)
    yield from _llama(modes, 1, sets=list(KEPT_SETS))
    yield from _llama(modes, 4, sets=FEW if quick else list(KEPT_SETS))
    if not quick:
        yield from _llama(modes, 32, sets=FEW)
    yield from _fused(lambda classes: LigerBlock(classes), "liger-like", modes)
    yield from _fused(lambda classes: MegatronBlock(classes), "megatron-like", modes)
    yield from _tape(modes)
    if any(mode.name == "swap all" for mode in modes):
        yield from _swapped()


def run(json: Path | None, quick: bool = False, modes: Sequence[str] | None = None) -> int:  # noqa: FBT001, FBT002
    """Measure, print a table a case and the goals, and write the records.

    Costs minutes; sets torch to one compute thread for its length.

    Args:
        json: where to write the records, or None.
        quick: fewer rounds, and no 32-block models.
        modes: names out of ``lowtide.bench.modes.MODES``; all if None. ``plain`` is always measured.

    Returns:
        0: a missed goal is a finding, not a failure.

    Raises:
        ValueError: an unknown mode.
    """
    unknown = set(modes or ()) - set(MODES)
    if unknown:
        raise ValueError(f"unknown mode: expected some of {', '.join(MODES)}, got {', '.join(sorted(unknown))}.")
    chosen = [mode for mode in MODES.values() if modes is None or mode.name in {"plain", *modes}]
    console, threads = Console(), torch.get_num_threads()
    torch.set_num_threads(1)
    records: list[Record] = []
    try:
        with console.status("measuring") as status:
            for record in measure(chosen, quick=quick):
                records.append(record)
                status.update(f"{record.case}: {record.mode}")
    finally:
        torch.set_num_threads(threads)
        reset()
        if json is not None:
            write_records(json, records)
    print_figures(console, records)
    print_goals(console, Figures(records))
    return 0
