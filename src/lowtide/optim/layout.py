"""Where each byte of an optimizer's state lies: pieces of parameters, packed into segments, counted in buckets.

Pure: no tensor is touched. Laws:

1. A *segment* is what moves as one copy: the arrays of one or more pieces, one after the other, each aligned.
2. A piece is a whole parameter or, where it may be cut, a run of its elements; every element is in one piece.
3. A parameter larger than a segment shares no segment with another but for its last small rest, so that one without a
   gradient is not moved because of its neighbours.
4. A *bucket* is a number of bytes: the whole divided by ``swap_times``. Two of them are the most that is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Array", "Demand", "Entry", "Layout", "Piece", "Segment", "plan"]

# Views of any type must be aligned; vector units like a cache line.
ALIGNMENT = 64
# The largest copy: long enough to fill a link, short enough that four fit into two buckets.
LARGEST = 64 << 20
# What is stepped at once where nothing moves: long enough that the calls do not count, short enough that the scratch,
# two float32 values an element, does not either.
STEPPED = 16 << 20
# A segment shorter than this costs more in launches than in copies.
SMALLEST = 64 << 10
# Elements after which an array of any type, or of bits, ends aligned.
_STEP = 8 * ALIGNMENT
# A rest below this share of a segment is packed with others.
REST = 16


@dataclass(frozen=True)
class Array:
    """One array of a state; ``shape`` where it is not one value for each element, ``bits`` for one bit each."""

    name: str
    dtype: torch.dtype
    shape: torch.Size | None = None
    bits: bool = False

    def length(self, numel: int) -> int:
        """How many values of ``dtype`` it has for a piece of ``numel`` elements."""
        if self.shape is not None:
            return self.shape.numel()
        return -(-numel // 8) if self.bits else numel

    def nbytes(self, numel: int) -> int:
        """Bytes in a segment, padding included."""
        return -(-self.length(numel) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Demand:
    """What one parameter needs: its elements, its arrays, and whether it may be cut."""

    parameter: int
    numel: int
    arrays: tuple[Array, ...]
    cut: bool = True

    def nbytes(self, numel: int) -> int:
        """Bytes of a piece of ``numel`` elements."""
        return sum(array.nbytes(numel) for array in self.arrays)

    @property
    def bits_each(self) -> int:
        """Bits that one more element costs."""
        return sum(1 if a.bits else 8 * a.dtype.itemsize for a in self.arrays if a.shape is None)

    @property
    def bytes_once(self) -> int:
        """Bytes of a piece that do not depend on its length."""
        return sum(a.nbytes(0) for a in self.arrays if a.shape is not None)


@dataclass(frozen=True)
class Entry:
    """Where an array lies in its segment."""

    array: Array
    offset: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements, and its arrays in the segment."""

    parameter: int
    start: int
    stop: int
    entries: tuple[Entry, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """Pieces that move together."""

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """All segments, in the order in which they are stepped, and the bytes of a bucket."""

    segments: tuple[Segment, ...]
    bucket_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def window_bytes(self) -> int:
        """The most bytes of segments on the device at once: two buckets, or one segment that is larger."""
        return max(2 * self.bucket_bytes, max((s.nbytes for s in self.segments), default=0))

    @property
    def buckets(self) -> int:
        """How many buckets a step walks."""
        return max(1, -(-self.nbytes // self.bucket_bytes))


def plan(
    demands: Sequence[Demand],
    *,
    swap_times: int | None = None,
    bucket_bytes: int | None = None,
    moves: bool = True,
) -> Layout:
    """Lay out what ``demands`` ask for, in their order. Where nothing ``moves`` a segment is what is stepped together.

    >>> adam = (Array("exp_avg", torch.float32), Array("exp_avg_sq", torch.float32))
    >>> layout = plan([Demand(0, 1 << 20, adam), Demand(1, 64, adam)], swap_times=4)
    >>> layout.nbytes == 8 * ((1 << 20) + 64), layout.buckets, max(s.nbytes for s in layout.segments)
    (True, 4, 524288)
    """
    total = sum(demand.nbytes(demand.numel) for demand in demands)
    if bucket_bytes is None:
        bucket_bytes = max(1, -(-total // (swap_times or 1)))
    largest = min(LARGEST, max(SMALLEST, _power_below(bucket_bytes // 4))) if moves else STEPPED
    segments = list(_pack(demands, largest, moves=moves))
    return Layout(tuple(segments), max(bucket_bytes, 1))


def _power_below(nbytes: int) -> int:
    """Host memory is pinned in powers of two: a segment of one wastes none."""
    return 1 << max(0, nbytes.bit_length() - 1)


def _pack(demands: Sequence[Demand], largest: int, *, moves: bool) -> Iterator[Segment]:
    shared: list[tuple[Demand, int, int]] = []
    used = 0
    for demand in demands:
        start = 0
        for stop in _ends_of_own_segments(demand, largest, moves=moves):
            yield _segment([(demand, start, stop)])
            start = stop
        rest = demand.nbytes(demand.numel - start)
        if start and start == demand.numel:
            continue
        if shared and used + rest > largest:
            yield _segment(shared)
            shared, used = [], 0
        shared.append((demand, start, demand.numel))
        used += rest
    if shared:
        yield _segment(shared)


def _ends_of_own_segments(demand: Demand, largest: int, *, moves: bool) -> Iterator[int]:
    """Where the segments end that hold nothing but this parameter: whole ones, then halves, quarters and so on.

    Those are for host memory, which is pinned in powers of two: where nothing moves, a rest is one segment.
    """
    if not demand.cut:
        if demand.nbytes(demand.numel) > largest // REST:
            yield demand.numel
        return
    start = 0
    size = largest
    while size >= max(largest // REST, SMALLEST // REST) and demand.bits_each:
        # In multiples of what makes every array, a mask of bits too, end where the next may begin.
        fits = 8 * (size - demand.bytes_once) // demand.bits_each // _STEP * _STEP
        rest = demand.nbytes(demand.numel - start)
        whole = rest <= size
        if whole and rest > (size - size // REST if moves else size // REST):
            yield demand.numel
            return
        if whole and not moves:
            return
        if whole or fits <= 0:
            size //= 2
            continue
        start += fits
        yield start


def _segment(parts: Sequence[tuple[Demand, int, int]]) -> Segment:
    pieces = []
    offset = 0
    for demand, start, stop in parts:
        entries = []
        for array in demand.arrays:
            entries.append(Entry(array, offset, array.length(stop - start)))
            offset += array.nbytes(stop - start)
        pieces.append(Piece(demand.parameter, start, stop, tuple(entries)))
    return Segment(tuple(pieces), offset)
