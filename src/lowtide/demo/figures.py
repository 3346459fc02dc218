"""The figures of a demonstration: runs to flat records, records to a table.

Law: the table is made from records alone, so that a saved demonstration prints
the same table as a fresh one. Must never round a figure that is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowtide.demo.train import Run
from lowtide.measure import Record

__all__ = ["Table", "records_of", "table_of"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Table:
    """A header and rows of text; the first column names the mode, the others are figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown, figures aligned to the right.

        >>> print(Table(("mode", "peak"), (("plain", "9"),)).markdown())
        | mode | peak |
        |---|---:|
        | plain | 9 |
        """
        lines = [self.header, *self.rows]
        text = ["| " + " | ".join(line) + " |" for line in lines]
        text.insert(1, "|---|" + "---:|" * (len(self.header) - 1))
        return "\n".join(text)


def records_of(case: str, runs: Sequence[Run]) -> list[Record]:
    """Turn runs into records; the first run is the one that the others are compared with."""
    return [
        Record("demo", case, run.mode.name, metric, value, unit)
        for run in runs
        for metric, value, unit in _figures(run, runs[0])
    ]


def _figures(run: Run, reference: Run) -> list[tuple[str, float | int | str, str]]:
    """List what one run gave as (metric, value, unit)."""
    equal_steps = sum(ours.hex() == theirs.hex() for ours, theirs in zip(run.losses, reference.losses, strict=True))
    return [
        *((f"loss_step_{step}", loss.hex(), "float.hex") for step, loss in enumerate(run.losses, start=1)),
        ("steps", len(run.losses), "count"),
        ("steps_with_equal_loss", equal_steps, "count"),
        ("weights_equal", _all_equal(run.weights, reference.weights), "0 or 1"),
        ("rng_state_equal", _all_equal(run.rng_state, reference.rng_state), "0 or 1"),
        ("held_out_loss", run.held_out_loss, "nat"),
        ("peak_bytes", run.curve.peak_bytes, "B"),
        ("held_after_forward_bytes", _held_after_forward(run), "B"),
        ("step_seconds", statistics.median(run.step_seconds), "s"),
        ("regions", len(run.layers), "count"),
        ("kept_bytes", sum(layer.kept for layer in run.layers), "B"),
        ("recomputed_bytes", sum(layer.recomputed for layer in run.layers), "B"),
        ("swapped_bytes", sum(layer.swapped for layer in run.layers), "B"),
        ("lower_tier_bytes", run.lower_tier_bytes, "B"),
        ("file_bytes", run.file_bytes, "B"),
    ]


def _all_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> int:
    """Return 1 if all tensors are equal bit for bit, else 0."""
    return int(all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True)))


def _held_after_forward(run: Run) -> int:
    """Return the bytes that were held for backward at the moment forward ended."""
    forward = next(phase for phase in run.curve.phases if phase.name == "forward")
    return [size for second, size in run.curve.points if second <= forward.end][-1]


def table_of(records: Sequence[Record]) -> Table:
    """Lay the records of one demonstration out as a table, a row a mode, in the order they were written.

    Raises:
        ValueError: a mode lacks a figure, or there is no mode at all.
    """
    modes: dict[str, dict[str, float | int | str]] = {}
    for record in records:
        if record.bench == "demo":
            modes.setdefault(record.mode, {})[record.metric] = record.value
    if not modes:
        raise ValueError("no demonstration in these records: expected bench 'demo', got none.")
    first = next(iter(modes.values()))
    try:
        rows = tuple(_row(mode, figures, first) for mode, figures in modes.items())
    except KeyError as missing:
        raise ValueError(f"records of a demonstration: expected a figure for {missing}, got none.") from None
    return Table(_HEADER, rows)


_HEADER = (
    "mode",
    "equal losses",
    "last loss",
    "peak MiB",
    "peak / plain",
    "step s",
    "step / plain",
    "kept MiB",
    "recomputed MiB",
    "swapped MiB",
    "in file MiB",
)


def _row(
    mode: str,
    figures: dict[str, float | int | str],
    first: dict[str, float | int | str],
) -> tuple[str, ...]:
    """Word one mode's figures. Without regions nothing is kept, recomputed or swapped by lowtide: a dash."""
    steps = int(figures["steps"])
    peak, seconds = float(figures["peak_bytes"]), float(figures["step_seconds"])
    fates = (float(figures[f"{fate}_bytes"]) / _MIB for fate in ("kept", "recomputed", "swapped", "file"))
    return (
        mode,
        f"{figures['steps_with_equal_loss']}/{steps}",
        f"{float.fromhex(str(figures[f'loss_step_{steps}'])):.3f}",
        f"{peak / _MIB:.1f}",
        f"{peak / float(first['peak_bytes']):.2f}",
        f"{seconds:.3f}",
        f"{seconds / float(first['step_seconds']):.2f}",
        *(f"{size:.1f}" if figures["regions"] else "-" for size in fates),
    )
