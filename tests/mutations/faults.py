"""Reads ``faults.txt``: the classic faults, written as changes of the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .source import Edit, Mutant, MutationError, replace_once

__all__ = ["written_by_hand"]


@dataclass
class _Change:
    file: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def edit(self) -> Edit:
        """Whole lines stand for whole lines."""
        return replace_once(self.file, _lines(self.old), _lines(self.new))


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _changes() -> dict[str, list[_Change]]:
    found: dict[str, list[_Change]] = {}
    title = ""
    for number, line in enumerate(Path(__file__).with_name("faults.txt").read_text().splitlines(), 1):
        mark, rest = line[:1], line[1:]
        if mark in {"#", ""}:
            continue
        if mark == "=":
            title = rest.strip()
            if title in found:
                raise MutationError(f"faults.txt, line {number}: this title stands twice")
            found[title] = []
        elif mark == "@":
            found[title].append(_Change(rest.strip()))
        elif mark in {"-", "+"}:
            change = found[title][-1]
            (change.old if mark == "-" else change.new).append(rest)
        else:
            raise MutationError(f"faults.txt, line {number}: it begins with none of # = @ - +")
    return found


def written_by_hand() -> list[Mutant]:
    """Every fault and every control of the file."""
    mutants = []
    for title, changes in _changes().items():
        family = "control" if title.startswith("control:") else "fault"
        files = ", ".join(dict.fromkeys(change.file for change in changes))
        edits = tuple(change.edit() for change in changes)
        key = title if family == "control" else f"fault: {title}"
        mutants.append(Mutant(key, files, title, edits, family))
    return mutants
