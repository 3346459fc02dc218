"""A thread of the host that works while the loop goes on.

Law: what is done there has the bits of what would be done here: the same number of compute threads, the same treatment
of denormal numbers, no history, and new tensors in host memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lowtide import device

__all__ = ["Beside"]


class Beside:
    """One thread, started when it is first needed.

    It holds what it works on and nothing else, and ends when nobody holds it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        self._process = 0
        self.jobs = 0

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have ``work`` done after all that was submitted before."""
        if self._thread is None or self._process != os.getpid():  # a child has no thread of its parent's
            self._thread, self._process = ThreadPoolExecutor(1, thread_name_prefix=self._name), os.getpid()
        self.jobs += 1
        return self._thread.submit(_as_here, torch.get_num_threads(), _flushes_denormals(), work)


def _flushes_denormals() -> bool:
    # torch.set_flush_denormal is about one thread, and has no counterpart that reads it.
    return sys.float_info.min / 2.0 == 0.0


def _as_here(threads: int, flushes: bool, work: Callable[[], None]) -> None:  # noqa: FBT001 - of one caller
    # A sum is cut by the number of threads.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if _flushes_denormals() is not flushes:
        torch.set_flush_denormal(flushes)
    with torch.no_grad(), device.with_default_device(torch.device("cpu")):
        work()
