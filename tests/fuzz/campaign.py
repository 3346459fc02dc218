"""Runs programs plainly and under each setting, and counts what came out.

Law: where plain autograd gives a result, every setting gives the same bits and
raises nothing. Where plain autograd refuses a program (a saved value changed in
place), a setting may refuse too, or give the gradient of the value that was
saved; neither is judged.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper

from .functions import Functions, declared, undeclared
from .programs import Net, Program, program_of, train

__all__ = ["SETTINGS", "Outcome", "Setting", "Tally", "campaign", "run_setting", "same", "shrink"]

PREFER = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_SWAP, CheckpointPolicy.PREFER_RECOMPUTE)
MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE)


@dataclass(frozen=True)
class Setting:
    """How body, tail and nested callables are wrapped; ``wrap`` is made anew for every program from its seed."""

    name: str
    wrap: Callable[[random.Random], Callable[[Any], Any]]
    order: str = "auto"


def _per_call(draw: random.Random, answers: tuple[CheckpointPolicy, ...]) -> Callable[..., CheckpointPolicy]:
    return lambda ctx, op, *args, **kwargs: draw.choice(answers)


def _recompute(draw: random.Random) -> Callable[[Any], Any]:
    return checkpoint_wrapper


def _recompute_certified(draw: random.Random) -> Callable[[Any], Any]:
    return lambda m: checkpoint_wrapper(m, certify=1000)


def _mixed(draw: random.Random) -> Callable[[Any], Any]:
    policy = _per_call(draw, PREFER)
    return lambda m: checkpoint_wrapper(m, policy, swap_inputs=True, certify=draw.choice((0, 1000)))


def _kept_or_swapped(draw: random.Random) -> Callable[[Any], Any]:
    policy = _per_call(draw, MUST[:2])
    return lambda m: checkpoint_wrapper(m, policy)


def _swap(draw: random.Random) -> Callable[[Any], Any]:
    return swap_wrapper


def _swap_some(draw: random.Random) -> Callable[[Any], Any]:
    return lambda m: swap_wrapper(m, lambda tensor: draw.choice(MUST[:2]), certify=1000)


def _either(draw: random.Random) -> Callable[[Any], Any]:
    """Wrap body, tail and each nested callable by whichever wrapper the draw gives."""
    policy = _per_call(draw, PREFER)
    return lambda m: swap_wrapper(m) if draw.random() < 0.5 else checkpoint_wrapper(m, policy)


SETTINGS = (
    Setting("recompute", _recompute, "none"),
    Setting("recompute-certified", _recompute_certified, "none"),
    Setting("mixed", _mixed),
    Setting("mixed-chain", _mixed, "chain"),
    Setting("must-keep-or-swap", _kept_or_swapped),
    Setting("swap", _swap),
    Setting("swap-some", _swap_some, "chain"),
    Setting("either", _either),
)


def same(want: list[Tensor | None], got: list[Tensor | None]) -> bool:
    """Equal in every bit, a NaN being equal to a NaN in the same place."""
    if len(want) != len(got):
        return False
    for w, g in zip(want, got, strict=True):
        if w is None or g is None:
            if w is not g:
                return False
        elif w.shape != g.shape or w.dtype != g.dtype or not _bits(w, g):
            return False
    return True


def _bits(w: Tensor, g: Tensor) -> bool:
    if torch.equal(w, g):
        return True
    nan = torch.isnan(w)
    return bool(nan.any()) and torch.equal(nan, torch.isnan(g)) and torch.equal(w[~nan], g[~nan])


@dataclass(frozen=True)
class Outcome:
    """One program under one setting: ``equal``, ``differs``, ``raises`` or ``not judged``."""

    program: Program
    setting: str
    functions: str
    verdict: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} [{self.setting}, functions {self.functions}] {self.program} {self.text}"


@dataclass
class Tally:
    """Counts of verdicts, and every outcome that breaks the law."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[Outcome] = field(default_factory=list)
    programs: int = 0

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.verdict] += 1
        if outcome.verdict in {"differs", "raises"}:
            self.broken.append(outcome)


def _steps(net: Net) -> list[Tensor | None]:
    """Train two steps: in the second an order has been learned, and a region may run another way than in the first."""
    return [*train(net), *train(net)]


def _plain(program: Program, functions: Functions) -> list[Tensor | None] | None:
    try:
        return _steps(Net(program, functions, lambda f: f))
    except RuntimeError:
        return None


def run_setting(program: Program, setting: Setting, functions: Functions) -> list[Tensor | None]:
    """Train the program with body, tail and nested callables wrapped as the setting says."""
    manager = SwapManager()
    manager.reset()
    manager.configure(min_bytes=0)
    wrap = setting.wrap(random.Random(program.seed + 1))
    net = Net(program, functions, wrap)
    net.body, net.tail = _module(wrap(net.body)), _module(wrap(net.tail))
    if setting.order == "chain":
        manager.set_forward_prefetch_layer(net.body, net.tail)
    handle = lowtide.auto(net) if setting.order == "auto" else None
    try:
        return _steps(net)
    finally:
        if handle is not None:
            handle.undo()


def _module(wrapped: Any) -> nn.Module:
    assert isinstance(wrapped, nn.Module)
    return wrapped


def _judge(
    program: Program, setting: Setting, label: str, functions: Functions, want: list[Tensor | None] | None
) -> Outcome:
    try:
        got = run_setting(program, setting, functions)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(program, setting.name, label, "raises" if want is not None else "not judged", text)
    if want is None:
        return Outcome(program, setting.name, label, "not judged")
    return Outcome(program, setting.name, label, "equal" if same(want, got) else "differs")


def shrink(outcome: Outcome) -> Program:
    """Drop operators one by one for as long as the program breaks the law in the same way; return what is left."""
    setting = next(s for s in SETTINGS if s.name == outcome.setting)
    functions = declared if outcome.functions == "declared" else undeclared
    program, at = outcome.program, 0
    while at < len(program.kinds):
        kinds, picks = program.kinds, program.picks
        less = replace(program, kinds=kinds[:at] + kinds[at + 1 :], picks=picks[:at] + picks[at + 1 :])
        verdict = _judge(less, setting, outcome.functions, functions, _plain(less, undeclared)).verdict
        if less.kinds and verdict == outcome.verdict:
            program, at = less, 0
        else:
            at += 1
    return program


def campaign(
    seeds: Iterable[int],
    *,
    seconds: float | None = None,
    settings: tuple[Setting, ...] = SETTINGS,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Tally:
    """Judge the programs of the seeds under every setting, Functions declared pure and not.

    Stops before a new program once ``seconds`` have passed. Each broken outcome
    is handed to ``report`` as it is met.
    """
    tally, begun = Tally(), time.monotonic()
    for seed in seeds:
        if seconds is not None and time.monotonic() - begun > seconds:
            break
        program = program_of(seed)
        want = _plain(program, undeclared)
        uses_functions = any(kind.startswith("fn_") for kind in program.kinds)
        for setting in settings:
            for label, functions in (("declared", declared), ("undeclared", undeclared))[: 1 + uses_functions]:
                outcome = _judge(program, setting, label, functions, want)
                tally.add(outcome)
                if outcome.verdict in {"differs", "raises"}:
                    report(outcome)
        tally.programs += 1
    return tally
