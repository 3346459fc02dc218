"""Open-ended fuzzing: ``python -m tests.fuzz --seconds 600 [--start SEED] [--setting NAME] [--seed SEED]``.

Exits with 1 if any program broke the law; prints each as it is met, with the
least program that still breaks it and the command that runs it alone.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from .campaign import SETTINGS, Outcome, campaign, shrink


def _say(outcome: Outcome) -> None:
    print(outcome, flush=True)
    print(f"  less:  {shrink(outcome)}")
    print(f"  again: python -m tests.fuzz --seed {outcome.program.seed} --setting {outcome.setting}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs against plain autograd.")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop before a new program after this long")
    parser.add_argument("--start", type=int, default=None, help="first seed (default: from the clock)")
    parser.add_argument("--seed", type=int, default=None, help="run this one program")
    parser.add_argument("--setting", default=None, choices=[setting.name for setting in SETTINGS])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = tuple(s for s in SETTINGS if chosen.setting in {None, s.name})
    start = int(time.time()) % 10**8 * 10 if chosen.start is None else chosen.start
    seeds = itertools.count(start) if chosen.seed is None else [chosen.seed]
    tally = campaign(seeds, seconds=chosen.seconds, settings=settings, report=_say)
    print(f"{tally.programs} programs from seed {start if chosen.seed is None else chosen.seed}: {dict(tally.counts)}")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
