"""WHEN bytes move: events in, actions out. Pure: no tensor, no device, no clock.

A *visit* is one forward call of a unit (a chained layer, or a region under
``lowtide.auto``). Visits of one thread form a sequence; backward walks it the
other way round. The order is thereby learned anew in every forward, for every
micro-batch, and a skipped or reordered layer needs no special case.

Rules:

S1  A visit with a declared successor leaves when it ends; under the learned
    order it leaves when the next visit begins, so the last one never leaves.
S2  What left is released when the visit after the next begins, or as soon as
    the bytes in flight pass the bound, oldest first. After the last visit none
    begins: what is on its way then is what backward needs next, and stays.
S3  When backward reaches a visit, the visits before it (``prefetch`` of them
    that have bytes) start to come back, as far as the bound allows.
S4  A visit that backward reached, or that died, is never launched any more.
S5  Backwards of the micro-batches of one model are taken to come in the order
    of their forwards, as in pipelines. The last visit of the oldest one alive
    therefore stays, and backward of its first visit loads the last of the next.
    Another order costs one visit's bytes for longer, and nothing else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Action", "Batch", "Schedule", "Verb", "VisitState"]


class Verb(enum.Enum):
    """What to do with a visit's bytes."""

    LAUNCH_OFFLOAD = "launch_offload"
    WAIT_OFFLOAD = "wait_offload"
    LAUNCH_LOAD = "launch_load"


class VisitState(enum.Enum):
    """How far a visit is."""

    OPEN = "open"  # its forward runs
    RESIDENT = "resident"  # ended; may still leave
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"
    REACHED = "reached"  # backward is there: it stays


@dataclass(frozen=True)
class Action:
    """One thing to do, in order."""

    verb: Verb
    visit: int
    bound: bool = False  # it is done now because of the bound on bytes in flight


@dataclass(frozen=True)
class Batch:
    """One forward of a model whose order is learned: whose, and the how manyth."""

    owner: object
    number: int


@dataclass
class _Visit:
    previous: int | None
    following: int | None = None
    state: VisitState = VisitState.OPEN
    nbytes: int = 0
    keep: bool = False
    batch: Batch | None = None  # the forward of a whole model that it is a part of
    prefetch: int | None = None  # how far ahead its backward loads, where that differs from the schedule's


@dataclass
class Schedule:
    """The sequence of visits of one thread.

    >>> s = Schedule()
    >>> first, _ = s.begin_forward()
    >>> _ = s.end_forward(first, 10)
    >>> second, actions = s.begin_forward()
    >>> [(a.verb.value, a.visit == first) for a in actions]
    [('launch_offload', True)]
    """

    prefetch: int = 1
    in_flight_bytes: int = 256 << 20
    _visits: dict[int, _Visit] = field(default_factory=dict)
    _next: int = 0
    _last: int | None = None
    _leaving: list[int] = field(default_factory=list)

    def begin_forward(self, batch: Batch | None = None) -> tuple[int, list[Action]]:
        """A unit's forward begins: its visit, and what those before may do now (S1, S2).

        ``batch``: the forward of a whole model that it is a part of.
        """
        visit, self._next = self._next, self._next + 1
        last = self._last
        actions = self._release(but=last)
        if last is not None:
            before = self._visits[last]
            if before.state is VisitState.RESIDENT and not before.keep and not self._is_next_in_line(before, batch):
                actions += self._launch(last)
        self._visits[visit] = _Visit(previous=last, batch=batch)
        if last is not None:
            self._visits[last].following = visit
        self._last = visit
        return visit, actions

    def end_forward(
        self, visit: int, nbytes: int, *, successor: bool = False, tail: bool = False, prefetch: int | None = None
    ) -> list[Action]:
        """A unit's forward ended with ``nbytes`` that may leave.

        ``successor``: a declared chain goes on, so it leaves now; ``tail``: it
        is the declared end of a chain, so it never leaves; ``prefetch``: how
        many visits its backward loads ahead, if not as many as others.
        """
        entry = self._visits.get(visit)
        if entry is None:
            return []
        entry.nbytes = nbytes
        entry.keep = tail
        entry.prefetch = prefetch
        if entry.state is VisitState.OPEN:
            entry.state = VisitState.RESIDENT
        if successor and nbytes and entry.state is VisitState.RESIDENT:
            return self._launch(visit)
        return []

    def _release(self, but: int | None) -> list[Action]:
        released = [Action(Verb.WAIT_OFFLOAD, v) for v in self._leaving if v != but]
        for action in released:
            self._visits[action.visit].state = VisitState.AWAY
        self._leaving = [v for v in self._leaving if v == but]
        return released

    def _launch(self, visit: int) -> list[Action]:
        entry = self._visits[visit]
        if not entry.nbytes:
            return []
        actions: list[Action] = []
        self._leaving.append(visit)
        entry.state = VisitState.LEAVING
        # S2: make room first, oldest first, but never wait for the one that is launched now.
        while len(self._leaving) > 1 and sum(self._visits[v].nbytes for v in self._leaving) > self.in_flight_bytes:
            oldest = self._leaving.pop(0)
            self._visits[oldest].state = VisitState.AWAY
            actions.append(Action(Verb.WAIT_OFFLOAD, oldest, bound=True))
        actions.append(Action(Verb.LAUNCH_OFFLOAD, visit))
        return actions

    def begin_backward(self, visit: int) -> list[Action]:
        """Backward reaches a visit: it comes back if it is away, and so do the ones before it (S3)."""
        entry = self._visits.get(visit)
        if entry is None or entry.state is VisitState.REACHED:
            return []
        actions: list[Action] = []
        if entry.state is VisitState.AWAY:
            actions.append(Action(Verb.LAUNCH_LOAD, visit))
        if visit in self._leaving:
            self._leaving.remove(visit)
        entry.state = VisitState.REACHED
        budget = self.in_flight_bytes
        before = entry.previous
        left = self.prefetch if entry.prefetch is None else entry.prefetch
        while left:
            earlier = self._visits.get(before) if before is not None else None
            if earlier is None or before is None or self._is_done(earlier, entry):
                # The first of its micro-batch: the next one's backward follows (S5).
                following = self._last_of_next(entry.batch)
                if following is not None:
                    actions += self._fetch(following, budget)[0]
                break
            left -= earlier.nbytes > 0
            found, used = self._fetch(before, budget)
            actions += found
            if used is None:
                break
            budget -= used
            before = earlier.previous
        return actions

    def _fetch(self, visit: int, budget: int) -> tuple[list[Action], int | None]:
        """Have a visit on the device soon: what to do, and the bytes of the bound that it takes; None if too many."""
        entry = self._visits[visit]
        if entry.state is VisitState.LEAVING:
            # It has not left yet and is needed next: let it stay.
            self._leaving.remove(visit)
            entry.state = VisitState.COMING
        if entry.state is not VisitState.AWAY:
            return [], 0
        if entry.nbytes > budget < self.in_flight_bytes:
            return [], None
        entry.state = VisitState.COMING
        return [Action(Verb.LAUNCH_LOAD, visit)], entry.nbytes

    def _is_done(self, earlier: _Visit, entry: _Visit) -> bool:
        """Whether a visit is that of an earlier micro-batch, whose backward was there."""
        return earlier.batch != entry.batch and earlier.state is VisitState.REACHED

    def _is_next_in_line(self, entry: _Visit, following: Batch | None) -> bool:
        """Whether a visit is the last of its micro-batch, and no older one of the model waits for its backward."""
        batch = entry.batch
        return (
            batch is not None
            and batch != following
            and not any(
                other.batch is not None
                and other.batch.owner == batch.owner
                and other.batch.number < batch.number
                and other.state is not VisitState.REACHED
                for other in self._visits.values()
            )
        )

    def _last_of_next(self, batch: Batch | None) -> int | None:
        """The last visit of the oldest micro-batch after ``batch`` whose backward has not begun."""
        if batch is None:
            return None
        waiting = [
            (other.batch.number, -visit)
            for visit, other in self._visits.items()
            if other.batch is not None
            and other.batch.owner == batch.owner
            and other.batch.number > batch.number
            and other.nbytes
        ]
        if not waiting:
            return None
        visit = -min(waiting)[1]
        return None if self._visits[visit].state is VisitState.REACHED else visit

    def forget(self, visit: int) -> None:
        """The graph of a visit is gone; visits before it stay reachable from those after it."""
        entry = self._visits.pop(visit, None)
        if entry is None:
            return
        if visit in self._leaving:
            self._leaving.remove(visit)
        if self._last == visit:
            self._last = entry.previous
        if entry.previous is not None:
            self._visits[entry.previous].following = entry.following
        if entry.following is not None:
            self._visits[entry.following].previous = entry.previous

    def state_of(self, visit: int) -> VisitState | None:
        """How far a visit is, or None if it is forgotten."""
        entry = self._visits.get(visit)
        return None if entry is None else entry.state

    def __len__(self) -> int:
        return len(self._visits)
