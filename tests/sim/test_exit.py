"""A process that ends right after backward ends cleanly: no worker of autograd is left with an object of Python's.

A worker drops what a finished backward held *after* it has woken the thread that waits for it: a hook or a mode that
was active when backward was called, for one. If it asks for the interpreter's lock while the interpreter ends, Python
ends the thread by force, in a destructor, and the process aborts ("terminate called without an active exception").
On an idle machine the worker wins that race nearly always, so here it is delayed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")]

SCRIPT = """
import atexit, ctypes, os, sys, time
late = ctypes.CDLL(os.environ["LD_PRELOAD"])

class Held:
    def __del__(self):
        os.write(1, b"dropped")

def step():
    held = Held()
    x = torch.ones(4, device="sim", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: t, lambda t: t):
        loss = x.exp().sum()
        late.late_by(300_000)
        loss.backward()
    late.late_by(0)

def last_step():
    sys.setswitchinterval(1000)  # from here on nobody else gets the interpreter's lock unless it is given away
    step()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass

if sys.argv[1] == "after":
    atexit.register(last_step)
import torch
import lowtide.sim
lowtide.sim.start(device="tiny")
if sys.argv[1] == "before":
    atexit.register(last_step)
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("late") / "late_worker.so"
    source = Path(__file__).with_name("late_worker.cpp")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return library


def ends(preloaded: Path, when: str) -> subprocess.CompletedProcess[str]:
    """A process whose last step runs before or after the simulator's own end; what is registered last runs first."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, when],
        env={**os.environ, "LD_PRELOAD": str(preloaded), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_end_waits_for_a_worker_that_still_holds_an_object_of_pythons(preloaded: Path) -> None:
    done = ends(preloaded, "before")
    assert (done.returncode, done.stdout) == (0, "dropped"), done.stderr


def test_a_worker_that_nobody_waits_for_is_caught_by_the_end(preloaded: Path) -> None:
    """Proves that the delay lies where it should: else the test above could not fail."""
    assert "dropped" not in ends(preloaded, "after").stdout
