"""The text of lowtide's modules, and edits of it. Writes nothing to disk.

Law: an edit that does not fit the text it meets raises; it is never skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Edit", "Mutant", "MutationError", "apply_edits", "module_of", "read", "replace_once", "root", "snapshot"]


class MutationError(Exception):
    """The tool itself is wrong: an edit that does not fit, an old table, a baseline that is not clean."""


@dataclass(frozen=True)
class Edit:
    """Replace the bytes ``[start, stop)`` of one file of the package."""

    file: str
    start: int
    stop: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """One change of the source. ``key`` names it for good: no line numbers are in it."""

    key: str
    site: str
    mutation: str
    edits: tuple[Edit, ...]
    family: str  # "site", "fault" or "control"


@cache
def root() -> Path:
    """The directory of the package, found without running it."""
    spec = importlib.util.find_spec("lowtide")
    if spec is None or not spec.submodule_search_locations:
        raise MutationError("the package lowtide is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def snapshot() -> dict[str, bytes]:
    """Every Python file of the package as it is now: whoever edits it meanwhile changes nothing of this run."""
    return {str(path.relative_to(root())): path.read_bytes() for path in sorted(root().rglob("*.py"))}


def read(file: str) -> bytes:
    """The source of one file of the package, such as ``residency/copies.py``."""
    return snapshot()[file]


def module_of(file: str) -> str:
    """The dotted name of a file of the package."""
    return "lowtide." + file.removesuffix(".py").replace("/", ".") if file != "__init__.py" else "lowtide"


def replace_once(file: str, old: str, new: str) -> Edit:
    """Replace a fragment that stands exactly once in the file."""
    found = read(file).count(old.encode())
    if found != 1:
        raise MutationError(f"the fragment stands {found} times in {file}, not once:\n{old}")
    start = read(file).index(old.encode())
    return Edit(file, start, start + len(old.encode()), new)


def apply_edits(file: str, edits: Iterable[Edit]) -> bytes:
    """The source of a file after the edits that concern it."""
    text = read(file)
    last = len(text) + 1
    for edit in sorted((e for e in edits if e.file == file), key=lambda e: -e.start):
        if edit.stop > last:
            raise MutationError(f"two edits of {file} overlap at byte {edit.start}")
        last = edit.start
        text = text[: edit.start] + edit.text.encode() + text[edit.stop :]
    return text
