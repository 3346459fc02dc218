"""The router: which group, chain or learned order moves which storage.

Law: it owns no tensor that outlives its graph. Everything it keeps of a forward
is a number in a schedule and a weak reference; a graph that dies, is retained
or never runs backward leaves nothing behind.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from lowtide import _torch, device
from lowtide.errors import LowtideWarning, ScheduleError, WrapError, explain
from lowtide.residency.copies import Carrier, FileCarrier, PinnedCarrier, Settings, Traffic
from lowtide.residency.deep import DeepCarrier
from lowtide.residency.group import Storage, SwapGroup
from lowtide.residency.swap_tensor import SwapTensor
from lowtide.schedule import Action, Batch, Schedule, Verb
from lowtide.storage import PLAIN_TYPES

__all__ = ["SwapManager", "Visit", "ask_for_open_visit", "watch_chained_layers"]


_NO_SCHEDULE = (
    "a wrapper asked to swap, but nothing says when: what it named is kept on the device. Call lowtide.auto(model), "
    "SwapManager().set_forward_prefetch_layer(first, second), or drive a group by hand."
)

# Bytes in flight by default, without an accelerator and with one: there a layer saves more, and its host less.
_IN_FLIGHT = {False: 256 << 20, True: 1 << 30}

# Called with every layer that a chain names: whoever can see its forward begin and end.
_watchers: list[Callable[[Any], None]] = []


def watch_chained_layers(watcher: Callable[[Any], None]) -> None:
    """Let ``watcher`` install the forward boundaries of chained layers."""
    _watchers.append(watcher)


# Asked for the visit of the region that records now: whoever can see which regions are open.
_open_visits: list[Callable[[], Visit | None]] = []


def ask_for_open_visit(find: Callable[[], Visit | None]) -> None:
    """Let ``find`` say which visit the region belongs to that is open on this thread."""
    _open_visits.append(find)


def _users_level() -> int:
    """How many frames up the code is that called a wrapped forward: not ours, not torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in {"lowtide", "torch"}:
        frame = frame.f_back
        level += 1
    return level


class _Unset:
    """A setting that was not given, where None has a meaning of its own."""


_UNSET = _Unset()


class Visit:
    """One forward call of a unit: what it saved, and how the schedule drives it."""

    __slots__ = ("__weakref__", "_finalizer", "layer", "manager", "number", "sequence", "storages")

    def __init__(self, manager: SwapManager, sequence: _Sequence, number: int) -> None:
        self.manager = manager
        self.sequence = sequence
        self.number = number
        self.storages: list[weakref.ref[Storage]] = []
        self.layer: weakref.ref[Any] | None = None  # the chained layer whose place in the chain it takes

    def add(self, storage: Storage) -> None:
        """The unit's call saved something that may move."""
        self.storages.append(weakref.ref(storage))

    def alive(self) -> list[Storage]:
        """The storages whose graphs are alive."""
        return [s for s in (reference() for reference in self.storages) if s is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that may move."""
        return sum(s.nbytes for s in self.alive())

    def reached(self) -> None:
        """Backward reaches this call."""
        self.manager._run(self.sequence, lambda schedule: schedule.begin_backward(self.number))

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        self.sequence.gone(self.number)


class _Sequence:
    """The visits of one thread: a pure schedule, and weak references to what it speaks of."""

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.RLock()
        self.settings = settings
        self.schedule = Schedule()
        self.visits: weakref.WeakValueDictionary[int, Visit] = weakref.WeakValueDictionary()

    def gone(self, number: int) -> None:
        with self.lock:
            self.schedule.forget(number)


class _Local(threading.local):
    def __init__(self) -> None:
        self.sequence: _Sequence | None = None
        self.units: list[Visit] = []  # open chained layers, outermost first
        self.learning = 0  # how many `auto` models run forward now
        self.buffers: set[int] = set()  # storages of their buffers
        self.batches = 0  # forwards of such models so far
        self.batch: Batch | None = None  # the one that runs now


class SwapManager:
    """The one router of a process (U6, U8, U9): chains, hand-driven groups, settings and counters.

    ``SwapManager()`` always gives the same object. Holds no tensors: what was
    swapped belongs to the graph that needs it.

    >>> SwapManager() is SwapManager()
    True
    """

    _instance: ClassVar[SwapManager | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    settings: Settings
    traffic: Traffic

    def __new__(cls) -> SwapManager:  # noqa: PYI034 - one object, of this very class
        """The one router of this process."""
        with cls._lock:
            if cls._instance is None:
                cls._instance = super().__new__(cls)
                cls._instance._start()
            return cls._instance

    def _start(self) -> None:
        self.settings = Settings()
        self.traffic = Traffic()
        self._carriers: dict[str, Carrier] = {}
        self._groups: dict[str, SwapGroup] = {}
        self._current_group_name: str | None = None
        self._successors: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._predecessors: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._links = 0
        self._link_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by the first of two
        self._distances: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._local = _Local()
        # storage address -> the copy that already moves it; one copy per storage, whoever saves it (U12)
        # storages (pinned by weak reference) that somebody else keeps: moving them frees nothing
        self._held_elsewhere: set[int] = set()
        self._warned = False
        self._shared: weakref.WeakValueDictionary[int, SwapTensor] = weakref.WeakValueDictionary()

    # ---- settings ------------------------------------------------------------------------------

    def configure(
        self,
        *,
        min_bytes: int | _Unset = _UNSET,
        in_flight_bytes: int | _Unset = _UNSET,
        prefetch: int | _Unset = _UNSET,
        host_bytes: int | _Unset | None = _UNSET,
        file_dir: str | _Unset | None = _UNSET,
    ) -> None:
        """Change settings; only what is given changes.

        Args:
            min_bytes: storages smaller than this never move (default 64 KiB).
            in_flight_bytes: bound on bytes that are leaving or coming at once (default 256 MiB, and 1 GiB on an
                accelerator). One region's bytes should fit: of a larger one, parts leave before it ends.
            prefetch: how many regions ahead backward loads (default 1).
            host_bytes: budget of the lower tier in bytes; None is no bound.
            file_dir: directory of the spill file on machines without an accelerator.

        >>> SwapManager().configure(prefetch=1)
        """
        given = {
            "min_bytes": min_bytes,
            "in_flight_bytes": in_flight_bytes,
            "prefetch": prefetch,
            "host_bytes": host_bytes,
            "file_dir": file_dir,
        }
        before = (self.settings.host_bytes, self.settings.file_dir)
        for name, value in given.items():
            if not isinstance(value, _Unset):
                setattr(self.settings, name, value)
        if before != (self.settings.host_bytes, self.settings.file_dir):
            self._retire_carriers()

    @property
    def in_flight_bytes(self) -> int:
        """The bound on bytes that are leaving or coming at once."""
        given = self.settings.in_flight_bytes
        if given is None:
            # Asked for at the first region, not before: looking for an accelerator may start its driver.
            given = self.settings.in_flight_bytes = _IN_FLIGHT[device.has_accelerator()]
        return given

    def reset(self) -> None:
        """Forget groups, chains, settings and counters. Copies that are alive stay with their graphs."""
        self._retire_carriers()
        for key in self._held_elsewhere:
            _torch.free_weak_storage(key)
        self._start()

    def _retire_carriers(self) -> None:
        """Use new carriers from now on; copies that are alive keep the one they lie on until they die."""
        for carrier in self._carriers.values():
            if not carrier.live_bytes():
                carrier.close()
        self._carriers = {}

    def carrier_for(self, where: torch.device, tier: str | None = None) -> Carrier:
        """Who moves tensors of a device; ``tier="file"``: into a file, under an accelerator too."""
        deep = tier == "file" and device.is_accelerator(where)
        key = f"{where} to file" if deep else str(where)
        with self._lock:
            if key not in self._carriers:
                if deep:
                    self._carriers[key] = DeepCarrier(where, self.settings, self.traffic)
                elif device.is_accelerator(where):
                    self._carriers[key] = PinnedCarrier(where, self.settings, self.traffic)
                else:
                    self._carriers[key] = FileCarrier(self.settings, self.traffic)
            return self._carriers[key]

    def lower_bytes(self) -> int:
        """Bytes of swapped copies that are alive on the lower tier now."""
        return sum(carrier.live_bytes() for carrier in self._carriers.values())

    def notes(self) -> list[str]:
        """What a user should know of the lower tiers that are in use."""
        return [note for carrier in self._carriers.values() if (note := carrier.note()) is not None]

    # ---- groups driven by hand (U8) --------------------------------------------------------------

    def set_current_group_name(self, group_name: str | None) -> None:
        """Everything saved from now on belongs to this group; None goes back to chains and learned order."""
        self._current_group_name = group_name

    def add_storage(self, group_name: str, storage: Storage) -> None:
        """Let a group drive a storage."""
        self._groups.setdefault(group_name, SwapGroup(group_name)).add(storage)

    def _group(self, group_name: str, call: str) -> SwapGroup:
        group = self._groups.get(group_name)
        if group is None:
            raise ScheduleError(
                explain(
                    f"{call} on a group that was never filled",
                    expected=f"one of {sorted(self._groups)}" if self._groups else "a group (there is none so far)",
                    got=repr(group_name),
                    where="SwapManager",
                    remedy="Call set_current_group_name(...) before the forward that fills it; check the spelling.",
                )
            )
        return group

    def launch_offload(self, group_name: str, copy_stream: Any = None) -> None:
        """Start the copies down of a group's tensors."""
        self._group(group_name, "launch_offload").launch_offload(copy_stream)

    def wait_offload(self, group_name: str) -> None:
        """Order the compute after a group's copies down, and drop its device bytes."""
        self._group(group_name, "wait_offload").wait_offload()

    def launch_load(self, group_name: str, copy_stream: Any = None) -> None:
        """Start the copies back of a group's tensors."""
        self._group(group_name, "launch_load").launch_load(copy_stream)

    def wait_load(self, group_name: str) -> None:
        """Order the compute after a group's copies back."""
        self._group(group_name, "wait_load").wait_load()

    # ---- chains (U6) -----------------------------------------------------------------------------

    def set_forward_prefetch_layer(self, first_layer: Any, second_layer: Any) -> None:
        """Chain two neighbouring layers: ``first`` runs before ``second`` in forward.

        Effect: what regions inside of ``first`` swap leaves as soon as it ends,
        is released when ``second`` ends, and comes back when backward enters
        ``second``. The last layer of a chain keeps its own. Repeating a call is
        harmless; a cycle or a second neighbour raises :class:`ScheduleError`.
        """
        for layer in (first_layer, second_layer):
            if not isinstance(layer, torch.nn.Module):
                raise WrapError(
                    explain(
                        "a chain names something that is no module",
                        expected="two torch.nn.Module objects",
                        got=type(layer).__name__,
                        where="set_forward_prefetch_layer",
                        remedy="Chain the modules whose forward calls follow each other.",
                    )
                )
        self.check_edge(first_layer, second_layer)
        for layer in (first_layer, second_layer):
            for watcher in _watchers:
                watcher(layer)
        self.link(first_layer, second_layer)

    def link(self, first: Any, second: Any, prefetch: int | None = None) -> None:
        """Chain two layers whose boundaries the caller watches himself; ``prefetch`` is that of ``second``."""
        self.check_edge(first, second)
        self._successors[first] = weakref.ref(second)
        self._predecessors[second] = weakref.ref(first)
        self._links += 1
        self._link_of[first] = self._links
        if prefetch is not None:
            self._distances[second] = prefetch

    def neighbours(self, layer: Any) -> tuple[Any, Any]:
        """The layers that are chained before and behind a layer; None where there is none."""
        before, behind = self._predecessors.get(layer), self._successors.get(layer)
        return (None if before is None else before()), (None if behind is None else behind())

    def check_edge(self, first: Any, second: Any) -> None:
        """Raise :class:`ScheduleError` if two layers cannot be chained."""

        def describe(layer: Any) -> str:
            return type(layer).__name__

        where = f"{describe(first)} -> {describe(second)}"
        remedy = "Chain each layer once, in forward order: (layers[i], layers[i + 1])."
        for table, key, other, word in (
            (self._successors, first, second, "successor"),
            (self._predecessors, second, first, "predecessor"),
        ):
            known = table[key]() if key in table else None
            if known is not None and known is not other:
                raise ScheduleError(
                    explain(
                        f"a layer already has another {word}",
                        expected=f"one {word}",
                        got="a second one",
                        where=where,
                        remedy=remedy,
                    )
                )
        step = second
        while step is not None:
            if step is first:
                raise ScheduleError(
                    explain("a chain with a cycle", expected="an order", got="a loop", where=where, remedy=remedy)
                )
            following = self._successors.get(step)
            step = following() if following is not None else None

    def unchain(self, layer: Any) -> None:
        """Take a layer out of its chain. Harmless where it stands in none."""
        before = self._predecessors.pop(layer, None)
        after = self._successors.pop(layer, None)
        self._distances.pop(layer, None)
        first = before() if before is not None else None
        second = after() if after is not None else None
        if first is not None:
            self._successors.pop(first, None)
        if second is not None:
            self._predecessors.pop(second, None)

    def link_from(self, first: Any) -> int | None:
        """What tells the last link from a layer to the one behind it from every other that was ever made."""
        return self._link_of.get(first)

    def unlink(self, first: Any, link: int | None) -> None:
        """Take one link out of its chain. Harmless where it is gone, or another has taken its place."""
        if link is None or self._link_of.get(first) != link:
            return
        behind = self._successors.pop(first, None)
        second = behind() if behind is not None else None
        if second is not None:
            self._predecessors.pop(second, None)
            self._distances.pop(second, None)

    def is_chained(self, layer: Any) -> bool:
        """Whether a layer stands in a declared chain."""
        return layer in self._successors or layer in self._predecessors

    # ---- what regions call -----------------------------------------------------------------------

    def sequence(self) -> _Sequence:
        """The visits of this thread."""
        local = self._local
        if local.sequence is None or local.sequence.settings is not self.settings:
            local.sequence = _Sequence(self.settings)
        schedule = local.sequence.schedule
        schedule.prefetch = self.settings.prefetch
        schedule.in_flight_bytes = self.in_flight_bytes
        return local.sequence

    @property
    def units(self) -> list[Visit]:
        """The chained layers whose forward runs on this thread, outermost first."""
        return self._local.units

    def begin_learning(self, owner: object, buffers: Iterable[torch.Tensor]) -> None:
        """A model under ``lowtide.auto``, with these buffers, begins its forward on this thread."""
        if not self._local.learning:
            self._local.batches += 1
            self._local.batch = Batch(owner, self._local.batches)
        self._local.learning += 1
        self._local.buffers.update(_torch.storage_key(b) for b in buffers if type(b) in PLAIN_TYPES)

    def end_learning(self) -> None:
        """A model under ``lowtide.auto`` ended its forward on this thread."""
        self._local.learning -= 1
        if not self._local.learning:
            self._local.buffers = set()
            self._local.batch = None

    @property
    def learned_buffers(self) -> set[int]:
        """Storages of the buffers of the models that learn their order on this thread now."""
        return self._local.buffers

    @property
    def is_learning(self) -> bool:
        """Whether a model under ``lowtide.auto`` runs forward on this thread."""
        return self._local.learning > 0

    @property
    def is_scheduled(self) -> bool:
        """Whether anything would move what is saved now (U7)."""
        if self._current_group_name is not None or self.units or self.is_learning:
            return True
        return any(find() is not None for find in _open_visits)

    def begin_visit(self) -> Visit:
        """A unit's forward begins."""
        sequence = self.sequence()
        with sequence.lock:
            number, actions = sequence.schedule.begin_forward(self._local.batch)
            visit = Visit(self, sequence, number)
            sequence.visits[number] = visit
            self._act(sequence, actions)
        return visit

    def end_visit(self, visit: Visit, layer: Any = None) -> None:
        """A unit's forward ended; ``layer`` is given (here or by the visit) where it is a chained one."""
        if layer is None and visit.layer is not None:
            layer = visit.layer()
        successor = layer is not None and layer in self._successors
        tail = layer is not None and not successor
        nbytes = visit.nbytes
        distance = self._distances.get(layer) if layer is not None else None
        self._run(
            visit.sequence,
            lambda schedule: schedule.end_forward(
                visit.number, nbytes, successor=successor, tail=tail, prefetch=distance
            ),
        )

    def file_under(self, storage: Storage, visit: Visit | None) -> Visit | None:
        """Route what a region saved: a hand-driven group first, then the chained layer, then the learned order."""
        if self._current_group_name is not None:
            self.add_storage(self._current_group_name, storage)
            return None
        filed = self.units[-1] if self.units else visit
        if filed is not None:
            filed.add(storage)
        return filed

    @property
    def learns_here(self) -> bool:
        """Whether a region that begins now is a visit of the learned order."""
        return self.is_learning and not self.units and self._current_group_name is None

    def adopt(self, tensor: torch.Tensor, name: str) -> SwapTensor:
        """The swap tensor of a storage: the one that already moves it, else a new one (U12)."""
        key = tensor.untyped_storage()._cdata
        with self._lock:
            known = self._shared.get(key)
            if known is not None and known.shares(tensor):
                known.owners += 1
                return known
            made = SwapTensor(tensor, carrier=self.carrier_for(tensor.device), name=name)
            self._shared[key] = made
            return made

    def moving(self, tensor: torch.Tensor) -> SwapTensor | None:
        """The swap tensor of a storage, if what a graph keeps of it may move."""
        with self._lock:
            known = self._shared.get(_torch.storage_key(tensor))
            return known if known is not None and known.shares(tensor) else None

    def remember_held_elsewhere(self, storage: int) -> None:
        """Moving this storage freed nothing, since somebody else holds it (a buffer, a shared table)."""
        with self._lock:
            if storage not in self._held_elsewhere:
                for key in [k for k in self._held_elsewhere if _torch.weak_storage_is_dead(k)]:
                    self._held_elsewhere.discard(key)
                    _torch.free_weak_storage(key)
                pinned = _torch.pin_again(storage)
                if pinned is not None:
                    self._held_elsewhere.add(pinned)

    def is_held_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether moving this tensor's storage is known to free nothing."""
        return bool(self._held_elsewhere) and _torch.storage_key(tensor) in self._held_elsewhere

    def warn_of_no_schedule(self) -> None:
        """Say once that a swap was asked for and nothing moves (U7)."""
        if not self._warned:
            self._warned = True
            warnings.warn(_NO_SCHEDULE, LowtideWarning, stacklevel=_users_level())

    def _run(self, sequence: _Sequence, event: Any) -> None:
        with sequence.lock:
            self._act(sequence, event(sequence.schedule))

    def _act(self, sequence: _Sequence, actions: list[Action]) -> None:
        for action in actions:
            visit = sequence.visits.get(action.visit)
            if visit is None:
                continue
            for storage in visit.alive():
                if action.bound:
                    self.traffic.bound_waits += 1
                if action.verb is Verb.LAUNCH_OFFLOAD:
                    storage.launch_offload()
                elif action.verb is Verb.WAIT_OFFLOAD:
                    storage.wait_offload()
                else:
                    storage.launch_load()
