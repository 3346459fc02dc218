"""One segment of an optimizer's state: where its bytes are, and what in them belongs to whom.

Law: the bytes are in exactly one place: nowhere yet, on the device, or on the
lower tier; a copy that fails leaves them where they were. ``start``, ``arrive``,
``leave``, ``settle`` are the steps of one round, in this order, each harmless
where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide.errors import CapacityError
from lowtide.optim.layout import Entry, Piece, Segment
from lowtide.residency.manager import SwapManager
from lowtide.residency.swap_tensor import SwapState, SwapTensor

if TYPE_CHECKING:
    from lowtide.optim.parameter import SteppedParameter
    from lowtide.residency.copies import Carrier

__all__ = ["IN_SEGMENT", "HeldSegment", "row_in"]

Tensor = torch.Tensor


class _InSegment:
    """Stands in a parameter's state for an array that lies in the segment."""

    def __repr__(self) -> str:
        return "IN_SEGMENT"


IN_SEGMENT: Final = _InSegment()


class HeldSegment:
    """The bytes of a :class:`Segment` and the state of its pieces.

    ``states[i]`` is the state of piece ``i`` as the optimizer's class made it, or None before its first step; arrays
    that lie in the segment are there as ``IN_SEGMENT``. ``masters[i]`` says whether its master was ever written.
    ``owners[i]`` is the parameter that the piece is of. ``tier`` is where the bytes go; with ``"device"``
    they stay for good.
    """

    __slots__ = ("_arena", "_swap", "_tier", "device", "failure", "masters", "name", "owners", "plan", "states")

    def __init__(
        self,
        plan: Segment,
        owners: Sequence[SteppedParameter],
        where: torch.device,
        name: str,
        *,
        tier: str | None,
    ) -> None:
        self.plan = plan
        self.owners = tuple(owners)
        self.name = name
        self.states: list[dict[str, Any] | None] = [None] * len(plan.pieces)
        self.masters = [False] * len(plan.pieces)
        self.failure: CapacityError | None = None
        self.device = where
        self._tier = tier
        self._arena: Tensor | None = None
        self._swap: SwapTensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        return self.plan.nbytes

    @property
    def moves(self) -> bool:
        """Whether the bytes leave the device at all."""
        return self._tier != "device"

    def _carrier(self) -> Carrier:
        # Asked for when it is needed: settings may have changed since.
        return SwapManager().carrier_for(self.device, self._tier)

    @property
    def is_resident(self) -> bool:
        """Whether the bytes are on the device and stay there."""
        return self._arena is not None

    @property
    def is_arriving(self) -> bool:
        """Whether a copy in was launched and not waited for."""
        return self._swap is not None and self._swap.state is SwapState.H2D

    @property
    def is_leaving(self) -> bool:
        """Whether a copy away was launched and not waited for."""
        return self._swap is not None and self._swap.state is SwapState.D2H

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._arena is None and self._swap is None

    # ---- one round -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to bring the bytes to the device. New bytes are undefined."""
        if self._swap is not None:
            self._swap.async_load()
        elif self._arena is None:
            self._arena = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def arrive(self) -> None:
        """Order the compute after the bytes have come. Raises TierError if they have not; ask again."""
        if self._swap is not None:
            self._swap.wait_load()
            self._arena, self._swap = self._swap.get_val(), None

    def leave(self) -> None:
        """Begin to bring the bytes away. Without room they stay; see ``failure``."""
        if self._arena is None or not self.moves:
            return
        self.failure = None  # of an earlier try
        swap = SwapTensor(self._arena, carrier=self._carrier(), name=self.name)
        try:
            swap.async_offload()
        except CapacityError as error:
            self.failure = error
            return
        self._arena, self._swap = None, swap

    def settle(self) -> None:
        """Order the compute after the bytes have left, and free them here. If they have not, they stay."""
        if self._swap is None:
            return
        try:
            self._swap.wait_offload()
        except CapacityError as error:
            self.failure = error
            self._arena, self._swap = self._swap.get_val(), None

    def let_run(self) -> bool:
        """Free the bytes here when they have left, whatever the compute does. False: that must be waited for."""
        return self._swap is None or self._swap.let_run()

    # ---- what is in it -------------------------------------------------------------------------

    def view(self, entry: Entry) -> Tensor:
        """An array as a row over the bytes on the device."""
        assert self._arena is not None
        return row_in(self._arena, entry)

    def read(self) -> Tensor:
        """All bytes, copied into host memory. Blocks the host."""
        if self._swap is not None:
            return self._swap.peek()
        assert self._arena is not None
        return self._arena.to("cpu", copy=True)

    def write(self, flat: Tensor) -> None:
        """Replace all bytes by those of host memory, past the device where there is a lower tier.

        Raises:
            CapacityError: there is no room; what was here before is still here.
        """
        if not self.moves:
            self._arena = flat.to(self.device, copy=True)
            return
        self._arena, self._swap = None, SwapTensor.on_host(flat, self.device, carrier=self._carrier(), name=self.name)

    def forget(self) -> None:
        """Drop bytes and state."""
        self._arena = self._swap = None
        self.states = [None] * len(self.plan.pieces)
        self.masters = [False] * len(self.plan.pieces)

    def numbered(self) -> list[tuple[int, Piece]]:
        """The pieces with their numbers."""
        return list(enumerate(self.plan.pieces))


def row_in(flat: Tensor, entry: Entry) -> Tensor:
    """An array as a row over the bytes of its segment, wherever they are."""
    dtype = entry.array.dtype
    stop = entry.offset + entry.length * dtype.itemsize
    return flat[entry.offset : stop].view(dtype)
