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
    reasons = (
        (
            not manager.is_scheduled,
            NO_SCHEDULE,
            "Call lowtide.auto(model), chain the layers, or drive a group by hand.",
        ),
        (is_parameter(tensor), "parameters and their views never move", "Nothing to do: they stay with their module."),
        (
            manager.is_held_elsewhere(tensor),
            "somebody else keeps it on the device, so moving it frees nothing",
            "Nothing to do if that is your own batch; else drop the other reference.",
        ),
        (
            nbytes < minimum,
            f"smaller than min_bytes ({minimum})",
            "Lower SwapManager().configure(min_bytes=...).",
        ),
        (
            tensor.device.type == "cpu" and device.has_accelerator(),
            "it lives on the host already",
            "Nothing to do.",
        ),
        (tensor.device.type == "meta", "it has no bytes", "Nothing to do."),
    )
    return next(((reason, remedy) for applies, reason, remedy in reasons if applies), None)
