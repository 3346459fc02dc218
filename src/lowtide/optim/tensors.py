"""A parameter as an optimizer's arithmetic sees it: local, flat, in the order of its memory.

Law: a flat view shows the elements in storage order, so that parameter,
gradient and state of one element meet at one index whatever the strides.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch import storage_key

__all__ = ["Scratch", "dense_strides", "flat_view", "in_order_of", "is_sharded", "local_part", "sum_of_bits"]

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


def sum_of_bits(row: Tensor) -> Tensor:
    """Sum of the bytes behind a row, eight at a time, modulo 2**64: a number on its device. Costs one pass."""
    flat = row.view(torch.uint8) if row.is_contiguous() else row.contiguous().view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.numel() // 8 * 8
    return flat[:words].view(torch.int64).sum() + flat[words:].to(torch.int64).sum()


class Scratch:
    """Rows that are needed for one segment at a time.

    On the host they lie in memory that is used again: a fresh page costs more than its elements are read and written
    for. A device's allocator does that by itself.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """The rows so far are needed no more."""
        self._taken = 0

    def row(self, numel: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        """A row, not filled."""
        if where.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=where)
        nbytes = numel * dtype.itemsize
        if self._taken == len(self._blocks):
            self._blocks.append(torch.empty(0, dtype=torch.uint8, device=where))
        if self._blocks[self._taken].numel() < nbytes:
            self._blocks[self._taken] = torch.empty(nbytes, dtype=torch.uint8, device=where)
        self._taken += 1
        return self._blocks[self._taken - 1][:nbytes].view(dtype)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that will be used again."""
        key = storage_key(tensor)
        return any(storage_key(block) == key for block in self._blocks)
