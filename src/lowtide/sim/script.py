"""``lowtide simulate SCRIPT.py``: run somebody's training script on a simulated device, and say what it cost.

Law: the script runs as ``python SCRIPT.py`` would run it, and its exit code is
kept; nothing that it raises is swallowed. Figures are printed whether it
succeeds or fails, since a failure is when they are wanted most.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

import lowtide.sim
from lowtide.errors import LowtideError, explain
from lowtide.measure import Record, write_records
from lowtide.sim import Simulator
from lowtide.sim.perfetto import write_trace

__all__ = ["ScriptError", "run_script"]

BENCH = "simulate"
GIB = 1 << 30
RACES_SHOWN = 5


class ScriptError(LowtideError, ValueError):
    """There is no such script."""


@contextmanager
def _as_main(path: Path, args: Sequence[str]) -> Iterator[None]:
    """Make the interpreter look to a script as if it had been started with it."""
    argv, paths = sys.argv[:], sys.path[:]
    sys.argv[:] = [str(path), *args]
    sys.path[0:0] = [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv[:] = argv
        sys.path[:] = paths


def _exit_code(stop: SystemExit) -> int:
    """The exit code that the interpreter would end with; a text is printed, as there."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def _run(path: Path, args: Sequence[str]) -> int:
    with _as_main(path, args):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            return _exit_code(stop)
        except Exception:  # noqa: BLE001 - as the interpreter does: the traceback, and 1; the figures come after it
            traceback.print_exc()
            return 1
    return 0


def _figures(sim: Simulator) -> list[tuple[str, float | int, str, str]]:
    """Each figure: metric, value, unit, and how it is shown."""
    now, memory, busy, copied = sim.synchronize(), sim.memory(), sim.busy(), sim.copied()
    races, launches = len(sim.races()), sim.launches
    found: list[tuple[str, float | int, str, str]] = [
        ("virtual_seconds", now, "s", f"{now * 1e3:.3f} ms"),
        ("peak_active_bytes", memory.peak_active, "B", f"{memory.peak_active / GIB:.3f} GiB"),
        ("peak_allocated_bytes", memory.peak_allocated, "B", f"{memory.peak_allocated / GIB:.3f} GiB"),
        ("capacity_bytes", memory.capacity, "B", f"{memory.capacity / GIB:.3f} GiB"),
        ("races", races, "count", str(races)),
        ("out_bytes", int(copied.out), "B", f"{copied.out / GIB:.3f} GiB"),
        ("in_bytes", int(copied.inward), "B", f"{copied.inward / GIB:.3f} GiB"),
    ]
    parts = {"compute": busy.compute, "out": busy.out, "in": busy.inward, "host": busy.host}
    for name, seconds in parts.items():
        share = f" ({seconds / now * 100:.1f} %)" if now else ""
        found.append((f"{name}_busy_seconds", seconds, "s", f"{seconds * 1e3:.3f} ms{share}"))
    found.append(("launches", launches, "count", str(launches)))
    return found


def run_script(
    path: Path,
    args: Sequence[str] = (),
    *,
    device: str = "h100-80gb",
    compute: bool = True,
    json: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Run a script on a simulated device; print its virtual time, peak memory, races, copies and busy times.

    Starts the simulator in this process, so the script's ``torch.accelerator``
    is the simulated device. Costs the script's own time on the CPU if it computes.

    Args:
        path: the script.
        args: its arguments.
        device: name of a description.
        compute: False: no kernel runs and every read of a number gives 0; sizes of any model are then possible.
        json: where to write the figures, or None.
        trace: where to write a trace of the whole run, or None.

    Returns:
        The script's exit code: 1 if it raised.

    Raises:
        ScriptError: there is no such file.
        DescriptionError: an unknown device.
    """
    if not path.is_file():
        raise ScriptError(
            explain(
                "no script to run",
                expected="a Python file",
                got=str(path),
                where="lowtide simulate",
                remedy="Write: lowtide simulate SCRIPT.py --device NAME -- its own arguments",
            )
        )
    sim = lowtide.sim.start(device, compute=compute, trace=trace is not None)
    code = _run(path, args)
    sys.stdout.flush()
    figures = _figures(sim)
    table = Table("figure", "value", title=f"{path.name} on a simulated {device}")
    for metric, _, _, shown in figures:
        table.add_row(metric.replace("_", " "), shown)
    console = Console()
    console.print(table)
    for race in sim.races()[:RACES_SHOWN]:
        console.print(str(race), markup=False, highlight=False)
    if json is not None:
        write_records(
            json, [Record(BENCH, path.name, device, metric, value, unit) for metric, value, unit, _ in figures]
        )
    if trace is not None:
        write_trace(sim.trace(), trace)
    return code
