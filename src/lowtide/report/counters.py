"""Counters of one region: plain integers that cost no synchronisation. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Refusal", "RegionRow"]


@dataclass
class Refusal:
    """How often and for how many bytes a request was not met, and what would help."""

    count: int = 0
    bytes: int = 0
    remedy: str = ""


@dataclass
class RegionRow:
    """What the last forward call of one region did with its bytes (unique storages).

    >>> row = RegionRow("layers.0", "checkpoint")
    >>> row.refuse("smaller than min_bytes", 100, "Lower min_bytes.")
    >>> row.refused["smaller than min_bytes"].bytes
    100
    """

    name: str
    kind: str
    calls: int = 0
    kept_bytes: int = 0
    swapped_bytes: int = 0
    recomputed_bytes: int = 0
    opaque_bytes: int = 0
    dead_bytes: int = 0
    held_elsewhere_bytes: int = 0
    refused: dict[str, Refusal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def start_call(self) -> None:
        """A new forward call: bytes are those of the last call only."""
        self.calls += 1
        self.kept_bytes = self.swapped_bytes = self.recomputed_bytes = 0
        self.opaque_bytes = self.dead_bytes = self.held_elsewhere_bytes = 0
        if self.refused:
            self.refused = {}

    def refuse(self, reason: str, nbytes: int, remedy: str) -> None:
        """Count a request that was not met."""
        refusal = self.refused.setdefault(reason, Refusal(remedy=remedy))
        refusal.count += 1
        refusal.bytes += nbytes

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def packed_bytes(self) -> int:
        """All activation bytes that backward of this region needs."""
        return self.kept_bytes + self.swapped_bytes + self.recomputed_bytes
