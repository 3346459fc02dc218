"""The device check: does lowtide keep every promise on this machine, and what does it cost there?

Run: python benchmarks/device_check.py [--json FILE] [--small] [--minutes 8] [--simulate NAME]

Needs lowtide and torch only. On an accelerator it takes less than eight
minutes, on a CPU or a simulated device use ``--small``. Sections that no time
is left for are skipped and say so. A broken demand (other bits, a race, a leak)
makes the exit code 1; a slow step does not.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_check_base import Check, Skipped, clear
from device_check_equality import capture, equality, selfcheck
from device_check_machine import machine
from device_check_races import races
from device_check_rates import rates
from device_check_steps import overlap, steps
from rich.console import Console

from lowtide import SwapManager
from lowtide.device import training_device
from lowtide.measure import write_records

__all__ = ["SECTIONS", "Section", "main", "run_sections"]


@dataclass(frozen=True)
class Section:
    """A part of the check.

    Args:
        needs: seconds that it wants at least on an accelerator; it is skipped where fewer are left.
    """

    name: str
    run: Callable[[Check], None]
    needs: float


SECTIONS = (
    Section("machine", machine, 1),
    Section("bit equality", equality, 30),
    Section("races", races, 30),
    Section("rates", rates, 20),
    Section("steps", steps, 60),
    Section("copy overlap", overlap, 1),
    Section("graph capture", capture, 15),
    Section("selfcheck", selfcheck, 60),
)


def run_sections(check: Check, sections: Sequence[Section] = SECTIONS) -> int:
    """Run every section that time is left for; the exit code.

    A section that raises is a failed check and does not end the others.
    """
    for section in sections:
        check.console.rule(section.name)
        needs = min(section.needs, 5) if check.small else section.needs
        if check.left < needs:
            check.skip(section.name, "", "out of time")
            continue
        begun = time.monotonic()
        try:
            section.run(check)
        except Skipped as reason:
            check.skip(section.name, "", str(reason))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and the other sections run
            check.console.print(traceback.format_exc(), markup=False, highlight=False)
            check.fail(section.name, f"{type(error).__name__}: {error}")
        check.record(section.name, "", "seconds", time.monotonic() - begun, "s")
        SwapManager().reset()
        clear(check.device)
    return 1 if check.failures else 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write all figures as lowtide records")
    parser.add_argument("--small", action="store_true", help="small models: for a CPU or a simulated device")
    parser.add_argument("--minutes", type=float, default=8.0, help="sections beyond that are skipped")
    parser.add_argument("--simulate", metavar="NAME", help="start lowtide's simulated device of this name first")
    return parser.parse_args(words)


def _simulator(name: str | None) -> Any:
    """Start the simulated device if it was asked for; else the one that this process runs already, if any."""
    if name is None and training_device().type != "sim":
        return None
    import lowtide.sim  # noqa: PLC0415 - it needs a compiler, and few runs want it

    return lowtide.sim.active() if name is None else lowtide.sim.start(name)


def _device() -> torch.device:
    where = training_device()
    return torch.device(where.type, torch.accelerator.current_device_index()) if where.type != "cpu" else where


def main(words: Sequence[str] | None = None) -> int:
    """Run the check; 0 if every demand holds."""
    chosen = _arguments(words)
    # Deterministic matrix products need it; it is read when the first one runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    simulator = _simulator(chosen.simulate)
    console = Console(width=None if sys.stdout.isatty() else 140)
    deadline = time.monotonic() + 60 * chosen.minutes
    check = Check(_device(), chosen.small, deadline, console, simulator)
    if not check.accelerated:
        torch.set_num_threads(1)  # a second one that must wait for a busy core makes times meaningless
    gc.freeze()  # torch's own objects: every collection would visit them
    try:
        code = run_sections(check)
    finally:
        if chosen.json is not None:
            write_records(chosen.json, check.records)
    console.rule("verdict")
    for sentence in check.failures:
        console.print(f"failed {sentence}", style="bold red", markup=False)
    console.print(f"{len(check.failures)} demands are broken." if code else "Every demand that was checked holds.")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
