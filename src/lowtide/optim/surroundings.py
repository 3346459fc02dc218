"""What a swapped optimizer does outside of its step: the first loads begin in backward, the last stores end in forward.

Law: only when something is done is guessed, from what the last step did. A guess that was wrong is taken back, and what
could not be begun is begun by the step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide import device
from lowtide.errors import CapacityError
from lowtide.optim.pipeline import bring_away
from lowtide.optim.segment import HeldSegment

__all__ = ["Arrivals", "Surroundings"]

Tensor = torch.Tensor

# Loads begin when half of a backward's gradients are still to come: half of what forward kept is gone by then, and a
# quarter of it would hide half as much.
_LAST_SHARE = 2


class Arrivals:
    """Counts gradients as they come; holds nothing of the optimizer, which may die before its parameters."""

    def __init__(self, first: Callable[[], None], nearly_over: Callable[[], None]) -> None:
        """``first`` is called when a step's first gradient comes, ``nearly_over`` near the last; both if they live."""
        self._first = weakref.WeakMethod(first)
        self._nearly_over = weakref.WeakMethod(nearly_over)
        self._handles: list[Any] = []
        self._lock = threading.Lock()  # backward has a thread for each device
        self._seen = self._expected = 0
        self._unhook = weakref.finalize(self, _remove, self._handles)
        self._unhook.atexit = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Count the gradients of these, too."""
        hook = _Hook(self)
        for parameter in parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def stop(self) -> None:
        """Count no more."""
        self._unhook()

    def stepped(self) -> None:
        """A step was made: as many gradients are expected before the next one."""
        with self._lock:
            self._seen, self._expected = 0, self._seen

    def came(self) -> None:
        """One gradient is there."""
        with self._lock:
            self._seen += 1
            seen, due = self._seen, self._expected - len(self._handles) // _LAST_SHARE
        for number, method in ((1, self._first), (due, self._nearly_over)):
            call = method() if seen == number else None
            if call is not None:
                call()


class _Hook:
    def __init__(self, owner: Arrivals) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, parameter: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.came()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class Surroundings:
    """The segments that are on their way while no step runs."""

    def __init__(self) -> None:
        self._stepped: list[HeldSegment] = []
        self._ahead: list[HeldSegment] = []
        self._behind: list[HeldSegment] = []
        self._streams: dict[torch.device, Any] = {}
        self._window = 0
        self.arrivals = Arrivals(self.settle, self.load_ahead)
        self.ahead_bytes = 0  # loaded before a step, so far
        self._tried = False  # since the last step
        self._alone = 0  # steps that no loads were tried before, but for the first
        self._failed: dict[str, Exception] = {}

    def stepped(self, segments: Sequence[HeldSegment], window: int, behind: Sequence[HeldSegment]) -> None:
        """A step over ``segments`` was made; ``behind`` are still leaving and must be waited for."""
        if self._stepped and not self._tried:
            self._alone += 1
        self._tried = False
        self._stepped, self._window, self._behind = list(segments), window, list(behind)
        where = {segment.device for segment in segments if device.is_accelerator(segment.device)}
        self._streams = {one: device.current_stream(one) for one in where}
        self.arrivals.stepped()

    def load_ahead(self) -> None:
        """Begin the loads with which the next step will begin, as many as its window holds."""
        held, self._tried = 0, True
        with torch.no_grad():
            for segment in self._stepped:
                if segment.is_resident or segment.is_empty or segment.is_arriving:
                    continue
                held += segment.nbytes
                if held > self._window:
                    return
                try:
                    self._start(segment)
                except (torch.OutOfMemoryError, CapacityError) as error:
                    self._failed["the first loads could not begin in backward"] = error
                    return
                self.ahead_bytes += segment.nbytes
                self._ahead.append(segment)

    def _start(self, segment: HeldSegment) -> None:
        # On the stream on which it will be stepped and freed; backward may run on another.
        stream = self._streams.get(segment.device)
        if stream is None:
            segment.start()
            return
        with device.use_stream(stream):
            segment.start()

    def settle(self) -> None:
        """Wait for what is still leaving. What fails to stays on the device, and the next step sends it again."""
        behind, self._behind = self._behind, []
        for segment in behind:
            segment.settle()
            if segment.failure is not None:
                self._failed["state of the last step stayed on the device until the next one"] = segment.failure

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be done, and why."""
        alone = f"{self._alone} steps had no loads before them: too few gradients came in the backward before"
        return (*(f"{what}: {why}" for what, why in self._failed.items()), *([alone] if self._alone else []))

    def take_back(self, due: Sequence[HeldSegment] = ()) -> None:
        """Bring away what was loaded ahead and is not stepped."""
        ahead, self._ahead = self._ahead, []
        wanted = {id(segment) for segment in due}
        for segment in ahead:
            if segment.is_arriving and id(segment) not in wanted:
                bring_away(segment)
