"""Every one of the 2**32 patterns of float32 through a split and a merge, in every mode.

``python -m tests.optim.all_patterns`` prints a table for ``docs/residual.md``; about ten minutes a mode on one core.
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

CHUNK = 1 << 24

ROWS = {
    "patterns": "patterns tried",
    "not a number": "of these NaN",
    "weight": "weight is not the cast (numbers)",
    "master": "master does not come back (numbers)",
    "of these ties": "of these, ties with an even high half",
    "lost nan": "NaN whose master is a number",
    "lost nan weight": "NaN whose weight is a number",
}


def count(mode: residual.Mode, start: int) -> Counter[str]:
    """What became of one run of patterns."""
    given = torch.arange(start, start + CHUNK)
    weight, back = (patterns_of(t) for t in there_and_back(as_floats(given), mode))
    nan = is_nan(given)
    wrong = ~nan & (back != given)
    return Counter(
        {
            "patterns": CHUNK,
            "not a number": int(nan.sum()),
            "weight": int((~nan & (weight != rounded(given))).sum()),
            "master": int(wrong.sum()),
            "of these ties": int((wrong & even_ties(given)).sum()),
            "lost nan": int((nan & ~is_nan(back)).sum()),
            "lost nan weight": int((nan & ~is_nan(weight << 16)).sum()),
        }
    )


def main() -> None:
    """Count all, and print the table."""
    torch.set_num_threads(1)
    modes = get_args(residual.Mode)
    totals: dict[str, Counter[str]] = {}
    began = time.monotonic()
    for mode in modes:
        totals[mode] = sum((count(mode, start) for start in range(0, 1 << 32, CHUNK)), Counter())
    today = datetime.now(timezone.utc).date()
    lines = [
        f"| {today}, torch {torch.__version__.split('+')[0]} | {' | '.join(modes)} |",
        "|---|" + "---:|" * len(modes),
    ]
    lines += [f"| {text} | {' | '.join(f'{totals[m][key]:,}' for m in modes)} |" for key, text in ROWS.items()]
    sys.stdout.write("\n".join(lines) + f"\n\n{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
