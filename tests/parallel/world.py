"""A world of gloo processes that is started once and runs many programs.

Law: a program's failure in any rank fails the test, with that rank's traceback;
a world that has failed is not used again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["World"]


class World:
    """``size`` processes of one gloo group, each listening for programs of this folder."""

    def __init__(self, size: int) -> None:
        self._folder = TemporaryDirectory(prefix="lowtide-world-")
        meeting, address = (str(Path(self._folder.name) / name) for name in ("meeting", "line"))
        with Listener(address) as listener:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("ranks.py")), str(size), meeting, address],
                start_new_session=True,
            )
            lines: dict[int, Connection] = {}
            while len(lines) < size:
                line = listener.accept()
                lines[line.recv()] = line
        self._lines = [lines[rank] for rank in range(size)]

    def run(self, program: str, **options: Any) -> list[Any]:
        """Run ``module.function`` in every rank; what each returned, by rank."""
        module, function = program.split(".")
        for line in self._lines:
            line.send((module, function, options))
        answers = [line.recv() for line in self._lines]
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        """Hang up and see every process end."""
        for line in self._lines:
            line.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()
