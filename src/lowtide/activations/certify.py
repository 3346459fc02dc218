"""Proof by checksum that a value came back with the bits it was saved with (R15).

Costs one pass over every packed tensor at pack and one at unpack, and one host
read each at unpack: for the first steps, not for all. Holds no tensor but the
two numbers.
"""

from __future__ import annotations

import torch

from lowtide import _torch
from lowtide.errors import CertifyError, explain
from lowtide.storage import bit_view

__all__ = ["checksum", "verify"]

_CHUNK = 1 << 20


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two position-weighted sums over the bits of a tensor, modulo 2**64, left on its device.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> torch.equal(checksum(a), checksum(b))
    False
    """
    with torch.no_grad(), _torch.no_dispatch():
        flat = bit_view(tensor)
        whole_words = flat.numel() // 8 * 8
        words = flat[:whole_words].view(torch.int64)
        total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK]
            weight = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
            mixed = part ^ (part >> 29)
            total[0] += (mixed * (2 * weight + 1)).sum()
            total[1] += (mixed * (weight * weight + weight + 1)).sum()
        tail = flat[whole_words:].to(torch.int64)
        total += (tail * torch.arange(3, 3 + tail.numel(), dtype=torch.int64, device=tail.device)).sum()
    return total


def verify(expected: torch.Tensor, tensor: torch.Tensor, *, operator: str, where: str) -> None:
    """Compare a value that came back with the checksum taken at pack."""
    if torch.equal(expected, checksum(tensor)):
        return
    raise CertifyError(
        explain(
            "a saved tensor came back with other bits",
            expected=f"the bits that {operator} saved",
            got=f"a {tuple(tensor.shape)} {tensor.dtype} tensor with another checksum",
            where=where,
            remedy="Something wrote to it unseen, or its producer is not deterministic: "
            "keep that operator's output (save_ops), or wrap with recompute='call'.",
        )
    )
