"""Whether the lower tier has room for every layer's input, asked before the first of them leaves (L9)."""

from __future__ import annotations

import torch

from lowtide import device
from lowtide.residency.manager import SwapManager
from lowtide.residency.room import demand_room

__all__ = ["check_room", "needed_bytes"]


def needed_bytes(layers: int, nbytes: int, micro_batches: int = 1) -> int:
    """Bytes on the lower tier where every layer but the last moves an input of ``nbytes``.

    >>> needed_bytes(32, 32 << 20) >> 20
    992
    """
    return (layers - 1) * nbytes * micro_batches


def check_room(where: torch.device, layers: int, nbytes: int, micro_batches: int, name: str) -> None:
    """Raise :class:`CapacityError` if the inputs of all layers but the last have no room on the lower tier."""
    taken = device.pinned_footprint(nbytes, where) if device.is_accelerator(where) else nbytes
    demand_room(
        where,
        needed_bytes(layers, taken, micro_batches),
        SwapManager().settings,
        problem="the lower tier has no room for the inputs of the layers",
        formula=f"(layers - 1) x bytes of one input x micro-batches in flight = ({layers} - 1) x {taken} "
        f"x {micro_batches}",
        name=name,
        remedy="Or name fewer layers, or make the batch or the sequence smaller.",
    )
