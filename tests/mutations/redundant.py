"""Reads ``redundant.txt``: the mutants that nothing can notice, each with the reason."""

from __future__ import annotations

from pathlib import Path

from .source import MutationError

__all__ = ["REDUNDANT"]


def _read() -> dict[str, str]:
    found: dict[str, str] = {}
    reason = ""
    for number, line in enumerate(Path(__file__).with_name("redundant.txt").read_text().splitlines(), 1):
        mark, rest = line[:1], line[1:].strip()
        if mark == "=":
            reason = rest
        elif mark == "-":
            if rest in found or not reason:
                raise MutationError(f"redundant.txt, line {number}: a mutant that stands twice, or without a reason")
            found[rest] = reason
        elif mark not in {"#", ""}:
            raise MutationError(f"redundant.txt, line {number}: it begins with none of # = -")
    return found


REDUNDANT = _read()
