"""Runs mutants against the workloads and says of each what killed it, or that nothing did."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .forks import in_fork
from .loader import import_mutated
from .observe import Kill, Observation, count_pins, judge, observe
from .redundant import REDUNDANT
from .source import Mutant, MutationError
from .workloads import WORKLOADS

__all__ = ["Campaign", "Verdict"]

_UNCHANGED = Mutant("unchanged", "", "nothing", (), "control")
_SECONDS = 120.0


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    workload: str  # the first that killed it
    kills: tuple[Kill, ...]
    reason: str | None  # why it may survive
    seconds: float

    @property
    def killed(self) -> bool:
        return bool(self.kills)

    @property
    def wrong(self) -> str | None:
        """Why the campaign fails by this mutant, if it does."""
        if self.mutant.family == "control":
            return f"a control was killed: {self.kills[0].what}" if self.killed else None
        if self.killed:
            return "the table calls it redundant, and it was killed" if self.reason is not None else None
        return None if self.reason is not None else "it survives and the table gives no reason"


class Campaign:
    """The baseline, then mutant by mutant, each in a fork of this process."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.plain: dict[str, Observation] = {}
        self.baseline: dict[str, Observation] = {}

    def prepare(self) -> None:
        """Run everything plain and unmutated; raises unless that is clean."""
        self.plain = self._run_all(plain=True)
        self.baseline = self._run_all(plain=False)
        again = self._run_all(plain=False, shift=1)
        problems = [problem for name in WORKLOADS for problem in self._unclean(name)]
        for name in WORKLOADS:
            differ = judge(again[name], self.baseline[name]) + judge(self.baseline[name], again[name])
            problems += [f"  {name}: not the same when repeated: {kill.what}" for kill in differ]
        if problems:
            raise MutationError("the unmutated library is not clean:\n" + "\n".join(problems))

    def _run_all(self, *, plain: bool, shift: int = 0) -> dict[str, Observation]:
        ended = in_fork(_task(self._sim, _UNCHANGED, plain=plain, shift=shift), seconds=_SECONDS * 4)
        if ended.died is not None:
            raise MutationError(f"the baseline ends in a {ended.died}")
        return {name: Observation(**seen) for name, seen in ended.result}

    def _unclean(self, name: str) -> Iterator[str]:
        plain, seen = self.plain[name], self.baseline[name]
        problems = {
            f"plain: {plain.error}": plain.error,
            f"plain: {plain.races} races: {plain.race}": plain.races,
            f"{seen.error}": seen.error,
            f"{seen.races} races: {seen.race}": seen.races,
            f"{seen.nans} results hold NaN": seen.nans,
            "other bits than without lowtide": seen.values != plain.values,
            f"{seen.device_left} bytes of the device left": seen.device_left or plain.device_left,
            f"{seen.host_left} bytes of the host left": seen.host_left,
            f"{seen.visits_left} visits left": seen.visits_left,
            f"{seen.pins_left} pinned storages left": seen.pins_left,
            f"{seen.objects_left} objects left": seen.objects_left,
            "nothing moved": not (seen.copied_out and seen.copied_in),
        }
        yield from (f"  {name}: {text}" for text, applies in problems.items() if applies)

    def try_mutant(self, mutant: Mutant, *, thorough: bool = False) -> Verdict:
        """Run one mutant until a workload kills it; ``thorough``: by more than a law, if one does."""
        began = time.monotonic()

        def enough(name: str, seen: Observation) -> bool:
            kills = judge(seen, self.baseline[name])
            return any(not thorough or kill.kind != "law" for kill in kills)

        ended = in_fork(_task(self._sim, mutant, plain=False, enough=enough), seconds=_SECONDS)
        found = [(name, judge(Observation(**seen), self.baseline[name])) for name, seen in ended.result]
        if ended.died is not None:
            found.append((list(WORKLOADS)[len(ended.result)], [Kill("error", ended.died)]))
        found = [(name, kills) for name, kills in found if kills]
        # Where a law was broken first and more later, the last one says more.
        beyond = found[-1:] if found and found[-1][1][0].kind != "law" else found[:1]
        workload, kills = beyond[0] if beyond else ("", [])
        return Verdict(mutant, workload, tuple(kills), REDUNDANT.get(mutant.key), time.monotonic() - began)


def _task(
    sim: Any,
    mutant: Mutant,
    *,
    plain: bool,
    shift: int = 0,
    enough: Callable[[str, Observation], bool] | None = None,
) -> Callable[[Callable[[Any], None]], None]:
    def task(tell: Callable[[Any], None]) -> None:
        moved = [object() for _ in range(shift * 1001)]  # other addresses, hence other orders of what is unordered
        import_mutated(mutant)
        count_pins(importlib.import_module("lowtide._torch"))
        for name, workload in WORKLOADS.items():
            seen = observe(sim, workload, plain=plain)
            tell([name, asdict(seen)])
            if enough is not None and enough(name, seen):
                break
        del moved

    return task
