"""The device check runs here in its small form, and each of its demands can fail. Its times are tested nowhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lowtide import _torch
from lowtide.bench.models import GptBlock, Stack
from lowtide.bench.modes import MODES, Mode
from lowtide.measure import read_records
from lowtide.residency import swap_tensor

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "device_check.py"
SECTIONS = {"machine", "bit equality", "races", "rates", "steps", "copy overlap", "graph capture", "selfcheck"}
CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one file of the check by the last word of its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"device_check_{name}" if name else "device_check")


@pytest.fixture
def check(part: Any) -> Any:
    """A check of the CPU with a minute left, whose output can be read."""
    return part("base").Check(CPU, True, time.monotonic() + 60, Console(file=io.StringIO(), width=200))


def _printed(check: Any) -> str:
    text: str = check.console.file.getvalue()
    return text


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)


def test_the_small_form_holds_on_a_cpu_and_every_section_leaves_a_record(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = _run("--small", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every demand that was checked holds." in done.stdout
    records = read_records(figures)
    assert {r.bench for r in records} == {"device_check"}
    assert {r.case for r in records if r.metric == "seconds"} == SECTIONS
    skipped = {(r.case, r.mode): r.value for r in records if r.metric == "skipped"}
    assert set(skipped) == {("races", ""), ("rates", "link"), ("graph capture", ""), ("selfcheck", "")}
    bits = {r.value for r in records if r.metric == "bits"}
    assert bits == {"equal"}


@pytest.mark.timeout(300)  # the first start of the simulated device compiles it
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs a compiler")
def test_the_small_form_holds_on_the_simulated_device_where_no_mode_races(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = _run("--small", "--simulate", "tiny", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(figures)
    races = {r.mode: r.value for r in records if r.metric == "races"}
    assert races.pop("seeded race") == 1
    assert len(races) == 8
    assert set(races.values()) == {0}
    peaks = {r.mode: float(r.value) for r in records if (r.case, r.metric) == ("steps", "peak_bytes")}
    assert peaks["recompute"] < peaks["save mm+sdpa"] < peaks["plain"]
    assert peaks["swap mm+sdpa"] < peaks["save mm+sdpa"]
    assert peaks["swap all"] < peaks["plain"]


def test_without_time_every_section_is_skipped_aloud(part: Any, check: Any) -> None:
    check.deadline = time.monotonic()
    assert part("").run_sections(check) == 0
    assert _printed(check).count("skipped: out of time") == len(SECTIONS)
    assert {r.case for r in check.records if r.value == "out of time"} == SECTIONS


def test_a_section_that_raises_fails_the_check_and_ends_no_other(part: Any, check: Any) -> None:
    main = part("")

    def broken(_check: Any) -> None:
        raise ValueError("no such thing")

    ran: list[str] = []
    sections = [main.Section("first", broken, 1), main.Section("second", lambda _: ran.append("second"), 1)]
    assert main.run_sections(check, sections) == 1
    assert ran == ["second"]
    assert check.failures == ["first: ValueError: no such thing"]


# ---- bits ------------------------------------------------------------------------------------------


class _Off(nn.Module):
    """A block whose result is not the one it should be."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x) * 1.5
        return result


class _OffBackward(_Off):
    """A block whose result is right and whose gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        result.register_hook(lambda grad: grad * 1.5)
        return result


@pytest.fixture
def one_case(part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One tiny case instead of all."""
    equality = part("equality")
    case = equality.Case("tiny", lambda: Stack(*[GptBlock(32, 2) for _ in range(2)]), (2, 8, 32))
    monkeypatch.setattr(equality, "cases", lambda where, *, small: [case])
    return equality


def test_a_mode_with_other_bits_fails_the_check(one_case: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_case, "EQUAL_MODES", {"off": Mode("off", lambda block, kept: _Off(block))})
    one_case.equality(check)
    assert len(check.failures) == 1
    assert "tiny, off: loss of step 1" in check.failures[0]


def test_a_mode_that_raises_fails_the_check_and_ends_no_other(
    one_case: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise RuntimeError("no streams here")
        yield

    modes = {"raises": Mode("raises", lambda block, kept: block, around=broken), "plain": MODES["plain"]}
    monkeypatch.setattr(one_case, "EQUAL_MODES", modes)
    one_case.equality(check)
    assert check.failures == ["bit equality: tiny, raises: RuntimeError: no streams here"]
    assert ("plain", "equal") in [(r.mode, r.value) for r in check.records if r.metric == "bits"]


def test_where_plain_differs_from_itself_nothing_is_judged(
    part: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    equality = part("equality")
    number = iter(range(1000))

    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * next(number)

    case = equality.Case("unsteady", lambda: Stack(Unsteady()), (1, 1, 4))
    monkeypatch.setattr(equality, "cases", lambda where, *, small: [case])
    monkeypatch.setattr(equality, "EQUAL_MODES", {"plain": MODES["plain"]})
    equality.equality(check)
    assert not check.failures
    assert "does not agree with itself" in _printed(check)
    assert {r.value for r in check.records if r.metric == "bits"} == {"not judged"}


# ---- races -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"seeded race": [], "plain": []}, "did not see the race"),
        ({"seeded race": ["a"], "plain": ["stream 1 wrote", "b"]}, "plain: 2 races\nstream 1 wrote"),
        ({"seeded race": ["a"], "plain": []}, ""),
    ],
)
def test_a_race_or_a_blind_detector_fails_the_check(
    found: dict[str, list[str]], words: str, part: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = part("races")
    now: list[list[str]] = [[]]
    monkeypatch.setattr(races, "seeded_race", lambda where: now.append(found["seeded race"]))
    monkeypatch.setattr(races, "train", lambda case, mode, where: now.append(found[mode.name]))
    monkeypatch.setattr(races, "watched_modes", lambda where: {"plain": MODES["plain"]})
    check.simulator = SimpleNamespace(reset=lambda: None, races=lambda: now[-1])
    races.races(check)
    assert bool(check.failures) == bool(words)
    assert words in "".join(check.failures)


def test_copies_are_shown_to_a_dispatch_mode_only_inside(part: Any) -> None:
    before = _torch.no_dispatch, swap_tensor.SwapTensor._started_in, swap_tensor.whole
    with part("races")._visible_copies():
        assert _torch.no_dispatch is contextlib.nullcontext
    assert (_torch.no_dispatch, swap_tensor.SwapTensor._started_in, swap_tensor.whole) == before


# ---- steps -----------------------------------------------------------------------------------------


@pytest.fixture
def steps(part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The section without its collections of garbage, which take most of a test's time."""
    module = part("steps")
    monkeypatch.setattr(module, "clear", lambda where: None)
    return module


def _raising(error: Exception) -> Any:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        raise error
        yield

    return around


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("no"), "OOM"), (RuntimeError("CUDA error: out of memory"), "OOM on the host")],
)
def test_a_mode_out_of_memory_is_a_row_and_no_failure(
    error: Exception, words: str, steps: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Mode("large", lambda block, kept: block, around=_raising(error))
    modes = {"plain": MODES["plain"], "large": large, "recompute": steps.OURS["recompute"]}
    monkeypatch.setattr(steps, "step_modes", lambda where: modes)
    steps.steps(check)
    assert not check.failures
    outcome = {r.mode: r.value for r in check.records if r.metric == "outcome"}
    assert outcome == {"plain": "ran", "large": words, "recompute": "ran"}


@pytest.mark.parametrize(("block", "words"), [(_Off, "loss differs"), (_OffBackward, "gradients differ")])
def test_a_mode_of_ours_with_other_bits_fails_the_steps(
    block: Any, words: str, steps: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Mode("recompute", lambda inner, kept: block(inner))
    monkeypatch.setattr(steps, "step_modes", lambda where: {"plain": MODES["plain"], "recompute": off})
    steps.steps(check)
    assert check.failures == [f"steps: recompute: {words}, compared with plain"]


def test_layers_follow_from_the_scarcer_of_device_and_host(part: Any) -> None:
    steps, packed = part("steps"), part("modes").Packed(GIB, GIB, 3 * GIB)
    weights = GIB // 2
    assert steps.choose_layers(16, packed, weights, device_bytes=100 * GIB, host_bytes=1000 * GIB) == 16
    assert steps.choose_layers(16, packed, weights, device_bytes=20 * GIB, host_bytes=1000 * GIB) == 7
    assert steps.choose_layers(16, packed, weights, device_bytes=100 * GIB, host_bytes=60 * GIB) == 9
    assert steps.choose_layers(16, packed, weights, device_bytes=GIB, host_bytes=GIB) == 2


def test_packed_bytes_are_counted_per_storage_and_without_parameters(part: Any) -> None:
    linear, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
    packed = part("modes").packed_by(lambda: linear(x).sin() * linear(x))
    # x once, each product of the two, and the sine of the first
    assert packed.unique_bytes == (1 + 3) * x.nbytes
    assert packed.pinned_every_bytes > packed.pinned_unique_bytes


def test_a_twin_shares_weights_and_no_module(part: Any) -> None:
    model = Stack(GptBlock(32, 2))
    other = part("modes").twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()}
