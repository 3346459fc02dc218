"""``python -m lowtide.bench [--json FILE] [--quick] [--modes plain checkpoint sac]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.bench import run
from lowtide.bench.modes import MODES


def main() -> int:
    """Read the command line and run the bench."""
    parser = argparse.ArgumentParser(prog="lowtide.bench", description="lowtide against plain torch and its remedies.")
    parser.add_argument("--json", type=Path, default=None, help="write the records here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no 32-block models")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=None)
    chosen = parser.parse_args()
    return run(chosen.json, quick=chosen.quick, modes=chosen.modes)


if __name__ == "__main__":
    raise SystemExit(main())
