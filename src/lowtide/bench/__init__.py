"""``lowtide bench``: lowtide against plain torch and its own remedies, in one process.

Holds the order of the measurements and their records. Law: every figure is a
ratio or a count of one run, peers and lowtide interleaved on one compute
thread; missing a goal is reported, never hidden, and is no failure of the
command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import lowtide
from lowtide.bench.footprint import Llama, footprint, prepared, tape_bytes
from lowtide.bench.models import Classes, GptBlock, LigerBlock, LlamaBlock, MegatronBlock, Stack, fused_classes
from lowtide.bench.modes import KEPT_SETS, MODES, UNDECLARED, Mode, reset
from lowtide.bench.swapfile import swap_to_file
from lowtide.bench.table import Figures, print_figures, print_goals
from lowtide.bench.timing import Workload, interleave, ratios
from lowtide.device import has_accelerator
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
    """Measure every kept set; a mode that takes none is measured once and stands beside each."""
    shape = Llama(blocks)
    torch.manual_seed(0)
    origin, inputs = Stack(*[LlamaBlock() for _ in range(blocks)]), shape.inputs()
    plain = footprint(origin, MODES["plain"], None, inputs)
    known = {"plain": plain}
    for kept in sets:
        for mode in modes:
            if mode.name == "save_on_cpu":
                continue
            reset()
            seen = known[mode.name] if mode.name in known else footprint(origin, mode, kept, inputs)
            if not mode.selective:
                known[mode.name] = seen
            case = f"llama x{blocks} ({kept})"
            yield _record(case, mode.name, "kept_bytes", seen.kept_bytes, "B")
            yield _record(case, mode.name, "peak_bytes", seen.peak_bytes, "B")
            yield _record(case, mode.name, "peak_without_gradients_bytes", seen.peak_without_gradients, "B")
            yield _record(case, mode.name, "recomputed_flops", seen.backward_flops - plain.backward_flops, "FLOP")


def _fused(build: Callable[[Classes], nn.Module], case: str, modes: Sequence[Mode]) -> Iterator[Record]:
    """Measure a block made of Functions: peers, then ours with its classes declared pure, then with new ones."""
    shape = Llama(1)
    declared = fused_classes()
    for function in declared:
        lowtide.pure(function)
    ours = [mode for mode in modes if mode.name == "recompute"]
    peers = [mode for mode in modes if mode.name in {"plain", "checkpoint"}]
    undeclared = [UNDECLARED] if ours else []
    cases = [(mode, declared) for mode in (*peers, *ours)] + [(mode, fused_classes()) for mode in undeclared]
    for mode, classes in cases:
        reset()
        torch.manual_seed(0)
        origin, inputs = Stack(build(classes)), shape.inputs()
        seen = footprint(origin, mode, None, inputs, flops=False)
        yield _record(case, mode.name, "kept_bytes", seen.kept_bytes, "B")
        yield _record(case, mode.name, "peak_bytes", seen.peak_bytes, "B")
        beyond = seen.kept_bytes - shape.input_bytes
        yield _record(case, mode.name, "kept_over_input", beyond / shape.input_bytes, "ratio")
        if mode in undeclared:
            yield _record(case, mode.name, "declaration_would_free_bytes", _would_free(origin, mode, inputs), "B")


def _would_free(origin: nn.Module, mode: Mode, inputs: Tensor) -> int:
    """Return the bytes that the report says a declaration would free."""
    model = prepared(origin, mode, None, inputs)
    model(inputs).sum().backward()
    return lowtide.report(model).total("opaque_bytes")


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
    yield _record(case, mode, "peak_without_gradients_bytes", seen.peak_without_gradients, "B")
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
        yield from _llama([mode for mode in modes if not mode.order], 32, sets=list(KEPT_SETS))
    yield from _fused(LigerBlock, "liger-like", modes)
    yield from _fused(MegatronBlock, "megatron-like", modes)
    yield from _tape(modes)
    # With an accelerator the lower tier is pinned memory, and no file is written.
    if not has_accelerator() and any(mode.name == "swap all" for mode in modes):
        yield from _swapped()


def run(json: Path | None, quick: bool = False, modes: Sequence[str] | None = None) -> int:  # noqa: FBT001, FBT002
    """Measure, print each case's table as soon as it is known and the goals at the end, and write the records.

    Costs minutes, half an hour if not quick; sets torch to one compute thread for its length.

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
        for _, case in groupby(measure(chosen, quick=quick), key=lambda record: record.case):
            rows = list(case)
            records += rows
            print_figures(console, rows)
    finally:
        torch.set_num_threads(threads)
        reset()
        if json is not None:
            write_records(json, records)
    print_goals(console, Figures(records))
    return 0
