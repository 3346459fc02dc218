"""A simulated run as a trace file, to be opened at https://ui.perfetto.dev or in chrome://tracing.

Law: the file says what the simulator recorded and nothing else, and the same
trace gives the same bytes. Times are whole nanoseconds, so that spans which
follow each other never overlap by rounding.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

__all__ = ["events", "write_trace"]

HOST = 0  # process and thread of the host; device i is process i + 1, its stream s thread s + 1
_DOES = {"kernel": "compute", "out": "copies out", "in": "copies in"}


class SpanLike(Protocol):
    """Something that took time: a kernel, a copy, or work of the host."""

    @property
    def name(self) -> str:
        """Operator, or what was done."""

    @property
    def kind(self) -> str:
        """``"kernel"``, ``"out"``, ``"in"`` or ``"host"``."""

    @property
    def device(self) -> int:
        """Index of the device."""

    @property
    def stream(self) -> int:
        """Number of the stream."""

    @property
    def start(self) -> float:
        """Seconds at its begin."""

    @property
    def end(self) -> float:
        """Seconds at its end."""

    @property
    def bytes(self) -> int:
        """Bytes that it moved."""

    @property
    def module(self) -> str:
        """Module that was running, or ``""``."""


class PointLike(Protocol):
    """Memory of a device at one moment."""

    @property
    def device(self) -> int:
        """Index of the device."""

    @property
    def time(self) -> float:
        """Seconds."""

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold."""

    @property
    def active(self) -> int:
        """These, and freed bytes that a stream still uses."""


class TraceLike(Protocol):
    """What the simulator recorded."""

    @property
    def spans(self) -> Sequence[SpanLike]:
        """What took time."""

    @property
    def memory(self) -> Sequence[PointLike]:
        """Memory at each change."""


Event: TypeAlias = dict[str, Any]
Track: TypeAlias = tuple[int, int]


def _track(span: SpanLike) -> Track:
    return (HOST, HOST) if span.kind == "host" else (span.device + 1, span.stream + 1)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _names(spans: Iterable[SpanLike]) -> dict[Track, str]:
    """Name every track after what ran there; the stream's number only where two would have the same name."""
    kinds: dict[Track, set[str]] = {}
    for span in spans:
        kinds.setdefault(_track(span), set()).add(span.kind)
    plain = {
        track: "host"
        if track == (HOST, HOST)
        else f"sim:{track[0] - 1} " + ", ".join(does for kind, does in _DOES.items() if kind in kinds[track])
        for track in sorted(kinds)
    }
    shared = {name for name in plain.values() if list(plain.values()).count(name) > 1}
    return {track: f"{name} (stream {track[1] - 1})" if name in shared else name for track, name in plain.items()}


def _heads(names: dict[Track, str], devices: Iterable[int]) -> Iterator[Event]:
    processes = {HOST: "host"} if (HOST, HOST) in names else {}
    processes |= {device + 1: f"sim:{device}" for device in sorted(devices)}
    for pid, name in processes.items():
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for (pid, tid), name in names.items():
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _span(span: SpanLike) -> Event:
    pid, tid = _track(span)
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)
    args: dict[str, Any] = {}
    if span.kind in ("out", "in") or span.bytes:
        args["bytes"] = span.bytes
    if span.module:
        args["module"] = span.module
    head = {"ph": "X", "ts": start / 1000, "dur": (end - start) / 1000, "pid": pid, "tid": tid}
    return {**head, "name": span.name, "cat": span.kind, "args": args}


def _counters(point: PointLike) -> Iterator[Event]:
    head = {"ph": "C", "ts": _nanoseconds(point.time) / 1000, "pid": point.device + 1, "tid": 0}
    yield {**head, "name": "allocated", "args": {"bytes": point.allocated}}
    yield {**head, "name": "active", "args": {"bytes": point.active}}


def events(trace: TraceLike) -> list[Event]:
    """Turn a trace into events: names of tracks first, then spans by start, then the memory of each device."""
    devices = {span.device for span in trace.spans if span.kind != "host"} | {p.device for p in trace.memory}
    found = list(_heads(_names(trace.spans), devices))
    # Sorting keeps the order of equals, so what was recorded first comes first.
    found += [_span(span) for span in sorted(trace.spans, key=lambda s: (s.start, s.end))]
    for point in trace.memory:
        found += _counters(point)
    return found


def write_trace(trace: TraceLike, path: Path) -> None:
    """Write a trace as JSON in Chrome's format, compressed if the name ends in ``.gz``; make the folder if need be.

    The file is replaced as a whole. Costs about 150 bytes a span before compression.
    """
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events(trace))
    text = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, mtime=0)  # a time in the header would make equal traces differ
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(text)
    partial.replace(path)
