"""Identity, bytes and views of tensor storages.

Law: a view is rebuilt from what was recorded of it (size, stride, offset,
dtype, lazy bits), never guessed; two tensors share bytes exactly if they share
a storage. Holds no tensor and starts no copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowtide._torch import conjugate_view

__all__ = ["PLAIN_TYPES", "Layout", "bit_view", "is_parameter", "layout_of", "rebuild", "same_layout", "whole"]

Tensor = torch.Tensor

_new = tuple.__new__

# Tensors whose bytes we understand: no subclass with a dispatch of its own.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Layout(NamedTuple):
    """How a tensor looks at its storage: everything needed to rebuild it over other bytes.

    ``bits`` is ``(conj, neg)`` or None where neither lazy bit is set.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bits: tuple[bool, bool] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, which is less than the storage's for a slice and more for an expanded tensor."""
        return self.size.numel() * self.dtype.itemsize


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a plain strided tensor."""
    dtype = tensor.dtype
    bits = None
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        bits = (tensor.is_conj(), tensor.is_neg())
    # Half the cost of Layout(...), once per argument of the user's forward.
    return _new(Layout, (tensor.size(), tensor.stride(), tensor.storage_offset(), dtype, bits))


def whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage as a flat uint8 view."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def _over(base: Tensor, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def rebuild(base: Tensor, layout: Layout) -> Tensor:
    """A tensor with ``layout`` over the storage of ``base``; ``base`` itself where it already looks so.

    Runs without a dispatch mode and with gradients off; the result has no history.
    """
    size, stride, offset, dtype, bits = layout
    if base.is_neg() or (base.dtype.is_complex and base.is_conj()):
        if bits is None or not same_layout(base, layout):
            base = _over(base, base.dtype, int(base.storage_offset()), base.size(), base.stride())
        else:
            return base
    if base.dtype is dtype:
        if base.size() != size or base.stride() != stride or base.storage_offset() != offset:
            base = base.as_strided(size, stride, offset)
    else:
        base = _over(base, dtype, offset, size, stride)
    return base if bits is None else conjugate_view(base, conjugate=bits[0], negative=bits[1])


def same_layout(tensor: Tensor, layout: Layout) -> bool:
    """Whether ``tensor`` looks at its storage exactly as ``layout`` says, lazy bits included."""
    size, stride, offset, dtype, bits = layout
    if tensor.stride() != stride or tensor.size() != size or tensor.dtype is not dtype:
        return False
    if tensor.storage_offset() != offset:
        return False
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        return bits == (tensor.is_conj(), tensor.is_neg())
    return bits is None


def bit_view(tensor: Tensor) -> Tensor:
    """The elements of a tensor, in order, as flat bytes; a copy where they are not dense."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one (FSDP2's unsharded ones included)."""
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, torch.nn.Parameter)
