"""``lowtide.report``: the counters of every region of a model, readable.

Runs nothing and changes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lowtide.report.counters import RegionRow

__all__ = ["Report", "build"]

_MIB = 1 << 20


@dataclass
class Report:
    """What every region did with its bytes in its last call."""

    rows: list[RegionRow]
    notes: list[str] = field(default_factory=list)

    def total(self, field_name: str) -> int:
        """Sum of one counter over all regions."""
        return sum(int(getattr(row, field_name)) for row in self.rows)

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415 - drawing is only paid for when asked
        from rich.table import Table  # noqa: PLC0415

        table = Table(title="lowtide: bytes per region, last call (MiB)")
        for title in ("region", "kind", "calls", "kept", "swapped", "recomputed", "held elsewhere"):
            table.add_column(title, justify="left" if title in {"region", "kind"} else "right")
        for row in self.rows:
            sizes = (row.kept_bytes, row.swapped_bytes, row.recomputed_bytes, row.held_elsewhere_bytes)
            table.add_row(row.name, row.kind, str(row.calls), *(f"{size / _MIB:.2f}" for size in sizes))
        out = io.StringIO()
        console = Console(file=out, width=110)
        console.print(table)
        for line in self._lines():
            console.print(line, markup=False)
        return out.getvalue()

    def _lines(self) -> Iterable[str]:
        for row in self.rows:
            for reason, refusal in row.refused.items():
                yield f"{row.name}: {refusal.count} x {reason}: {refusal.bytes} bytes. {refusal.remedy}"
        yield from self.notes


def build(regions: Iterable[tuple[str, Any]], tier_notes: Iterable[str] = ()) -> Report:
    """The report of (name, region) pairs; ``tier_notes`` belong to it if any region has swapped."""
    rows: list[RegionRow] = []
    notes: list[str] = []
    for name, region in regions:
        region.rename(name)
        rows.append(region.row)
        notes.extend(f"{name}: {note}" for note in region.row.notes)
        never = getattr(region.policy, "never_occurred", None)
        if never is not None and region.row.calls:
            notes.extend(f"{name}: the policy lists {op}, which never ran there." for op in never())
    if any(row.swapped_bytes for row in rows):
        notes.extend(tier_notes)
    return Report(rows, notes)
