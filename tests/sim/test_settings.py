"""Devices other than the one that the test run has: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.sim


def _run(program: str) -> str:
    head = "import torch, lowtide.sim\nMIB = 1 << 20\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_caching_allocators_model_reserves_what_torchs_would() -> None:
    _run("""
        sim = lowtide.sim.start("tiny", caching=True)
        reserved = lambda: sim.memory().reserved
        take = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="sim")
        assert reserved() == 0
        a = take(100)  # rounded to 512, out of a segment of 2 MiB
        assert (sim.memory().allocated, reserved()) == (512, 2 * MIB)
        b = take(MIB)  # still small: the same segment
        assert reserved() == 2 * MIB
        c = take(3 * MIB)  # out of a segment of 20 MiB
        assert reserved() == 22 * MIB
        d = take(17 * MIB + 1)  # what is left of it has no room: a segment of its own, rounded to 2 MiB
        assert reserved() == 40 * MIB
        del d
        assert reserved() == 40 * MIB  # kept for later
        e = take(18 * MIB)
        assert reserved() == 40 * MIB  # used again
        del a, b, c, e
        torch.accelerator.empty_cache()
        assert reserved() == 0
        assert sim.memory().peak_reserved == 40 * MIB
        """)


def test_memory_in_pieces_runs_out_before_its_sum_does() -> None:
    _run("""
        sim = lowtide.sim.start("tiny", caching=True, capacity=64 * MIB)
        take = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="sim")
        pieces = [take(12 * MIB) for _ in range(5)]
        del pieces[1], pieces[2]
        assert sim.memory().allocated == 36 * MIB
        take(24 * MIB)  # two free segments of 12 MiB go back to the device and make room for one
        keep = [take(9 * MIB), take(9 * MIB)]
        try:
            take(20 * MIB)
        except torch.OutOfMemoryError as error:
            assert "reserved" in str(error)
        else:
            raise AssertionError
        """)


def test_two_devices_have_streams_memory_and_generators_of_their_own() -> None:
    _run("""
        sim = lowtide.sim.start("tiny", count=2)
        x = torch.ones(MIB, dtype=torch.uint8, device="sim:1")
        assert (sim.memory(0).allocated, sim.memory(1).allocated) == (0, MIB)
        with torch.sim.device(1):
            torch.manual_seed(5)
            y = torch.rand(4, device="sim")
        assert y.device.index == 1
        torch.manual_seed(5)
        assert torch.equal(torch.rand(4, device="sim:0").cpu(), y.cpu())
        z = x.to("sim:0")
        assert int(z.sum()) == MIB
        assert not sim.races(), sim.races()[0]
        """)


@pytest.mark.parametrize(
    ("settings", "copies_at_once"), [('"tiny"', 1), ("half", 2), ('"tiny", shared_link=True', 2)], ids=str
)
def test_directions_have_an_engine_each_or_take_turns(settings: str, copies_at_once: int) -> None:
    _run(f"""
        import dataclasses
        half = dataclasses.replace(lowtide.sim.Description.named("tiny"), duplex="half")
        sim = lowtide.sim.start({settings})
        device = [torch.zeros(16 * MIB, dtype=torch.uint8, device="sim") for _ in range(2)]
        host = [torch.zeros(16 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        sim.synchronize(), sim.reset()
        with torch.Stream("sim"):
            host[0].copy_(device[0], non_blocking=True)
        with torch.Stream("sim"):
            device[1].copy_(host[1], non_blocking=True)
        one = sim.description.link_latency + 16 * MIB / sim.description.link_out
        took = sim.synchronize()
        assert abs(took / ({copies_at_once} * one) - 1) < 0.01, (took, one)
        """)


def test_without_a_compiler_the_error_says_what_is_missing() -> None:
    _run("""
        import os, tempfile
        os.environ["LOWTIDE_CACHE"] = tempfile.mkdtemp()
        os.environ["PATH"] = ""
        os.environ.pop("CXX", None)
        try:
            lowtide.sim.start("tiny")
        except lowtide.errors.UnsupportedError as error:
            assert "compiler" in str(error)
            assert "g++" in str(error)
        else:
            raise AssertionError
        """)


def test_lowtide_itself_never_imports_the_simulator() -> None:
    out = _run("""
        import subprocess, sys
        code = "import lowtide, lowtide.cli, sys; print([m for m in sys.modules if m.startswith('lowtide.sim')])"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        """)
    assert out.strip() == "[]"
