"""What a split and a merge cost beside the AdamW step that they accompany: ``python benchmarks/residual.py``.

One thread, rounds interleaved, medians; the figure is a ratio within one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from lowtide.optim import residual


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = options.elements
    weight = torch.nn.Parameter(torch.randn(n) * 0.02)
    weight.grad = torch.randn(n) * 1e-3
    optimizer = torch.optim.AdamW([weight], fused=True)
    rows = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8)
    master = weight.detach().clone()
    work: dict[str, Callable[[], object]] = {
        "fused AdamW": optimizer.step,
        "split": lambda: residual.split(master, *rows, ties, "exact"),
        "merge": lambda: residual.merge(*rows, ties, master, "exact"),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(options.rounds + 2):
        for name, call in work.items():
            began = time.perf_counter()
            call()
            if number > 1:  # the first two warm up
                taken[name].append(time.perf_counter() - began)
    each = {name: statistics.median(times) / n * 1e9 for name, times in taken.items()}
    ratio = (each["split"] + each["merge"]) / each["fused AdamW"]
    lines = ["| | ns a parameter |", "|---|---:|", *(f"| {name} | {value:.2f} |" for name, value in each.items())]
    sys.stdout.write("\n".join(lines) + f"\n\nsplit and merge / fused AdamW: {ratio:.2f}\n")


if __name__ == "__main__":
    main()
