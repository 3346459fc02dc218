"""Split and merge as one kernel each, where Triton serves the device; see :mod:`lowtide.optim.residual`."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

__all__ = ["merge", "serves", "split"]

Tensor = torch.Tensor

_DEVICES = frozenset({"cuda", "xpu"})
_BYTES = 256  # bytes of the mask, eight elements each, that one program writes


def serves(where: torch.device) -> bool:
    """Whether a fused kernel runs there."""
    return where.type in _DEVICES and _is_there()


@functools.cache
def _is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def split(master: Tensor, weight: Tensor, code: Tensor, ties: Tensor | None, mode: str) -> None:
    """See :func:`lowtide.optim.residual.split`."""
    n = master.numel()
    mask = ties if ties is not None and mode == "exact" else code
    number = ("exact", "saturate", "half_away").index(mode)
    _kernels()[0][(-(-n // (8 * _BYTES)),)](
        master.view(torch.int32), weight.view(torch.int16), code, mask, n, MODE=number, BYTES=_BYTES
    )


def merge(weight: Tensor, code: Tensor, ties: Tensor | None, master: Tensor) -> None:
    """See :func:`lowtide.optim.residual.merge`."""
    n = master.numel()
    mask = ties if ties is not None else code
    _kernels()[1][(-(-n // (8 * _BYTES)),)](
        weight.view(torch.int16), code, mask, master.view(torch.int32), n, MASK=ties is not None, BYTES=_BYTES
    )


@functools.cache
def _kernels() -> tuple[Any, Any]:
    import triton  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415 - only when a device needs it
    from triton import language as tl  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def split_kernel(x_ptr, w_ptr, c_ptr, t_ptr, n, MODE: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
        row = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
        at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = at < n
        x = tl.load(x_ptr + at, mask=inside, other=0)
        even_tie = (x & 0x1FFFF) == 0x8000
        is_nan = (x & 0x7FFFFFFF) > 0x7F800000
        if MODE == 2:
            high = (x + 0x8000) >> 16
        else:
            high = tl.where(is_nan, 0x7FC0, (x + 0x7FFF + ((x >> 16) & 1)) >> 16)
        low = ((x & 0xFFFF) ^ 0x8000) - 0x8000
        if MODE != 2:
            low = tl.where(even_tie, 32767, low)
        tl.store(w_ptr + at, high.to(tl.int16), mask=inside)
        tl.store(c_ptr + at, low.to(tl.int16), mask=inside)
        if MODE == 0:
            flags = (even_tie & (is_nan == 0)).to(tl.int32) << tl.arange(0, 8)[None, :]
            tl.store(t_ptr + row, tl.sum(flags, 1).to(tl.uint8), mask=row * 8 < n)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def merge_kernel(w_ptr, c_ptr, t_ptr, x_ptr, n, MASK: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
        row = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
        at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = at < n
        x = (tl.load(w_ptr + at, mask=inside, other=0).to(tl.int32) << 16) + tl.load(c_ptr + at, mask=inside, other=0)
        if MASK:
            bits = tl.load(t_ptr + row, mask=row * 8 < n, other=0).to(tl.int32)
            x += (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
        tl.store(x_ptr + at, x, mask=inside)

    return split_kernel, merge_kernel
