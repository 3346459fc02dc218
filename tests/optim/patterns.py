"""Bit patterns of float32, and what rounding them to bfloat16 means, in arithmetic of its own.

The formulas are those of IEEE 754 on 64-bit integers, not the code under test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.optim import residual

NAN = 0x7F800000


def stratified() -> Tensor:
    """A million patterns: every sign, exponent and kind of high half, with low halves around every border."""
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF], device="cpu")
    mantissa = torch.tensor([0, 1, 2, 3, 0x3E, 0x3F, 0x40, 0x41, 0x7C, 0x7D, 0x7E, 0x7F], device="cpu")
    exponent = torch.arange(512, device="cpu")  # with the sign
    high = (exponent[:, None] << 7) + mantissa
    edges = ((high.reshape(-1, 1) << 16) + low).reshape(-1)
    draw = torch.Generator(device="cpu").manual_seed(0)
    anywhere = torch.randint(0, 1 << 32, (1 << 20,), generator=draw, device="cpu")
    return torch.cat((edges, anywhere))


def as_floats(patterns: Tensor) -> Tensor:
    """Patterns in 64-bit integers as float32."""
    return patterns.to(torch.int32).view(torch.float32)


def patterns_of(floats: Tensor) -> Tensor:
    """The bits of float32 or bfloat16 as 64-bit integers, in host memory."""
    wide = floats.dtype is torch.float32
    bits = floats.cpu().view(torch.int32 if wide else torch.int16).to(torch.int64)
    return bits & (0xFFFFFFFF if wide else 0xFFFF)


def is_nan(patterns: Tensor) -> Tensor:
    return (patterns & 0x7FFFFFFF) > NAN


def rounded(patterns: Tensor) -> Tensor:
    """The 16 bits of the cast: to nearest, ties to even. Not for NaN."""
    return (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16


def even_ties(patterns: Tensor) -> Tensor:
    """Values half way between two bfloat16 of which the lower is even."""
    return (patterns & 0x1FFFF) == 0x8000


def there_and_back(x: Tensor, mode: residual.Mode) -> tuple[Tensor, Tensor]:
    """What a row of float32 becomes: the weight, and the master after a split and a merge."""
    n = x.numel()
    weight = torch.empty(n, dtype=torch.bfloat16, device=x.device)
    code = torch.empty(n, dtype=torch.int16, device=x.device)
    ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8, device=x.device) if mode == "exact" else None
    residual.split(x, weight, code, ties, mode)
    back = torch.full_like(x, 7.0)
    residual.merge(weight, code, ties, back, mode)
    return weight, back
