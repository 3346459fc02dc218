"""Every one of the 2**32 patterns of float32 through a split and a merge, in every mode.

``python -m tests.optim.all_patterns`` prints a table for ``docs/residual.md``; about ten minutes on one core.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import datetime, timezone
from typing import get_args

import torch

from lowtide.optim import residual

from .patterns import as_floats, even_ties, is_nan, patterns_of, rounded, there_and_back

# Small enough that nothing here leaves a core's cache, or is given back to the system, between two operators.
CHUNK = 1 << 18

ROWS = {
    "patterns": "patterns tried",
    "not a number": "of these NaN",
    "weight": "weight is not the cast (numbers)",
    "master": "master does not come back (numbers)",
    "of these ties": "of these, ties with an even high half, one step of float32 smaller",
    "lost nan": "NaN whose master is a number",
    "lost nan weight": "NaN whose weight is a number",
}


def count(modes: tuple[residual.Mode, ...], start: int) -> dict[str, Counter[str]]:
    """What became of one run of patterns in each mode."""
    given = torch.arange(start, start + CHUNK)
    floats, nan, cast, ties = as_floats(given), is_nan(given), rounded(given), even_ties(given)
    number = ~nan
    found = {}
    for mode in modes:
        weight, back = (patterns_of(t) for t in there_and_back(floats, mode))
        wrong = number & (back != given)
        found[mode] = Counter(
            {
                "patterns": CHUNK,
                "not a number": int(nan.sum()),
                "weight": int((number & (weight != cast)).sum()),
                "master": int(wrong.sum()),
                "of these ties": int((wrong & ties & (back == given - 1)).sum()),
                "lost nan": int((nan & ~is_nan(back)).sum()),
                "lost nan weight": int((nan & ~is_nan(weight << 16)).sum()),
            }
        )
    return found


def main() -> None:
    """Count all, and print the table."""
    torch.set_num_threads(1)
    modes = get_args(residual.Mode)
    totals: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
    began = time.monotonic()
    for start in range(0, 1 << 32, CHUNK):
        for mode, found in count(modes, start).items():
            totals[mode].update(found)
    today = datetime.now(timezone.utc).date()
    lines = [
        f"| {today}, torch {torch.__version__.split('+')[0]} | {' | '.join(modes)} |",
        "|---|" + "---:|" * len(modes),
    ]
    lines += [f"| {text} | {' | '.join(f'{totals[m][key]:,}' for m in modes)} |" for key, text in ROWS.items()]
    sys.stdout.write("\n".join(lines) + f"\n\n{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
