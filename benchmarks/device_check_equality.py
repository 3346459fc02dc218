"""Sections of the device check that ask whether training stays the same: bits, self-check, capture.

Law: a mode is judged against the plain model only where the plain model agrees
with itself; where it does not, that is said, and nothing is judged.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from device_check_base import Check, Skipped, clear, held_bytes, mib
from device_check_modes import EQUAL_MODES, OURS
from torch import Tensor, nn

import lowtide
from lowtide import SwapManager
from lowtide import device as seam
from lowtide.bench.models import GptBlock, LlamaBlock, Stack
from lowtide.bench.modes import MODES, Mode
from lowtide.measure import read_records

__all__ = ["Case", "Trained", "capture", "cases", "deterministic", "equality", "selfcheck", "train"]

EQUALITY, SELFCHECK, CAPTURE = "bit equality", "selfcheck", "graph capture"
STEPS = 3


@contextlib.contextmanager
def deterministic(*, poison: bool) -> Iterator[None]:
    """Kernels that give the same bits each time; attention's backward adds in any order without this.

    Args:
        poison: also let torch fill what ``empty`` returns, so that a value that is read before it arrived shows.
            Takes long where much memory is pinned.
    """
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = poison
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---------------------------------------------------------------- what is trained


@dataclass(frozen=True)
class Case:
    """A model, its input, and the context in which its forward runs."""

    name: str
    build: Callable[[], Stack]
    shape: tuple[int, int, int]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def batch(self, number: int, where: torch.device) -> Tensor:
        """The input of one step; drawn on the host, so that every device sees the same."""
        draw = torch.Generator().manual_seed(100 + number)
        return torch.randn(*self.shape, generator=draw).to(where)


def cases(where: torch.device, *, small: bool) -> list[Case]:
    """A GPT with dropout, and a Llama under autocast in bfloat16."""
    width, tokens, layers = (64, 128, 3) if small else (512, 512, 4)
    heads, hidden = width // 32, 8 * width // 3 // 8 * 8
    return [
        Case(
            "gpt with dropout",
            lambda: Stack(*[nn.Sequential(GptBlock(width, heads), nn.Dropout(0.1)) for _ in range(layers)]),
            (4, tokens, width),
        ),
        Case(
            "llama in bf16 autocast",
            lambda: Stack(*[LlamaBlock(width, heads, hidden, tokens) for _ in range(layers)]),
            (4, tokens, width),
            lambda: torch.autocast(where.type, dtype=torch.bfloat16),
        ),
    ]


@dataclass
class Trained:
    """What a short training left behind.

    Args:
        losses: of each step, as ``float.hex``.
        tensors: gradients of the last step, then the weights after it.
        generator: the state of the device's random generator.
        grown_bytes: device bytes by which a later step left more behind than the one before.
        lower_bytes: bytes that stayed on the lower tier.
    """

    losses: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    generator: Tensor = field(default_factory=lambda: torch.empty(0))
    grown_bytes: int = 0
    lower_bytes: int = 0
    late_loads: int = 0
    report: lowtide.Report | None = None

    def differs(self, other: Trained) -> str | None:
        """Say what differs from another training, or None if it is the same to the bit."""
        for number, (want, got) in enumerate(zip(other.losses, self.losses, strict=True), 1):
            if want != got:
                return f"loss of step {number} is {got}, expected {want}"
        for want_tensor, got_tensor in zip(other.tensors, self.tensors, strict=True):
            if not torch.equal(want_tensor, got_tensor):
                return f"a {tuple(got_tensor.shape)} gradient or weight has other bits"
        return None if torch.equal(other.generator, self.generator) else "the random state differs"


def train(case: Case, mode: Mode, where: torch.device) -> Trained:
    """Train a few steps in a mode, from the same seeds for every mode."""
    SwapManager().reset()
    torch.manual_seed(0)
    model = case.build().to(where)
    mode.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    seen, held = Trained(), 0
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with mode.around(), case.around():
            loss = model(case.batch(number, where)).float().square().mean()
        seen.report = lowtide.report(model)
        loss.backward()
        seen.losses.append(float(loss.detach()).hex())
        seen.tensors = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        del loss
        if seam.is_accelerator(where):
            seam.synchronize(where)
            now = held_bytes(where)
            seen.grown_bytes = now - held if number == STEPS - 1 else 0
            held = now
    seen.tensors += [p.detach().clone() for p in model.parameters()]
    seen.generator = seam.default_generator(where).get_state().clone()
    seen.lower_bytes, seen.late_loads = SwapManager().lower_bytes(), SwapManager().traffic.late_loads
    return seen


# ---------------------------------------------------------------- bits


def equality(check: Check) -> None:
    """Compare every mode with the plain model, bit by bit, on this device."""
    for case in cases(check.device, small=check.small):
        with deterministic(poison=True):
            plain, again = (train(case, MODES["plain"], check.device) for _ in range(2))
            unsteady = again.differs(plain)
            if unsteady is not None:
                check.record(case.name, "plain", "reproducible", f"no: {unsteady}", "text")
                check.console.print(f"{case.name}: the plain model does not agree with itself: {unsteady}")
            rows = [_equal_row(check, case, mode, plain, judged=unsteady is None) for mode in EQUAL_MODES.values()]
        columns = ("mode", "bits", "kept MiB", "swapped", "recomputed", "held elsewhere", "late loads", "refused")
        check.table(f"{case.name}: {STEPS} steps against plain", columns, rows)
        clear(check.device)


def _equal_row(check: Check, case: Case, mode: Mode, plain: Trained, *, judged: bool) -> list[str]:
    try:
        seen = train(case, mode, check.device)
    except (RuntimeError, AssertionError) as error:
        check.fail(EQUALITY, f"{case.name}, {mode.name}: {type(error).__name__}: {error}")
        return [mode.name, "raised", *[""] * 6]
    differs = seen.differs(plain)
    verdict = "equal" if differs is None else "differ" if judged else "not judged"
    if differs is not None and judged:
        check.fail(EQUALITY, f"{case.name}, {mode.name}: {differs}")
    if seen.lower_bytes or seen.grown_bytes > 0:
        where = f"{seen.grown_bytes} bytes a step on the device, {seen.lower_bytes} on the lower tier"
        check.fail(EQUALITY, f"{case.name}, {mode.name}: it leaks {where}")
    check.record(case.name, mode.name, "bits", verdict, "text")
    assert seen.report is not None
    counters = ("kept_bytes", "swapped_bytes", "recomputed_bytes", "held_elsewhere_bytes")
    sizes = [seen.report.total(name) for name in counters]
    for name, size in zip(counters, sizes, strict=True):
        check.record(case.name, mode.name, name, size, "B")
    refused = _refusals(seen.report)
    check.record(case.name, mode.name, "late_loads", seen.late_loads, "count")
    check.record(case.name, mode.name, "refused", "; ".join(refused), "text")
    return [mode.name, verdict, *map(mib, sizes), str(seen.late_loads), "\n".join(refused)]


def _refusals(report: lowtide.Report) -> list[str]:
    """Reasons with count and bytes, over all regions."""
    totals: dict[str, tuple[int, int]] = {}
    for row in report.rows:
        for reason, refusal in row.refused.items():
            count, nbytes = totals.get(reason, (0, 0))
            totals[reason] = count + refusal.count, nbytes + refusal.bytes
    return [f"{count} x {reason} ({mib(nbytes)} MiB)" for reason, (count, nbytes) in totals.items()]


# ---------------------------------------------------------------- self-check


def selfcheck(check: Check) -> None:
    """Run ``lowtide selfcheck``, each mode in a process of its own, and pass its verdict on."""
    if check.simulator is not None:
        raise Skipped("its processes would not have the simulated device")
    if check.small:
        raise Skipped("not in the small form: lowtide selfcheck takes half a minute by itself")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "selfcheck.json"
        command = [sys.executable, "-m", "lowtide.selfcheck", "--json", str(figures)]
        done = run_child(check, command, {"COLUMNS": "200"})
        check.console.print(done.stdout, markup=False, highlight=False)
        if figures.exists():
            for one in read_records(figures):
                check.record(f"{SELFCHECK}: {one.case}", one.mode, one.metric, one.value, one.unit)
        if done.returncode != 0:
            broken = re.findall(r"^broken .*", done.stdout, flags=re.MULTILINE) or [done.stderr[-2000:]]
            check.fail(SELFCHECK, f"exit code {done.returncode}: {' '.join(broken)}")


def run_child(check: Check, command: list[str], extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a process of our own for no longer than there is time.

    Raises:
        Skipped: it did not end in time.
    """
    try:
        return subprocess.run(  # noqa: S603 - our own interpreter
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(check.left, 1.0),
            env={**os.environ, **extra},
        )
    except subprocess.TimeoutExpired as error:
        raise Skipped("out of time") from error


# ---------------------------------------------------------------- capture


def capture(check: Check) -> None:
    """Check that a swap under graph capture raises one of our errors, and that training goes on afterwards."""
    if check.device.type != "cuda" or not hasattr(torch.cuda, "CUDAGraph"):
        raise Skipped("graphs are captured on CUDA devices only")
    case = cases(check.device, small=check.small)[0]
    with deterministic(poison=True):
        before = train(case, OURS["swap all"], check.device)
        caught = _caught(case, check.device)
        after = train(case, OURS["swap all"], check.device)
    check.record(CAPTURE, "swap all", "raised", type(caught).__name__, "text")
    check.console.print(f"capturing a swap raises {type(caught).__name__}: {caught}", markup=False)
    if not isinstance(caught, lowtide.errors.LowtideError):
        check.fail(CAPTURE, f"capturing a swap: expected an error from lowtide.errors, got {caught!r}")
    differs = after.differs(before)
    if differs is not None:
        check.fail(CAPTURE, f"training after a refused capture: {differs}")


def _caught(case: Case, where: torch.device) -> BaseException | None:
    """What raises when a forward with swaps is captured."""
    torch.manual_seed(0)
    model = case.build().to(where)
    OURS["swap all"].prepare(model)
    inputs = case.batch(0, where)
    model(inputs).sum().backward()  # libraries make their handles outside of a capture
    seam.synchronize(where)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty: that is the point
        try:
            with torch.cuda.graph(graph):
                model(inputs)
        except RuntimeError as error:
            return error
    return None
