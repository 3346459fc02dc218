"""A parameter as an optimizer's arithmetic sees it: local, flat, in the order of its memory.

Law: a flat view shows the elements in storage order, so that parameter,
gradient and state of one element meet at one index whatever the strides.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["dense_strides", "flat_view", "in_order_of", "is_sharded", "like_parameter", "local_part"]

Tensor = torch.Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``: this process holds a part."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, over the same memory and without history."""
    if is_sharded(tensor):
        sharded: Any = tensor
        return sharded.to_local().detach()  # type: ignore[no-any-return]
    return tensor.detach()


def dense_strides(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without a gap and without meeting twice."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor as one row, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of ``like``, which is dense; a copy only where they differ."""
    if tensor.stride() == like.stride() or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def like_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """A row of elements with the shape and strides of ``parameter``; the inverse of :func:`flat_view`."""
    return flat.as_strided(parameter.size(), parameter.stride())
