"""The races section of the device check: torch's CUDA sanitizer, or the simulated device's own detector.

Law: a detector that stays silent is believed only if it saw a race that was
made on purpose. The sanitizer works in a process of its own, since it must be
there before the first operator.

Run by itself, with TORCH_CUDA_SANITIZER=1, this file is that process: it prints
one JSON line per mode.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from device_check_base import Check, Skipped
from device_check_equality import Case, cases, run_child, train
from device_check_modes import EQUAL_MODES, step_modes

from lowtide import _torch
from lowtide import device as seam
from lowtide.bench.modes import MODES, Mode
from lowtide.residency.swap_tensor import SwapTensor

__all__ = ["SEEDED", "races", "seeded_race", "watched_modes"]

RACES, SEEDED = "races", "seeded race"


def watched_modes(where: torch.device) -> dict[str, Mode]:
    """The plain model as the control, then every mode that moves bytes, the baseline's too."""
    known = {"plain": MODES["plain"], **step_modes(where), **EQUAL_MODES}
    return {name: mode for name, mode in known.items() if name == "plain" or "swap" in name or "offload" in name}


def seeded_race(where: torch.device) -> None:
    """Write on one stream what another one has just written, ordered by nothing."""
    values = torch.ones(1 << 16, device=where)
    side: Any = seam.new_stream(where)
    with seam.use_stream(side):
        values.mul_(2)
    seam.synchronize(where)


def races(check: Check) -> None:
    """Count the races of every mode that moves bytes."""
    if check.simulator is not None:
        counts = _simulated(check)
    elif check.device.type == "cuda":
        counts = _sanitized(check)
    else:
        raise Skipped("not available on this device: it needs CUDA or the simulated device")
    check.table("races", ("mode", "races", "first"), [(m, str(n), text[:60]) for m, (n, text) in counts.items()])
    for mode, (number, text) in counts.items():
        check.record(RACES, mode, "races", number, "count")
        if mode == SEEDED and not number:
            check.fail(RACES, "the detector did not see the race that was made on purpose: its silence says nothing")
        if mode != SEEDED and number:
            check.fail(RACES, f"{mode}: {number} races\n{text}")


# ---------------------------------------------------------------- simulated device


def _simulated(check: Check) -> dict[str, tuple[int, str]]:
    counts: dict[str, tuple[int, str]] = {}

    def watch(name: str, run: Callable[[], object]) -> None:
        check.simulator.reset()
        run()
        found = check.simulator.races()
        counts[name] = len(found), str(found[0]) if found else ""

    case = cases(check.device, small=True)[0]
    watch(SEEDED, lambda: seeded_race(check.device))
    for mode in watched_modes(check.device).values():
        watch(mode.name, lambda mode=mode: train(case, mode, check.device))  # type: ignore[misc]
    check.simulator.reset()
    return counts


# ---------------------------------------------------------------- sanitizer


def _sanitized(check: Check) -> dict[str, tuple[int, str]]:
    done = run_child(check, [sys.executable, str(Path(__file__).resolve())], {"TORCH_CUDA_SANITIZER": "1"})
    lines = [loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        check.fail(RACES, f"the sanitized process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {line["mode"]: (line["races"], line["text"]) for line in lines}


@contextlib.contextmanager
def _visible_copies() -> Iterator[None]:
    """Let the sanitizer, which is a dispatch mode, see the copies that lowtide hides from dispatch modes.

    What only re-points a tensor stays hidden: the sanitizer takes ``set_`` for a write.
    """
    hidden, started_in, whole = _torch.no_dispatch, SwapTensor._started_in, _swap_module().whole

    def quietly(call: Any) -> Any:
        def run(*args: Any) -> Any:
            with hidden():
                return call(*args)

        return run

    _torch.no_dispatch = contextlib.nullcontext
    SwapTensor._started_in = quietly(started_in)  # type: ignore[method-assign]
    _swap_module().whole = quietly(whole)
    try:
        yield
    finally:
        _torch.no_dispatch = hidden
        SwapTensor._started_in = started_in  # type: ignore[method-assign]
        _swap_module().whole = whole


def _swap_module() -> Any:
    return sys.modules[SwapTensor.__module__]


def _attempt(name: str, run: Callable[[], object]) -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors  # noqa: PLC0415 - importing it on a CPU build is harmless but pointless

    number, text = 0, ""
    try:
        run()
    except CUDASanitizerErrors as error:
        number, text = len(error.errors), str(error.errors[0])
    torch.accelerator.synchronize()
    sys.stdout.write(dumps({"mode": name, "races": number, "text": text}) + "\n")
    sys.stdout.flush()


def _child() -> int:
    """Run the seeded race and every mode under the sanitizer; it stops a mode at its first race."""
    if "TORCH_CUDA_SANITIZER" not in os.environ:
        sys.stderr.write("expected TORCH_CUDA_SANITIZER=1 in the environment. Run device_check.py instead.\n")
        return 2
    where = torch.device("cuda", torch.cuda.current_device())
    case: Case = cases(where, small=True)[0]
    _attempt(SEEDED, lambda: seeded_race(where))
    with _visible_copies():
        for mode in watched_modes(where).values():
            _attempt(mode.name, lambda mode=mode: train(case, mode, where))  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    raise SystemExit(_child())
