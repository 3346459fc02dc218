"""Which tensors may move, and why the others may not (U12). Moves nothing."""

from __future__ import annotations

import torch

from lowtide import device
from lowtide.residency.manager import SwapManager
from lowtide.storage import is_parameter

__all__ = ["NO_SCHEDULE", "why_not_move"]

NO_SCHEDULE = "no schedule"


def why_not_move(tensor: torch.Tensor, nbytes: int, manager: SwapManager) -> tuple[str, str] | None:
    """Why a tensor that was asked to move stays: (reason, remedy), or None if it moves."""
    minimum = manager.settings.min_bytes
    if not manager.is_scheduled:
        return NO_SCHEDULE, "Call lowtide.auto(model), chain the layers, or drive a group by hand."
    if is_parameter(tensor):
        return "parameters and their views never move", "Nothing to do: they stay with their module."
    if manager.is_held_elsewhere(tensor):
        return "somebody else keeps it on the device, so moving it frees nothing", "Drop the other reference."
    if nbytes < minimum:
        return f"smaller than min_bytes ({minimum})", "Lower SwapManager().configure(min_bytes=...)."
    if tensor.device.type == "cpu" and device.has_accelerator():
        return "it lives on the host already", "Nothing to do."
    if tensor.device.type == "meta":
        return "it has no bytes", "Nothing to do."
    return None
