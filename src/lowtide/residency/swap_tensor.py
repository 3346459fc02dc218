"""One tensor's bytes: on the device, on their way down, on the lower tier, on their way up.

Law: the state is one Enum and changes only by the verbs below; a repeated call
is harmless, a call that does not fit raises and names the missing one. Device
memory is freed by dropping our reference after the copy was waited for; whoever
else holds the storage keeps it, and that is counted, not fought.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch
from lowtide.errors import CertifyError, ModifiedError, StateError, explain
from lowtide.storage import Layout, demand_bytes, is_empty, layout_of, over, refill_if_emptied, whole

if TYPE_CHECKING:
    from lowtide.residency.copies import Carrier, Copy

__all__ = ["SwapState", "SwapTensor", "launch_load", "launch_offload"]

Tensor = torch.Tensor


class SwapState(enum.Enum):
    """Where the bytes are: ``device -> d2h -> host -> h2d -> device``."""

    DEVICE = "device"
    D2H = "d2h"
    HOST = "host"
    H2D = "h2d"


class SwapTensor:
    """The state machine of one storage's copy on the lower tier (U9).

    Moves the *whole* storage behind ``tensor`` once, however many views of it
    exist; ``get_val`` gives a tensor with the size, strides, offset and lazy bits
    of the one passed in. Costs one copy of the storage's bytes on the lower tier
    from ``async_offload`` until it is loaded back and released. Hazard: it frees
    device memory only if nobody else holds the storage.

    >>> import torch
    >>> from lowtide import SwapTensor
    >>> t = SwapTensor(torch.arange(4.0))
    >>> t.async_offload(); t.wait_offload(); t.state.value
    'host'
    >>> t.async_load(); t.wait_load(); t.get_val()
    tensor([0., 1., 2., 3.])
    """

    __slots__ = (
        "__weakref__",
        "_carrier",
        "_checksum",
        "_in",
        "_out",
        "_slot",
        "_state",
        "_val",
        "_version",
        "_weak_storage",
        "_written",
        "device",
        "layout",
        "must",
        "name",
        "nbytes",
        "offloaded_once",
        "owners",
        "source_version",
        "visit",
    )

    def __init__(self, tensor: Tensor, *, carrier: Carrier | None = None, name: str = "tensor") -> None:
        if carrier is None:
            from lowtide.residency.manager import SwapManager  # noqa: PLC0415 - the manager owns the carriers

            carrier = SwapManager().carrier_for(tensor.device)
        self.name = name
        self.device = tensor.device
        self.layout: Layout = layout_of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.owners = 1
        self.offloaded_once = False
        self._carrier = carrier
        self._state = SwapState.DEVICE
        self._val: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._written: int | None = None  # the version it had when it was let go, if that was another one
        self._slot: Any = None
        self._out: Copy | None = None
        self._in: Copy | None = None
        self.source_version = tensor._version
        # Pins the address of the source for as long as we may be asked whether we move it.
        self._weak_storage = _torch.take_weak_storage(tensor.untyped_storage())
        self._checksum: tuple[Callable[[Tensor], Tensor], Tensor] | None = None
        self.must = False  # a MUST_SWAP asked for it
        self.visit: Any = None  # the schedule's visit, told when backward first needs this tensor

    def certify(self, checksum: Callable[[Tensor], Tensor]) -> None:
        """Compare the bytes that come back with those that are here now."""
        self._checksum = (checksum, checksum(whole(self.get_val())))

    def _verify(self) -> None:
        if self._checksum is None:
            return
        checksum, expected = self._checksum
        if not torch.equal(checksum(whole(self.get_val())), expected):
            raise CertifyError(
                explain(
                    "a swapped tensor came back with other bits",
                    expected="the bytes that left",
                    got=f"a {tuple(self.layout.size)} {self.layout.dtype} tensor with another checksum",
                    where=self.name,
                    remedy="Something wrote to it unseen before it left, or the lower tier is faulty.",
                )
            )

    def shares(self, tensor: Tensor) -> bool:
        """Whether this moves the very bytes that ``tensor`` shows now."""
        same = tensor.untyped_storage()._cdata == self._weak_storage
        return same and self.owners > 0 and tensor._version == self.source_version

    def remember_holder(self) -> None:
        """Somebody else holds our source: do not move it again while it lives."""
        from lowtide.residency.manager import SwapManager  # noqa: PLC0415 - the manager routes, and imports us

        SwapManager().remember_held_elsewhere(self._weak_storage)

    @property
    def held_elsewhere(self) -> bool:
        """Whether somebody else keeps the bytes on the device that we dropped."""
        return self._state is SwapState.HOST and not _torch.weak_storage_is_dead(self._weak_storage)

    @property
    def state(self) -> SwapState:
        """Where the bytes are now."""
        return self._state

    # ---- the verbs of the sources -------------------------------------------------------------

    def get_val(self) -> Tensor:
        """The tensor, which must be on the device; raises :class:`StateError` elsewhere, naming the missing call."""
        if self._val is None or self._state is SwapState.H2D:
            missing = "wait_load" if self._state is SwapState.H2D else "async_load and wait_load"
            raise self._wrong("get_val", "a resident tensor (device)", missing)
        refill_if_emptied(self._val)
        demand_bytes(self._val, self.name)
        written = self._val._version if self._written is None else self._written
        if self._written is not None or written != self._version:
            raise ModifiedError(
                explain(
                    "one of the variables needed for gradient computation has been modified by an inplace operation",
                    expected=f"version {self.source_version}",
                    got=f"version {written} of a {tuple(self.layout.size)} {self.layout.dtype} tensor",
                    where=self.name,
                    remedy="Do not write to it between forward and backward, or save a clone.",
                )
            )
        return self._val

    def async_offload(self, copy_stream: Any = None) -> None:
        """Start the copy to the lower tier. Harmless when it is there or on its way already."""
        launch_offload([self], copy_stream)

    def wait_offload(self) -> None:
        """Order the compute after the copy and drop the device's bytes. On a plain CPU this blocks."""
        if self._state is SwapState.DEVICE:
            if self.offloaded_once:
                return
            raise self._wrong("wait_offload", "a launched offload (d2h)", "async_offload")
        if self._state is not SwapState.D2H:
            return
        self._settle()
        assert self._val is not None
        if self._val._version != self._version:
            # Written while it left: nobody knows which bytes went.
            self._written = self._val._version
        self._val = None
        self._state = SwapState.HOST

    def let_run(self) -> bool:
        """Drop the device's bytes while they leave: they are free when they have left, and the compute does not wait.

        False where the copy may fail; it is to be waited for then.
        """
        if self._state is not SwapState.D2H:
            return True
        assert self._out is not None
        if not self._out.let_run():
            return False
        self.wait_offload()
        return True

    def async_load(self, copy_stream: Any = None) -> None:
        """Start the copy back. Harmless when it is back or on its way already."""
        launch_load([self], copy_stream)

    def wait_load(self) -> None:
        """Order the compute after the copy back; the tensor is then resident and its lower copy is released."""
        if self._state is SwapState.DEVICE:
            return
        if self._state is not SwapState.H2D:
            raise self._wrong("wait_load", "a launched load (h2d)", "async_load")
        assert self._in is not None
        try:
            self._in.wait()
        except BaseException:
            # What came is no good; the copy on the lower tier still is, and may be asked for again.
            self._val = self._in = None
            self._state = SwapState.HOST
            raise
        self._state = SwapState.DEVICE
        self._free_slot()

    # ---- past the device ----------------------------------------------------------------------

    @classmethod
    def on_host(
        cls, flat: Tensor, where: torch.device, *, carrier: Carrier | None = None, name: str = "tensor"
    ) -> SwapTensor:
        """A tensor of bytes that begins its life on the lower tier; ``where`` is the device it will be loaded to.

        ``flat`` is 1-D uint8 in host memory and is copied. Blocks the host; no byte of it meets the device.
        """
        # An empty stand-in gives the layout: nothing may be allocated where the bytes do not belong yet.
        made = cls(torch.empty(0, dtype=torch.uint8, device=where), carrier=carrier, name=name)
        made.nbytes = flat.numel()
        made.layout = layout_of(flat)
        with torch.no_grad(), _torch.no_dispatch():
            made._slot, made._out = made._carrier.put(flat)
        made._val = None
        made._state = SwapState.HOST
        made.offloaded_once = True
        return made

    def peek(self) -> Tensor:
        """All bytes of the storage, copied into host memory, wherever they are. Blocks the host."""
        with torch.no_grad(), _torch.no_dispatch():
            if self._slot is not None and self._out is not None and self._state is not SwapState.DEVICE:
                return self._carrier.peek(self._slot, self._out)
            return whole(self.get_val()).to("cpu", copy=True)

    # ---- what the tape needs ------------------------------------------------------------------

    def bring_back(self, where: str) -> Tensor:
        """The tensor, whatever the state: a late load is launched and waited for, and counted."""
        self.name = where
        if self.visit is not None:
            visit, self.visit = self.visit, None
            visit.reached()
        if self._state is SwapState.D2H:
            # It turned out to be needed while it leaves: keep it, after its copy.
            self._settle()
            self._state = SwapState.DEVICE
            self._free_slot()
        elif self._state is SwapState.HOST:
            from lowtide.residency.manager import SwapManager  # noqa: PLC0415

            SwapManager().traffic.late_loads += 1
            launch_load([self])
        if self._state is SwapState.H2D:
            self.wait_load()
            self._verify()
        return self.get_val()

    def release(self) -> None:
        """One owner needs it no more; the last one frees both copies."""
        self.owners -= 1
        if self.owners <= 0:
            self._abandon()

    def _abandon(self) -> None:
        self._val = None
        self._free_slot()

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        self._abandon()
        _torch.free_weak_storage(self._weak_storage)

    def _free_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        copies = [copy for copy in (self._out, self._in) if copy is not None]
        self._out = self._in = None
        self._carrier.release(slot, copies)

    def _settle(self) -> None:
        """Wait for the way out; if it failed the tensor stays on the device and the error goes up."""
        assert self._out is not None
        try:
            self._out.wait()
        except BaseException:
            self._state = SwapState.DEVICE
            self._free_slot()
            raise
        self.offloaded_once = True

    def _wrong(self, call: str, expected: str, missing: str) -> StateError:
        return StateError(
            explain(
                f"{call} does not fit",
                expected=expected,
                got=self._state.value,
                where=self.name,
                remedy=f"Call {missing} first.",
            )
        )

    def _started_out(self, slot: Any, copy: Copy) -> None:
        self._slot, self._out, self._state = slot, copy, SwapState.D2H

    def _started_in(self, flat: Tensor, copy: Copy) -> None:
        self._val = over(flat.untyped_storage(), self.layout)
        self._version = self._val._version
        self._in, self._state = copy, SwapState.H2D


def launch_offload(tensors: Sequence[SwapTensor], copy_stream: Any = None) -> int:
    """Start the copies of all tensors that are resident and were not launched yet, as one batch; returns the bytes."""
    for tensor in tensors:
        if tensor.state is SwapState.H2D:
            raise tensor._wrong("async_offload", "a resident tensor (device)", "wait_load")
    # Several owners may name one tensor: it leaves once.
    # What was emptied at the user's word has nothing to move.
    leaving = [
        t for t in dict.fromkeys(tensors) if t.state is SwapState.DEVICE and t._val is not None and not is_empty(t._val)
    ]
    if not leaving:
        return 0
    with torch.no_grad(), _torch.no_dispatch():
        started = leaving[0]._carrier.copy_out([whole(t.get_val()) for t in leaving], copy_stream)
    for tensor, (slot, copy) in zip(leaving, started, strict=True):
        tensor._started_out(slot, copy)
    return sum(t.nbytes for t in leaving)


def launch_load(tensors: Sequence[SwapTensor], copy_stream: Any = None) -> int:
    """Start the copies back of all tensors that are on the lower tier, as one batch; returns the bytes."""
    for tensor in tensors:
        if tensor.state is SwapState.D2H:
            raise tensor._wrong("async_load", "a tensor on the lower tier (host)", "wait_offload")
        if tensor.state is SwapState.DEVICE and not tensor.offloaded_once:
            raise tensor._wrong("async_load", "a tensor on the lower tier (host)", "async_offload and wait_offload")
    coming = [t for t in dict.fromkeys(tensors) if t.state is SwapState.HOST]
    if not coming:
        return 0
    with torch.no_grad(), _torch.no_dispatch():
        started = coming[0]._carrier.copy_in(
            [(t._slot, t._out) for t in coming if t._out is not None], coming[0].device, copy_stream
        )
        for tensor, (flat, copy) in zip(coming, started, strict=True):
            tensor._started_in(flat, copy)
    return sum(t.nbytes for t in coming)
