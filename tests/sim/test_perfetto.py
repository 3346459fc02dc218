"""Trace files: viewers read every event, tracks are named after what ran there, equal runs give equal files."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lowtide.sim.perfetto import events, write_trace


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    device: int
    stream: int
    start: float
    end: float
    bytes: int = 0
    module: str = ""


@dataclass(frozen=True)
class Point:
    device: int
    time: float
    allocated: int
    active: int


@dataclass(frozen=True)
class Trace:
    spans: list[Span] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)


# A third of a microsecond: no span begins at a whole nanosecond.
T = 1e-6 / 3
STEP = Trace(
    [
        Span("aten::mm", "kernel", 0, 0, 0.0, T, 0, "layers.0.q"),
        Span("aten::add", "kernel", 0, 0, T, 2 * T, 0, "layers.0"),
        Span("offload", "out", 0, 1, 2 * T, 9 * T, 4096),
        Span("aten::mm", "kernel", 0, 0, 2 * T, 3 * T, 0, "layers.1.q"),
        Span("load", "in", 0, 2, 9 * T, 11 * T, 4096),
        Span("empty copy", "in", 0, 2, 11 * T, 12 * T, 0),
        Span("recording", "host", 0, 0, 0.0, 5 * T),
    ],
    [Point(0, 0.0, 512, 512), Point(0, T, 1024, 1536), Point(0, T, 512, 1536)],
)


def by_phase(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


def tracks(found: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    named = [event for event in found if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def check(found: list[dict[str, Any]]) -> None:
    """What viewers need of every event, and that no track runs two spans at once."""
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for event in found:
        assert event["ph"] in {"X", "M", "C"}
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["name"]
        assert isinstance(event["args"], dict)
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        if event["ph"] == "X":
            track = (event["pid"], event["tid"])
            assert event["dur"] >= 0
            assert round(event["ts"] * 1000) >= ends[track]
            ends[track] = round(event["ts"] * 1000) + round(event["dur"] * 1000)
            assert track in tracks(found)


def test_every_event_is_what_viewers_read_and_no_track_runs_two_spans_at_once() -> None:
    check(events(STEP))


def test_tracks_are_named_after_what_ran_there() -> None:
    assert tracks(events(STEP)) == {
        (0, 0): "host",
        (1, 1): "sim:0 compute",
        (1, 2): "sim:0 copies out",
        (1, 3): "sim:0 copies in",
    }


def test_a_stream_that_did_several_things_names_them_and_twins_are_told_apart() -> None:
    spans = [
        Span("mm", "kernel", 0, 0, 0.0, 1.0),
        Span("mm", "kernel", 0, 5, 1.0, 2.0),
        Span("mm", "kernel", 1, 0, 0.0, 1.0),
        Span("load", "in", 1, 0, 1.0, 2.0, 1),
    ]
    found = events(Trace(spans))
    assert tracks(found) == {
        (1, 1): "sim:0 compute (stream 0)",
        (1, 6): "sim:0 compute (stream 5)",
        (2, 1): "sim:1 compute, copies in",
    }
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == ["sim:0", "sim:1"]


def test_times_are_microseconds() -> None:
    spans = by_phase(events(Trace([Span("mm", "kernel", 0, 0, 1.5, 1.500002)])), "X")
    assert [(span["ts"], span["dur"]) for span in spans] == [(1500000.0, 2.0)]


def test_copies_say_their_bytes_and_kernels_their_module() -> None:
    spans = {(span["name"], span["ts"]): span["args"] for span in by_phase(events(STEP), "X")}
    assert spans["aten::mm", 0.0] == {"module": "layers.0.q"}
    assert spans["offload", 0.667] == {"bytes": 4096}
    assert spans["empty copy", 3.667] == {"bytes": 0}
    assert spans["recording", 0.0] == {}


def test_memory_is_counted_at_every_change() -> None:
    counted = [(c["name"], c["ts"], c["args"]["bytes"], c["pid"]) for c in by_phase(events(STEP), "C")]
    assert counted == [
        ("allocated", 0.0, 512, 1),
        ("active", 0.0, 512, 1),
        ("allocated", 0.333, 1024, 1),
        ("active", 0.333, 1536, 1),
        ("allocated", 0.333, 512, 1),
        ("active", 0.333, 1536, 1),
    ]


def test_a_device_without_spans_still_has_its_name() -> None:
    found = events(Trace([], [Point(1, 0.0, 1, 1)]))
    assert [event["args"]["name"] for event in found if event["name"] == "process_name"] == ["sim:1"]


@pytest.mark.parametrize("name", ["step.json", "deep/er/step.json", "step.json.gz"])
def test_the_file_is_json_and_the_same_for_the_same_trace(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_trace(STEP, path)
    first = path.read_bytes()
    write_trace(STEP, path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    text = gzip.decompress(first) if name.endswith(".gz") else first
    content = json.loads(text)
    assert content["displayTimeUnit"] == "ms"
    assert content["traceEvents"] == events(STEP)


def test_a_compressed_trace_does_not_hold_the_time_of_day(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    write_trace(STEP, path)
    assert path.read_bytes()[4:8] == bytes(4)


def test_an_empty_trace_is_a_file_without_events(tmp_path: Path) -> None:
    write_trace(Trace(), tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text(encoding="utf-8"))["traceEvents"] == []


def test_a_time_that_is_no_number_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NaN"):
        write_trace(Trace([Span("mm", "kernel", 0, 0, 0.0, float("nan"))]), tmp_path / "step.json")
    assert list(tmp_path.iterdir()) == []
