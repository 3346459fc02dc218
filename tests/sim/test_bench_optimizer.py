"""``lowtide bench sim-optimizer``: near the link's floor and within two buckets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.measure import read_records

pytestmark = pytest.mark.sim

# The simulator takes a process's accelerator over: each run has a process of its own.
RUN = """
import sys
from pathlib import Path
from lowtide.bench.sim_optimizer import run
raise SystemExit(run("h100-80gb", "llama-7b", Path(sys.argv[1]), layers=2, seq=512, batch=1, accumulation=8,
    swap_times=16, link=None))
"""


def figures(path: Path) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = {}
    for record in read_records(path):
        found.setdefault(record.mode, {})[record.metric] = float(record.value)
        assert record.mode in done.stdout
    return found


def test_a_step_is_near_the_floor_of_the_link_and_within_two_buckets(tmp_path: Path) -> None:
    found = figures(tmp_path / "figures.json")
    stays, swapped, residual, overlapped = found.values()
    assert (stays["floor_seconds"], stays["moving_bytes_a_parameter"]) == (0, 0)
    for one, moving in ((swapped, 12.0), (residual, 10.125), (overlapped, 10.125)):
        assert moving <= one["moving_bytes_a_parameter"] <= moving * 1.002
        assert 0 <= one["over_floor"] <= 0.05
        # What a segment of 64 MiB needs besides: gradients in float32, and with a residual the masters.
        assert one["peak_bytes"] <= one["two_buckets_bytes"] + 3 * (64 << 20)
        assert one["resident_bytes_a_parameter"] < 0.01
    assert 12.0 <= stays["resident_bytes_a_parameter"] < 12.01
    # The last stores run beside the next forward, and the first loads beside backward.
    assert stays["whole_seconds"] < overlapped["whole_seconds"] < residual["whole_seconds"] < swapped["whole_seconds"]
