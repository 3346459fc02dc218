"""The one form in which every lowtide command writes its figures.

Holds a flat record and its writer and reader. Law: each ``--json`` of each
command is one JSON list of objects with exactly the keys of :data:`FIELDS`, so
that the output of all commands can be concatenated and filtered without
knowing who wrote it. Must never import torch, nor compute a figure itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeAlias

__all__ = ["FIELDS", "Record", "read_records", "write_records"]

Value: TypeAlias = float | int | str


@dataclass(frozen=True, slots=True)
class Record:
    """One measured figure: who measured it, on what, in which mode, and what came out.

    Args:
        bench: the command or experiment, such as ``"demo"``.
        case: the model or input that was measured, such as ``"gpt-8x320"``.
        mode: how lowtide was used, such as ``"recompute"``; ``""`` where no mode applies.
        metric: what was measured, such as ``"peak_bytes"``.
        value: the figure. A loss that must be compared bit for bit is a ``float.hex`` string.
        unit: ``"B"``, ``"s"``, ``"FLOP"``, ``"ratio"``, ``"float.hex"``, ``"text"`` and so on.

    Raises:
        ValueError: the value is NaN or infinite, which JSON has no form for.

    >>> Record("demo", "gpt-8x320", "recompute", "peak_bytes", 1024, "B").value
    1024
    """

    bench: str
    case: str
    mode: str
    metric: str
    value: Value
    unit: str

    def __post_init__(self) -> None:
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(
                f"record {self.bench}/{self.case}/{self.mode}/{self.metric}: "
                f"expected a finite value, got {self.value!r}. Leave the record out, or write it as text."
            )


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Record))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write the records as one JSON list, a record a line, and make the folder if it is missing.

    The file is replaced as a whole: a reader sees the old list or the new one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "figures.json"
    >>> write_records(path, [Record("demo", "gpt", "plain", "steps", 20, "count")])
    >>> read_records(path)[0].metric
    'steps'
    """
    lines = [json.dumps(asdict(record), allow_nan=False) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    partial.replace(path)


def read_records(path: Path) -> list[Record]:
    """Read what :func:`write_records` wrote.

    Raises:
        ValueError: the file is not a JSON list of such records; the message names the entry.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of records, got {type(entries).__name__}.")  # noqa: TRY004
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or set(entry) != set(FIELDS):
            raise ValueError(f"{path}: entry {number}: expected the keys {', '.join(FIELDS)}, got {entry!r}.")
    return [Record(**entry) for entry in entries]
