"""What a simulated device can do: rates, sizes and latencies, each with where it comes from.

Holds :class:`Description` and reads the files beside it, one a device. Law:
every figure says its unit, its source, and whether it is from a data sheet,
measured, or a guess; a file that lacks a figure, or holds an unknown one, is
refused. Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lowtide.errors import LowtideError, explain

__all__ = ["Description", "DescriptionError", "Origin"]

FOLDER = Path(__file__).with_name("devices")
TAGS = ("datasheet", "measured", "guess")
GIVEN = "given"  # set by the caller: never in a file


class DescriptionError(LowtideError, ValueError):
    """A device is unknown, or its file lacks a figure or holds a wrong one."""


@dataclass(frozen=True)
class Origin:
    """Where a figure comes from: its unit, how sure it is (``datasheet``, ``measured``, ``guess``), and the source."""

    unit: str
    tag: str
    source: str


@dataclass(frozen=True)
class _Rule:
    """What a figure must be."""

    unit: str
    expected: str
    holds: Callable[[Any], bool]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_BYTES = _Rule("B", "a whole number above 0", _whole)
_SHARE = _Rule("ratio", "a number above 0 and at most 1", lambda v: _number(v) and 0 < v <= 1)
_COMPUTE = _Rule("FLOP/s", "a number above 0", lambda v: _number(v) and v > 0)
_RATE = _Rule("B/s", "a number above 0", lambda v: _number(v) and v > 0)
_TIME = _Rule("s", "a number not below 0", lambda v: _number(v) and v >= 0)
_DUPLEX = _Rule("", "'full' or 'half'", lambda v: v in ("full", "half"))

_RULES: dict[str, _Rule] = {
    "capacity": _BYTES,
    "flops_half": _COMPUTE,
    "flops_single": _COMPUTE,
    "flops_efficiency": _SHARE,
    "memory_rate": _RATE,
    "memory_efficiency": _SHARE,
    "link_out": _RATE,
    "link_in": _RATE,
    "link_latency": _TIME,
    "duplex": _DUPLEX,
    "pageable_share": _SHARE,
    "kernel_latency": _TIME,
    "launch": _TIME,
    "host_recorded": _TIME,
    "host_replayed": _TIME,
    "allocation_round": _BYTES,
}


@dataclass(frozen=True)
class Description:
    """One device, as the simulator models it: one compute engine that all streams share, and a link to the host.

    A kernel takes :meth:`kernel_seconds`. A copy takes ``link_latency`` and its
    bytes at the rate of its direction; in half duplex the directions take turns.

    Args:
        name: that of the file.
        capacity: bytes of device memory.
        flops_half: peak of the matrix units, 16-bit, dense.
        flops_single: peak in single precision, without reduced precision.
        flops_efficiency: share of the peak that a large product reaches.
        memory_rate: bytes a second of device memory; read and written bytes both count.
        memory_efficiency: share of it that a plain kernel reaches.
        link_out: bytes a second from the device to the host.
        link_in: bytes a second from the host to the device.
        link_latency: seconds that each copy takes besides.
        duplex: ``"full"`` if the directions do not slow each other down, else ``"half"``.
        pageable_share: share of the link's rate that a copy from or to plain host memory reaches.
        kernel_latency: least seconds of a kernel on the device.
        launch: seconds of the host for each operator.
        host_recorded: seconds of the host, besides ``launch``, for each operator that lowtide's tape records.
        host_replayed: the same for each operator that it replays.
        allocation_round: device memory is given out in multiples of this.
        origins: where each figure comes from.

    >>> Description.named("h100-80gb").memory_rate
    3350000000000.0
    """

    name: str
    capacity: int
    flops_half: float
    flops_single: float
    flops_efficiency: float
    memory_rate: float
    memory_efficiency: float
    link_out: float
    link_in: float
    link_latency: float
    duplex: str
    pageable_share: float
    kernel_latency: float
    launch: float
    host_recorded: float
    host_replayed: float
    allocation_round: int
    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    def __post_init__(self) -> None:
        for key, rule in _RULES.items():
            _check(self.name, key, rule, getattr(self, key))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled nor copied.
        return _rebuild, (
            {f.name: getattr(self, f.name) for f in fields(self) if f.name != "origins"},
            dict(self.origins),
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the devices that come with the package.

        >>> "tiny" in Description.names()
        True
        """
        return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))

    @staticmethod
    def named(name: str) -> Description:
        """Read the description of a device that comes with the package.

        Raises:
            DescriptionError: there is none of this name.
        """
        if name not in Description.names():
            raise DescriptionError(
                explain(
                    "no description of this device",
                    expected=f"one of {', '.join(Description.names())}",
                    got=repr(name),
                    where=str(FOLDER),
                    remedy="Name one of these, or read your own file with Description.read(path).",
                )
            )
        return Description.read(FOLDER / f"{name}.json")

    @staticmethod
    def read(path: Path) -> Description:
        """Read the description in a file, whose name is the device's.

        Raises:
            DescriptionError: the file lacks a figure, or holds an unknown or a wrong one; the message names it.
        """
        entries = _entries(path)
        values, origins = {}, {}
        for key, rule in _RULES.items():
            values[key], origins[key] = _figure(path, key, rule, entries[key])
        return Description(path.stem, **values, origins=MappingProxyType(origins))

    def with_(self, *, link: float | None = None, **changed: Any) -> Description:
        """Return the same device with other figures; ``link`` stands for both directions.

        >>> Description.named("tiny").with_(link=5e9).link_in
        5000000000.0
        """
        if link is not None:
            changed |= {"link_out": link, "link_in": link}
        unknown = sorted(set(changed) - set(_RULES))
        if unknown:
            raise DescriptionError(_wrong_keys(self.name, unknown, "unknown"))
        for key, value in changed.items():
            _check(self.name, key, _RULES[key], value)
        given = {key: Origin(_RULES[key].unit, GIVEN, "set by the caller") for key in changed}
        return replace(self, **changed, origins=MappingProxyType({**self.origins, **given}))

    def kernel_seconds(self, flops: float, nbytes: float, *, single: bool = False) -> float:
        """Return the time of one kernel: that of its operations or of its bytes, whichever is longer.

        >>> Description.named("tiny").kernel_seconds(2e12, 1e9)
        2.0
        """
        peak = self.flops_single if single else self.flops_half
        compute = flops / (peak * self.flops_efficiency)
        return max(self.kernel_latency, compute, nbytes / (self.memory_rate * self.memory_efficiency))

    def describe(self) -> str:
        """Return a table of every figure with its unit, its tag and its source."""
        rows = [("figure", "value", "unit", "tag", "source")]
        for key, rule in _RULES.items():
            origin = self.origins.get(key, Origin(rule.unit, GIVEN, "set by the caller"))
            rows.append((key, _shown(getattr(self, key)), origin.unit, origin.tag, origin.source))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join([self.name, *(line.rstrip() for line in lines)])


def _rebuild(values: dict[str, Any], origins: dict[str, Origin]) -> Description:
    return Description(**values, origins=MappingProxyType(origins))


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _check(where: str, key: str, rule: _Rule, value: object) -> None:
    if not rule.holds(value):
        raise DescriptionError(
            explain(
                f"{key} of a device is wrong",
                expected=f"{rule.expected}{f' in {rule.unit}' if rule.unit else ''}",
                got=repr(value),
                where=where,
                remedy="Write it in plain units: bytes, seconds, bytes or operations a second.",
            )
        )


def _wrong_keys(where: str, keys: list[str], word: str) -> str:
    return explain(
        f"{word} figures of a device",
        expected=f"exactly {', '.join(_RULES)}",
        got=", ".join(keys),
        where=where,
        remedy="Compare with the descriptions that come with the package.",
    )


def _entries(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DescriptionError(
            explain(
                "the description of a device cannot be read",
                expected="a JSON object of figures",
                got=f"{type(error).__name__}: {error}",
                where=str(path),
                remedy="Compare with the descriptions that come with the package.",
            )
        ) from error
    if not isinstance(read, dict):
        raise DescriptionError(
            explain(
                "the description of a device is no object",
                expected="a JSON object of figures",
                got=type(read).__name__,
                where=str(path),
                remedy="Compare with the descriptions that come with the package.",
            )
        )
    missing = [key for key in _RULES if key not in read]
    if missing:
        raise DescriptionError(_wrong_keys(str(path), missing, "missing"))
    unknown = sorted(set(read) - set(_RULES))
    if unknown:
        raise DescriptionError(_wrong_keys(str(path), unknown, "unknown"))
    return read


def _figure(path: Path, key: str, rule: _Rule, entry: object) -> tuple[Any, Origin]:
    parts = {"value", "unit", "tag", "source"}
    problem, expected, got = "", "", repr(entry)
    if not isinstance(entry, dict) or set(entry) != parts:
        problem, expected = f"{key} of a device has other parts", f"an object of {', '.join(sorted(parts))}"
    elif entry["unit"] != rule.unit:
        problem, expected, got = f"{key} of a device has another unit", repr(rule.unit), repr(entry["unit"])
    elif entry["tag"] not in TAGS:
        problem, expected, got = f"{key} of a device has another tag", f"one of {', '.join(TAGS)}", repr(entry["tag"])
    elif not isinstance(entry["source"], str) or not entry["source"].strip():
        problem, expected, got = f"{key} of a device has no source", "where it comes from", repr(entry["source"])
    if problem or not isinstance(entry, dict):
        raise DescriptionError(
            explain(
                problem,
                expected=expected,
                got=got,
                where=str(path),
                remedy="Write what the figure is, in which unit, how sure it is, and where it comes from.",
            )
        )
    value = entry["value"]
    _check(str(path), key, rule, value)
    if rule not in (_BYTES, _DUPLEX):
        value = float(value)
    return value, Origin(rule.unit, entry["tag"], entry["source"])
