"""The map of the spill file: which of its bytes are free. Pure numbers, no I/O, no lock.

Law: extents that are taken never overlap, free neighbours are always merged,
and the file grows only when no free extent fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Extents"]


class Extents:
    """Which bytes of the file are free: pure numbers, best fit, neighbours merged.

    ``end`` is the size of the file. Not thread safe; the tier's lock guards it.
    """

    def __init__(self) -> None:
        self.end = 0
        self._spans: dict[int, int] = {}
        self._starts: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._high = 0
        self._traffic = 0

    def shortfall(self, span: int) -> int:
        """Bytes by which the file must grow until ``span`` fits."""
        if self._sizes and self._sizes[-1][0] >= span:
            return 0
        return span - self._tail()

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` free bytes at the end."""
        self.end += nbytes
        self.give(self.end - nbytes, nbytes)

    def take(self, span: int) -> int:
        """Use the smallest free extent that holds ``span``; returns its offset."""
        size, offset = self._sizes[bisect_left(self._sizes, (span, 0))]
        self._drop(offset)
        if size > span:
            self._add(offset + span, size - span)
        self._high = max(self._high, offset + span)
        self._traffic += span
        return offset

    def give(self, offset: int, span: int) -> None:
        """Make an extent free and merge it with its free neighbours."""
        at = bisect_left(self._starts, offset)
        if at < len(self._starts) and self._starts[at] == offset + span:
            span += self._drop(offset + span)
        if at and self._starts[at - 1] + self._spans[self._starts[at - 1]] == offset:
            offset = self._starts[at - 1]
            span += self._drop(offset)
        self._add(offset, span)

    def cut(self, top: int = 0) -> int:
        """Give up the free tail, but nothing below ``top``; returns the bytes given up."""
        keep = max(top, self.end - self._tail())
        lost = self.end - keep
        if lost > 0:
            start = self._starts[-1]
            self._drop(start)
            if start < keep:
                self._add(start, keep - start)
            self.end = keep
        return lost

    def cut_unused(self) -> int:
        """Give up the tail that a window of traffic has not reached; returns the bytes given up.

        A window is twice the file in bytes taken: it covers a whole step of a
        loop that fills the file once a step, so a steady loop is never cut.
        """
        if self._traffic < 2 * self.end:
            return 0
        lost = self.cut(self._high)
        self._high = self.end - self._tail()
        self._traffic = 0
        return lost

    def _tail(self) -> int:
        if self._starts and self._starts[-1] + self._spans[self._starts[-1]] == self.end:
            return self._spans[self._starts[-1]]
        return 0

    def _add(self, offset: int, span: int) -> None:
        self._spans[offset] = span
        insort(self._starts, offset)
        insort(self._sizes, (span, offset))

    def _drop(self, offset: int) -> int:
        span = self._spans.pop(offset)
        del self._starts[bisect_left(self._starts, offset)]
        del self._sizes[bisect_left(self._sizes, (span, offset))]
        return span
