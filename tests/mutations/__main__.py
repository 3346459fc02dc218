"""``python -m tests.mutations --list | --run [OPTIONS]``.

Exits with 1 if a mutant survives without a reason in the table, or if the table is out of date.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch._dynamo  # noqa: F401 - here, once, and not in every fork

from .campaign import Campaign, Verdict
from .device import start
from .faults import written_by_hand
from .loader import compile_all
from .redundant import REDUNDANT
from .sites import discover
from .source import Mutant, MutationError
from .table import as_json, as_markdown, summary


def chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """The mutants to run: all, those whose key holds a pattern, those that survived, or a sample of these."""
    picked = [m for m in mutants if options.only is None or options.only in m.key]
    if options.again is not None:
        survived = {row["key"] for row in json.loads(options.again.read_text()) if not row["kills"]}
        picked = [m for m in picked if m.key in survived]
    if options.sample is not None:
        picked = random.Random(options.seed).sample(picked, min(options.sample, len(picked)))
    return picked


def check_table(mutants: Iterable[Mutant]) -> None:
    """Every entry of the table of redundant mutants names a mutant."""
    unknown = sorted(set(REDUNDANT) - {m.key for m in mutants})
    if unknown:
        raise MutationError("entries of redundant.txt that name no site any more:\n" + "\n".join(unknown))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(picked: list[Mutant], *, thorough: bool) -> list[Verdict]:
    """The baseline, then every mutant; a line for each."""
    campaign = Campaign(start())
    compile_all()
    # What is there now is never garbage: a collection in a fork looks at its own objects only.
    gc.collect()
    gc.freeze()
    campaign.prepare()
    verdicts = []
    for number, mutant in enumerate(picked, 1):
        verdict = campaign.try_mutant(mutant, thorough=thorough)
        verdicts.append(verdict)
        told = ", ".join(dict.fromkeys(kill.kind for kill in verdict.kills)) or (
            "survives" if mutant.family == "control" or verdict.reason is not None else "SURVIVES"
        )
        detail = f"  [{verdict.workload}: {verdict.kills[0].what}]" if verdict.killed else ""
        _say(f"{number:4}/{len(picked)} {verdict.seconds:5.1f} s  {told:20} {mutant.key}{detail}")
    return verdicts


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name every mutant and stop")
    parser.add_argument("--run", action="store_true", help="run them")
    parser.add_argument("--only", help="those whose key holds this text")
    parser.add_argument("--again", type=Path, help="those that survived in this file of an earlier --json")
    parser.add_argument("--sample", type=int, help="so many of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--thorough", action="store_true", help="where a law is broken, look for more than that")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--json", type=Path, help="write all verdicts here")
    options = parser.parse_args()
    mutants = [*written_by_hand(), *discover()]
    check_table(mutants)
    picked = chosen(mutants, options)
    if options.list or not options.run:
        _say("\n".join(m.key for m in picked))
        return 0
    began = time.monotonic()
    verdicts = run(picked, thorough=options.thorough)
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(verdicts))
    if options.json is not None:
        options.json.write_text(as_json(verdicts))
    _say(f"{summary(verdicts)} In {time.monotonic() - began:.0f} s.")
    wrong = [f"{v.mutant.key}: {v.wrong}" for v in verdicts if v.wrong]
    for line in wrong:
        _say(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
