"""Longer campaigns than ``make test``: other versions of Python and torch, the open-ended fuzzer, the full bench.

Each session makes an environment of its own. ``nox --list`` shows them; none is
part of CI.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests"]

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCHES = ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1"]
TORCH = "2.13.0"  # that of CI


def install(session: nox.Session, torch: str, extras: str) -> None:
    """Install the wanted torch first, then lowtide, which leaves it as it is."""
    session.install(f"torch=={torch}")
    session.install("--editable", f".[{extras}]")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """Run the test suite on every supported pair of Python and torch."""
    install(session, torch, "report,dev")
    session.run("python", "-m", "pytest", *session.posargs)
    session.run("python", "-m", "pytest", "--device", "sim", "tests")


@nox.session
def no_compute(session: nox.Session) -> None:
    """Run every engine test on the simulated accelerator once more, without kernels: bytes, times, races."""
    install(session, TORCH, "report,dev")
    session.run("python", "-m", "pytest", "-n", "2", "--device", "sim", "--no-compute", "tests", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run the fuzzer for as long as asked: ``nox -s fuzz -- --seconds 3600``."""
    install(session, TORCH, "dev")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def residual(session: nox.Session) -> None:
    """Send every pattern of float32 through a split and a merge: ten minutes on one core."""
    install(session, TORCH, "dev")
    session.run("python", "-m", "tests.optim.all_patterns")


@nox.session
def mutations(session: nox.Session) -> None:
    """Run every mutant and write the table: ``nox -s mutations``. Takes a quarter of an hour."""
    install(session, TORCH, "dev")
    table = session.posargs or ["--markdown", "docs/mutations.md"]
    session.run("python", "-m", "tests.mutations", "--run", *table)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the whole bench and write its figures: ``nox -s bench -- --json figures.json``."""
    install(session, TORCH, "report")
    session.run("lowtide", "bench", *session.posargs)
