"""Steps on the host that go on while the loop does, in a thread: what ``cpu_optimizer(overlap=True)`` adds to a step.

Law: only when a parameter is updated changes. Which are due, their gradients and the hyperparameters are those of the
moment when ``step()`` was called; who uses a parameter before its update waits for it, and for it alone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

import torch

from lowtide import device
from lowtide.errors import StateError, explain
from lowtide.optim.arriving import end_arrival, expect, unwatch, watch, why_not
from lowtide.optim.beside import Beside
from lowtide.optim.gradients import Lanes
from lowtide.optim.host_row import HostRow, batches_of, step_rows
from lowtide.optim.worker import Worker

__all__ = ["LateSteps"]

# Stepped at once: what the first layer waits for, and enough for every thread.
LATE_BYTES = 16 << 20


class _Batch:
    """Rows that are stepped at once. Whoever waits for one of them has it stepped next."""

    def __init__(self, number: int, step: _LateStep) -> None:
        self.done: Future[None] = Future()
        self.events: list[device.Event] = []
        self._number = number
        self._step = step

    def wait(self) -> None:
        """See :class:`lowtide.optim.arriving.Arrival`."""
        error = self.error()
        if error is not None:
            raise _failed(error) from error

    def error(self) -> BaseException | None:
        """Wait, and say what went wrong."""
        if not self.done.done():
            self._step.demand_elsewhere()
            self._step.want(self._number)
        error = self.done.exception()
        # The host waits: streams that were ordered behind step() when it returned need no order of their own.
        for event in self.events:
            event.synchronize()
        return error


class _LateStep:
    """One step. It holds no row that is done, and what waits for it holds no row at all."""

    def __init__(self, batches: Sequence[list[HostRow]]) -> None:
        self._waiting = dict(enumerate(batches))
        self._wanted: deque[int] = deque()
        self._may_begin = threading.Event()
        self._thread: int | None = None
        self.batches = [_Batch(number, self) for number in self._waiting]
        self.has_ended_well = False

    @property
    def is_here(self) -> bool:
        """See :class:`lowtide.optim.arriving.GoingOn`."""
        return self._thread == threading.get_ident()

    def demand_elsewhere(self) -> None:
        """Raise StateError in the thread in which it goes on, such as from a finalizer: it would wait for itself."""
        if self.is_here:
            raise StateError(
                explain(
                    "a step waits for itself",
                    expected="a parameter that is used in another thread",
                    got="one that the step has not reached, used in the step's own",
                    where="cpu_optimizer(overlap=True)",
                    remedy="Use overlap=False where finalizers, or the optimizer's class, use the model.",
                )
            )

    def begin(self) -> None:
        """Let the thread go on."""
        self._may_begin.set()

    def cancel(self, error: BaseException) -> None:
        """Nothing is stepped."""
        self._end_badly(error)
        self.begin()

    def _end_badly(self, error: BaseException) -> None:
        self._waiting.clear()
        for one in self.batches:
            if not one.done.done():
                one.done.set_exception(error)

    def want(self, number: int) -> None:
        """Step this batch next."""
        self._wanted.append(number)

    def _next(self) -> int | None:
        while self._wanted:
            number = self._wanted.pop()
            if number in self._waiting:
                return number
        return next(iter(self._waiting), None)

    def run(self, worker: Worker, lanes: Lanes) -> None:
        """On the thread: step all batches, or none after one that fails."""
        self._thread = threading.get_ident()
        self._may_begin.wait()
        while (number := self._next()) is not None:
            batch = self.batches[number]
            try:
                step_rows(self._waiting.pop(number), worker)
                batch.events = [event for lane in lanes.all() if (event := lane.mark()) is not None]
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                self._end_badly(error)
                break
            batch.done.set_result(None)
        else:
            self.has_ended_well = True
        self._thread = None  # the next step's may have the same number

    def join(self) -> None:
        """See :class:`lowtide.optim.arriving.GoingOn`."""
        wait([batch.done for batch in self.batches])

    def settle(self) -> None:
        """See :class:`lowtide.optim.arriving.GoingOn`."""
        # For the copies of those that were reached, too, whatever became of the others.
        for error in [batch.error() for batch in self.batches]:
            if error is not None:
                raise _failed(error) from error
        unwatch(self)


class LateSteps:
    """Begins such steps, one at a time, and says which parameters must not be late."""

    def __init__(self) -> None:
        self.count = 0
        self._beside = Beside("lowtide-step")
        self._going_on: tuple[_LateStep, list[tuple[HostRow, _Batch]], Worker] | None = None
        # Why no step may be late; the first whole step shows what the class does.
        self._forbids: str | None = None
        self._learned = False
        self._early: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    @property
    def goes_on(self) -> bool:
        """Whether a step has not been ended."""
        return self._going_on is not None

    def learn(self, *, changes_groups: bool) -> None:
        """What a whole step has shown of its class."""
        self._learned = True
        if changes_groups:
            self._forbids = "its class changes what is in param_groups, which others read"

    def choose(self, due: Sequence[HostRow]) -> list[HostRow]:
        """The rows that may be late; the report counts the others."""
        self.count = 0
        self._early.clear()
        if not self._learned:
            return []
        why_none = self._forbids
        if why_none is None and torch.is_autocast_enabled("cpu"):
            why_none = "it was called under autocast, which is of one thread"
        found = []
        for row in due:
            why = why_none or why_not(row.parameter)
            if why is None:
                found.append(row)
            else:
                self._early[why] += 1
                self._first.setdefault(why, row.name)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the last step waited for some, and for how many."""
        return tuple(
            f"step() waits for {count} parameters: {why} (the first is {self._first[why]})"
            for why, count in self._early.items()
        )

    def begin(self, rows: Sequence[HostRow], worker: Worker, lanes: Lanes) -> None:
        """Step rows whose masters were refreshed, and return before that is done."""
        batches = list(batches_of(rows, LATE_BYTES))
        step = _LateStep(batches)
        pairs = [(row, batch) for batch, members in zip(step.batches, batches, strict=True) for row in members]
        # The thread first: if there is none, nothing has changed.
        self._beside.submit(lambda: step.run(worker, lanes))
        try:
            for row, batch in pairs:
                row.aim()
                row.gradient.hand_over(batch)
                expect(row.parameter, batch)
            watch(step)
        except BaseException as error:
            step.cancel(error)
            self._release(step, pairs)
            raise
        self._going_on = (step, pairs, worker)
        self.count = len(rows)
        step.begin()

    def end(self) -> None:
        """Wait for the step that goes on, if one does.

        Raises:
            StateError: it failed.
        """
        if self._going_on is None:
            return
        # Whoever interrupts the waiting finds it going on.
        step, pairs, worker = self._going_on
        step.demand_elsewhere()
        try:
            step.settle()
        except StateError:
            self._release(step, pairs)
            raise
        self._release(step, pairs)
        if worker.carry_back():
            self.learn(changes_groups=True)

    def _release(self, step: _LateStep, pairs: Sequence[tuple[HostRow, _Batch]]) -> None:
        self._going_on = None
        unwatch(step)
        for row, batch in pairs:
            row.take_back()
            end_arrival(row.parameter, batch)


def _failed(error: BaseException) -> StateError:
    return StateError(
        explain(
            "a step that went on beside the loop has failed",
            expected="a step on the host that ends",
            got=f"{type(error).__name__}: {error}",
            where="cpu_optimizer(overlap=True)",
            remedy="Call optimizer.wait(), which says so once more and lets parameters be used, then step() again: it "
            "goes on with those that were not reached and still have their gradients.",
        )
    )
