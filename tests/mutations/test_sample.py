"""A sample of the mutants, the same every time; ``nox -s mutations`` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutations", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.sim
@pytest.mark.timeout(300)  # each mutant is a process that runs every program: seconds, more on a busy machine
def test_a_sample_of_the_mutants_is_noticed_or_known_to_be_redundant() -> None:
    ended = _tool("--run", "--sample", "8", "--seed", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 survive." in ended.stdout


@pytest.mark.sim
def test_every_reason_for_a_redundant_mutant_names_a_site_of_today() -> None:
    ended = _tool("--list")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) > 200
