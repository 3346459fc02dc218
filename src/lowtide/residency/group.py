"""What moves together: the tensors of one module call, and the calls of one group.

Law: a group never owns tensors; it finds the storages of graphs that are still
alive and drives them. Holds weak references only.
"""

from __future__ import annotations

import weakref
from typing import Any

from lowtide.errors import CapacityError, ScheduleError, StateError, TierError, explain
from lowtide.report.counters import RegionRow
from lowtide.residency.swap_tensor import SwapState, SwapTensor, launch_load, launch_offload

__all__ = ["Storage", "SwapGroup"]


_HELD_ELSEWHERE = (
    "what left is still held by somebody else, so its device memory is not free (held elsewhere). Nothing to do if "
    "that is your own batch; else drop the other reference before the next layer ends."
)


class Storage:
    """All tensors that one module saved in one forward, saved and swapped apart (U9).

    ``save_storage`` and ``swap_storage`` map a key (the storage's identity) to
    the tensors kept on the device and to those that move. The graph owns it: when
    the graph dies, so do the copies.

    >>> import torch
    >>> from lowtide import Storage, SwapTensor
    >>> storage = Storage("layers.0")
    >>> storage.swap(SwapTensor(torch.ones(4)))
    >>> storage.launch_offload(); storage.wait_offload(); storage.nbytes
    16
    """

    def __init__(self, name: str = "storage") -> None:
        self.name = name
        self.save_storage: dict[Any, list[Any]] = {}
        self.swap_storage: dict[Any, list[SwapTensor]] = {}
        self._row: RegionRow | None = None
        self._call = 0

    def count_in(self, row: RegionRow) -> None:
        """Count what moves, what is refused and what is held elsewhere in the row of a region's latest call."""
        self._row, self._call = row, row.calls

    @property
    def row(self) -> RegionRow | None:
        """The row to count in, or None once its region has been called again."""
        return self._row if self._row is not None and self._row.calls == self._call else None

    def swap(self, tensor: SwapTensor) -> None:
        """Add a tensor that moves; one that is shared is added once."""
        self.swap_storage.setdefault(id(tensor), [tensor])

    def save(self, key: Any, tensor: Any) -> None:
        """Note a tensor that stays on the device."""
        self.save_storage.setdefault(key, []).append(tensor)

    @property
    def tensors(self) -> list[SwapTensor]:
        """The tensors that move and are still needed."""
        return [t for many in self.swap_storage.values() for t in many if t.owners > 0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that move."""
        return sum(t.nbytes for t in self.tensors)

    def launch_offload(self, copy_stream: Any = None) -> None:
        """Start all copies down as one batch.

        Where the lower tier has no room, a tensor that only prefers to move
        stays and is counted; one that must raises :class:`CapacityError`.
        """
        leaving = [t for t in self.tensors if t.state is SwapState.DEVICE]
        try:
            launch_offload(leaving, copy_stream)
            self._count_launched(leaving)
        except TierError:
            raise
        except CapacityError:
            for tensor in leaving:
                self._launch_or_stay(tensor, copy_stream)

    def _launch_or_stay(self, tensor: SwapTensor, copy_stream: Any) -> None:
        try:
            launch_offload([tensor], copy_stream)
            self._count_launched([tensor])
        except TierError:
            raise
        except CapacityError:
            if tensor.must:
                raise
            if self.row is not None:
                self.row.refuse("the budget of the lower tier is full", tensor.nbytes, "Raise host_bytes.")

    def _count_launched(self, tensors: list[SwapTensor]) -> None:
        row = self.row
        if row is not None:
            nbytes = sum(t.nbytes for t in tensors)
            row.kept_bytes -= nbytes
            row.swapped_bytes += nbytes

    def wait_offload(self) -> None:
        """Order the compute after the copies and drop the device's bytes."""
        for tensor in self.tensors:
            if tensor.state is SwapState.D2H:
                tensor.wait_offload()
                if tensor.held_elsewhere:
                    tensor.remember_holder()
                    if self.row is not None:
                        self.row.held_elsewhere_bytes += tensor.nbytes
                        self.row.note(_HELD_ELSEWHERE)

    def launch_load(self, copy_stream: Any = None) -> None:
        """Start the copies back of what is on the lower tier as one batch."""
        launch_load([t for t in self.tensors if t.state is SwapState.HOST], copy_stream)

    def wait_load(self) -> None:
        """Order the compute after the copies back."""
        for tensor in self.tensors:
            if tensor.state is SwapState.H2D:
                tensor.wait_load()


class SwapGroup:
    """The storages that were saved under one group name and are still alive (U8, U9).

    >>> import torch
    >>> from lowtide import Storage, SwapGroup, SwapTensor
    >>> storage = Storage(); storage.swap(SwapTensor(torch.ones(4)))
    >>> group = SwapGroup("stage0"); group.add(storage)
    >>> group.launch_offload(); group.wait_offload(); group.launch_load(); group.wait_load()
    """

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._filled = False

    def add(self, storage: Storage) -> None:
        """Let the group drive ``storage`` as long as its graph lives."""
        self._filled = True
        self._storages.add(storage)

    def _tensors(self, call: str) -> list[SwapTensor]:
        if not self._filled:
            raise ScheduleError(
                explain(
                    f"{call} on a group that was never filled",
                    expected="a group whose name was set while a wrapped region ran forward",
                    got="no region",
                    where=f"group {self.group_name!r}",
                    remedy="Call SwapManager().set_current_group_name(...) before that forward; check the spelling.",
                )
            )
        return [t for storage in list(self._storages) for t in storage.tensors]

    def launch_offload(self, copy_stream: Any = None) -> None:
        """Start the copies down of everything that is resident. Repeating it is harmless."""
        tensors = self._tensors("launch_offload")
        coming = next((t for t in tensors if t.state is SwapState.H2D), None)
        if coming is not None:
            launch_offload([coming])  # raises, and names the missing wait
        for storage in list(self._storages):
            storage.launch_offload(copy_stream)

    def wait_offload(self) -> None:
        """Order the compute after the copies down and drop the device's bytes."""
        tensors = self._tensors("wait_offload")
        moving = [t for t in tensors if t.state is not SwapState.DEVICE or t.offloaded_once]
        if tensors and not moving:
            raise self._missing("wait_offload", "a launched offload (d2h)", "launch_offload")
        for tensor in moving:
            tensor.wait_offload()

    def launch_load(self, copy_stream: Any = None) -> None:
        """Start the copies back of everything on the lower tier. Repeating it is harmless."""
        tensors = self._tensors("launch_load")
        away = [t for t in tensors if t.state is not SwapState.DEVICE or t.offloaded_once]
        if tensors and not away:
            raise self._missing("launch_load", "tensors on the lower tier (host)", "launch_offload and wait_offload")
        launch_load(away, copy_stream)

    def wait_load(self) -> None:
        """Order the compute after the copies back."""
        tensors = self._tensors("wait_load")
        coming = [t for t in tensors if t.state is not SwapState.DEVICE or t.offloaded_once]
        if tensors and not coming:
            raise self._missing("wait_load", "a launched load (h2d)", "launch_offload, wait_offload and launch_load")
        for tensor in coming:
            tensor.wait_load()

    def _missing(self, call: str, expected: str, missing: str) -> StateError:
        return StateError(
            explain(
                f"{call} does not fit",
                expected=expected,
                got=SwapState.DEVICE.value,
                where=f"group {self.group_name!r}",
                remedy=f"Call {missing} for {self.group_name!r} first.",
            )
        )
