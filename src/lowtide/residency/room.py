"""Whether the lower tier has room for what shall lie there, asked before the first of it leaves.

Law: what is needed is a formula of what is known beforehand; what is there is
read from the system, in bytes. Where the system does not say, nothing is
refused. Allocates nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowtide import device
from lowtide.errors import CapacityError, explain
from lowtide.residency.copies import Settings

__all__ = ["assuming_host_bytes", "available_host_bytes", "demand_room"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_assumed: list[int] = []


@contextmanager
def assuming_host_bytes(nbytes: int) -> Iterator[None]:
    """In the body a device's host has so many bytes left: the machine is described, and nothing is written to it."""
    _assumed.append(nbytes)
    try:
        yield
    finally:
        _assumed.pop()


def available_host_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Host memory that this process may still take: the machine's or its control group's, whichever is less.

    None where neither says.

    >>> available_host_bytes(Path("/nowhere"), Path("/nowhere")) is None
    True
    """
    found = [*_from_meminfo(proc / "meminfo"), *_from_groups(proc / "self" / "cgroup", cgroup)]
    return min(found, default=None)


def _from_meminfo(path: Path) -> Iterator[int]:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _from_groups(path: Path, root: Path) -> Iterator[int]:
    """What is left to this process's control group and to each one above it, in either version."""
    for line in _lines(path):
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / "memory" if kinds else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        place = base / name.lstrip("/")
        # In a container the name is the host's and the folder its own: then only the root is there to see.
        for folder in dict.fromkeys([place, *place.parents, base]):
            if base not in (folder, *folder.parents):
                continue
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None:
                yield max(0, limit - used + _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """File pages that count as used and are given up when memory is needed."""
    pages = (line.split() for line in _lines(folder / "memory.stat"))
    return sum(int(value) for key, value in pages if key in {"inactive_file", "total_inactive_file"})


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []  # not this system, or not this version


def demand_room(
    where: torch.device, needed: int, settings: Settings, *, problem: str, formula: str, name: str, remedy: str
) -> None:
    """Raise :class:`CapacityError` if ``needed`` bytes have no room on the lower tier of ``where``.

    ``formula`` says how ``needed`` comes about; ``remedy`` what helps beside more room.
    """
    for bytes_there, what, more in _limits(settings, on_host=device.is_accelerator(where)):
        if needed > bytes_there:
            raise CapacityError(
                explain(
                    problem,
                    expected=f"{formula} = {needed} bytes",
                    got=f"{bytes_there} bytes of {what}",
                    where=name,
                    remedy=f"{more} {remedy}",
                )
            )


def _limits(settings: Settings, *, on_host: bool) -> Iterator[tuple[int, str, str]]:
    if settings.host_bytes is not None:
        yield settings.host_bytes, "host_bytes", "Raise SwapManager().configure(host_bytes=...)."
    if on_host:
        there = _assumed[-1] if _assumed else available_host_bytes()
        if there is not None:
            yield there, "host memory that is available", "Give the process more memory."
        return
    folder = settings.file_dir or tempfile.gettempdir()
    if Path(folder).is_dir():  # else the tier itself says what is wrong, at the first write
        free = shutil.disk_usage(folder).free
        yield free, f"free space in {folder}", "Name another directory: SwapManager().configure(file_dir=...)."
