"""The self-check passes here, and each of its demands can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide import selfcheck
from lowtide.measure import read_records
from lowtide.selfcheck import CHECKS, MODES, ChildResult, judge

MIB = 1 << 20
PEAKS = {"none": 150, "save": 86, "funcsave": 86, "swap_with_policy": 70, "swap_wrapper": 32}


def _good() -> dict[str, ChildResult]:
    """Results that meet every demand."""
    return {
        name: ChildResult(
            losses=[f"0x1.{step}p+2" for step in range(3)],
            peak_bytes=PEAKS.get(name, 25) * MIB,
            kept_bytes=MIB,
            backward_flops=100,
            swapped_bytes=94 if mode.moves else 0,
            eligible_bytes=100,
            watched_bytes=100,
            released_bytes=94,
        )
        for name, mode in MODES.items()
    }


def test_good_results_break_nothing() -> None:
    assert judge(_good()) == []


def _spoiled(mode: str, **changes: object) -> Callable[[], dict[str, ChildResult]]:
    def make() -> dict[str, ChildResult]:
        results = _good()
        results[mode] = dataclasses.replace(results[mode], **changes)  # type: ignore[arg-type]
        return results

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_spoiled("funcswap", losses=["0x1.0p+2", "0x1.1p+2", "0x1.3p+2"]), "funcswap: loss of step 3"),
        (_spoiled("save", peak_bytes=150 * MIB), "save: peak"),
        (_spoiled("swap", peak_bytes=41 * MIB), "swap and recompute: peaks differ"),
        (_spoiled("funcswap", peak_bytes=41 * MIB), "funcswap and funcrecompute: peaks differ"),
        (_spoiled("swap_with_policy", peak_bytes=30 * MIB), "swap_with_policy: peak"),
        (_spoiled("swap_wrapper", swapped_bytes=79), "swap_wrapper: 79% of the eligible bytes were moved"),
        (_spoiled("swap", released_bytes=79), "swap: 79% of the eligible bytes were released"),
    ],
)
def test_each_demand_can_fail(make: Callable[[], dict[str, ChildResult]], words: str) -> None:
    broken = judge(make())
    assert len(broken) == 1
    assert broken[0].startswith(words)


def test_a_mode_that_fails_names_itself() -> None:
    with pytest.raises(RuntimeError, match="selfcheck mode nonsense: expected exit code 0"):
        selfcheck._spawn("nonsense")


def test_training_is_the_same_and_memory_falls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert selfcheck.run(path) == 0, capsys.readouterr().out
    records = read_records(path)
    assert {(r.case, r.mode) for r in records} == {(check, mode) for check, modes in CHECKS.items() for mode in modes}
    assert {r.metric for r in records} == {
        *(f"loss_step_{number}" for number in (1, 2, 3)),
        "peak_bytes",
        "kept_bytes",
        "recomputed_flops",
        "swapped_bytes",
    }
    losses = {(r.metric, r.value) for r in records if r.unit == "float.hex"}
    assert len(losses) == 3
