"""Exact figures about one training step: bytes against time, and the records they are written as.

Law: a figure is read from the allocator's own events, never sampled from the
operating system. Must never change what it measures: no hooks on the model, no
copies of its tensors.
"""

from __future__ import annotations

from lowtide.measure.memory import MemoryCurve, memory_curve
from lowtide.measure.records import Record, read_records, write_records

__all__ = ["MemoryCurve", "Record", "memory_curve", "read_records", "write_records"]
