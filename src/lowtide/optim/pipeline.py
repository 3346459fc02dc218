"""Segments through a window: load ahead, update, store behind, within a number of bytes.

Law: the bytes of segments on the device never exceed the window, but for one
segment that is larger than it. Order on the device comes from events alone: a
segment's memory is given to another only after its copy away, and its update
follows its copy in. Whatever fails, every segment ends in one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lowtide.errors import CapacityError
from lowtide.optim.segment import HeldSegment

__all__ = ["bring_away", "walk"]

# Copies away that nobody waits for: one that runs and one that is queued behind it. To wait for the newest would hold
# the next update back until it has left, and the link would lie idle in the meantime.
_IN_FLIGHT = 2


def walk(
    segments: Sequence[HeldSegment], window: int, update: Callable[[HeldSegment], None], *, lingers: bool = False
) -> tuple[int, list[HeldSegment]]:
    """Bring each segment in, ``update`` it, bring it away; returns the most bytes that were on the device at once.

    With ``lingers`` the last copies away are left alone where they cannot fail, and given back where they can: those
    must be settled before the segments are used again.

    Copies in run ahead as far as the window allows, copies away are waited for when their room is needed. An error of
    ``update`` or of a copy in goes up after all segments that were on their way are back.
    """
    pending, ahead, leaving = deque(segments), deque[HeldSegment](), deque[HeldSegment]()
    held = peak = 0
    made = False
    try:
        while pending or ahead:
            while pending:
                need = pending[0].nbytes
                while leaving and held + need > window and (len(leaving) > _IN_FLIGHT or not ahead):
                    gone = leaving.popleft()
                    gone.settle()
                    held -= gone.nbytes
                if ahead and held + need > window:
                    break
                pending[0].start()
                ahead.append(pending.popleft())
                held += need
                peak = max(peak, held)
            segment = ahead[0]
            segment.arrive()
            update(segment)
            ahead.popleft()
            segment.leave()
            leaving.append(segment)
        made = True
    finally:
        # After an error: what was on its way in goes back unchanged.
        for segment in ahead:
            bring_away(segment)
        behind = [segment for segment in leaving if not (made and lingers and segment.let_run())]
        if not (made and lingers):
            for segment in behind:
                segment.settle()
    return peak, behind


def bring_away(segment: HeldSegment) -> None:
    """Send a segment back, that is on the device or on its way there, unchanged."""
    if segment.is_arriving:
        try:
            segment.arrive()
        except CapacityError:
            return  # it is still on the lower tier, and the error that brought us here goes up
    segment.leave()
    segment.settle()
