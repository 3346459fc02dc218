"""The fuzzer with fixed seeds, and proof that it can tell a wrong gradient from a right one."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from lowtide import SwapManager
from lowtide.activations.tape import Tape

from .campaign import SETTINGS, Setting, campaign, same
from .functions import undeclared
from .operators import KINDS
from .programs import ENDINGS, Net, program_of, train

SEEDS = range(120)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_programs_equal_plain_autograd(setting: Setting) -> None:
    before = _live_tapes()
    tally = campaign(SEEDS, settings=(setting,))
    assert not tally.broken, "\n".join(str(outcome) for outcome in tally.broken[:10])
    assert tally.counts["equal"] >= tally.programs // 2, tally.counts
    # Nothing outlives its graph, however its backward ended: neither a tape nor bytes on the lower tier.
    assert _live_tapes() <= before
    assert SwapManager().lower_bytes() == 0


def _live_tapes() -> int:
    # Autograd's worker of an accelerator lets go of a finished graph after it has woken us, and before the next one.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    return sum(type(o) is Tape for o in gc.get_objects())


def test_fixed_seeds_reach_every_kind_and_ending() -> None:
    programs = [program_of(seed) for seed in SEEDS]
    assert {kind for program in programs for kind in program.kinds} == set(KINDS)
    assert {program.ending for program in programs} == set(ENDINGS)


def test_most_programs_run_plainly() -> None:
    ran = 0
    for seed in SEEDS:
        try:
            train(Net(program_of(seed), undeclared, lambda f: f))
        except RuntimeError:
            continue
        ran += 1
    assert ran >= len(SEEDS) // 2


@pytest.mark.values
def test_a_wrong_value_is_noticed() -> None:
    def spoil(draw: random.Random) -> object:
        def wrap(part: torch.nn.Module) -> torch.nn.Module:
            if isinstance(part, torch.nn.Module):
                part.register_forward_hook(lambda module, args, out: _nudge(out))
            return part

        return wrap

    tally = campaign(range(20), settings=(Setting("spoiled", spoil, "none"),))
    assert tally.counts["equal"] == 0
    assert tally.counts["differs"] > 5


def _nudge(out: object) -> object:
    return tuple(o * (1 + 2**-20) for o in out) if isinstance(out, tuple) else out


@pytest.mark.values
def test_comparison_of_bits() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert same([nan, None], [nan.clone(), None])
    assert not same([nan], [one])
    assert not same([one], [one * (1 + 2**-23)])
    assert not same([None], [one])
    assert not same([one], [one.double()])
