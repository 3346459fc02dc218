"""Runs one task in a fork of this process and brings back what it returns.

A mutant costs a fork instead of a start of Python, torch and the device. Law:
what a child could not do is an error here, with its traceback; only a crash or
a hang is an answer of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from .source import MutationError

__all__ = ["Ended", "in_fork"]


class Ended(NamedTuple):
    """How a fork ended: what it returned, or why it could not."""

    result: Any
    died: str | None  # "crash ..." or "hang ..."


def in_fork(task: Callable[[Callable[[Any], None]], None], *, seconds: float) -> Ended:
    """Run ``task(tell)`` in a fork; the list of what it told comes back. Only plain data can be told."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _be_the_child(task, write_end)
    os.close(write_end)
    text, hangs = _read_all(read_end, time.monotonic() + seconds)
    os.close(read_end)
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    told = [json.loads(line) for line in text.splitlines() if line]
    if hangs:
        return Ended(told, f"hang: not done after {seconds:.0f} s")
    if os.WIFSIGNALED(status):
        return Ended(told, f"crash: {signal.Signals(os.WTERMSIG(status)).name}")
    if os.waitstatus_to_exitcode(status):
        raise MutationError(f"a fork failed:\n{told[-1]}")
    return Ended(told, None)


def _be_the_child(task: Callable[[Callable[[Any], None]], None], write_end: int) -> None:
    """Never returns: a fork that lived on would be a second tool."""

    def tell(what: Any) -> None:
        view = memoryview((json.dumps(what) + "\n").encode())
        while view:
            view = view[os.write(write_end, view) :]

    code = 1
    try:
        task(tell)
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent, which raises it
        tell(traceback.format_exc())
    finally:
        # No clean-up: threads of autograd still run, and the parent owns everything.
        os._exit(code)


def _read_all(read_end: int, deadline: float) -> tuple[str, bool]:
    parts: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read_end], [], [], left)[0]:
            return b"".join(parts).decode(), True
        part = os.read(read_end, 1 << 16)
        if not part:
            return b"".join(parts).decode(), False
        parts.append(part)
