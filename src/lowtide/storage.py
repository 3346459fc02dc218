"""Identity, bytes and views of tensor storages.

Law: a view is rebuilt from what was recorded of it (size, stride, offset,
dtype, lazy bits), never guessed; two tensors share bytes exactly if they share
a storage. Holds no tensor and starts no copy between devices.

The only file that empties a storage, at the user's explicit word
(``CheckpointWithoutOutput``), and that fills it again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from lowtide._torch import conjugate_view, storage_key, swap_bytes
from lowtide.errors import UnsupportedError, explain

__all__ = [
    "PLAIN_TYPES",
    "Emptied",
    "Layout",
    "bit_view",
    "demand_bytes",
    "is_empty",
    "is_parameter",
    "layout_of",
    "over",
    "rebuild",
    "refill_if_emptied",
    "same_layout",
    "whole",
]

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
    return over(storage, _bytes_layout(storage.nbytes()))


def _bytes_layout(nbytes: int) -> Layout:
    return Layout(torch.Size((nbytes,)), (1,), 0, torch.uint8, None)


def over(storage: torch.UntypedStorage, layout: Layout) -> Tensor:
    """A tensor with ``layout`` over a storage, whatever was there before; it has no history."""
    flat = torch.empty(0, dtype=layout.dtype, device=storage.device)
    flat = flat.set_(storage, layout.offset, layout.size, layout.stride)
    return flat if layout.bits is None else conjugate_view(flat, conjugate=layout.bits[0], negative=layout.bits[1])


def rebuild(base: Tensor, layout: Layout) -> Tensor:
    """A tensor with ``layout`` over the storage of ``base``; ``base`` itself where it already looks so.

    Runs without a dispatch mode and with gradients off; the result has no history.
    """
    size, stride, offset, dtype, bits = layout
    if base.is_neg() or (base.dtype.is_complex and base.is_conj()):
        if bits is None or not same_layout(base, layout):
            base = over(base.untyped_storage(), layout_of(base)._replace(bits=None))
        else:
            return base
    if base.dtype is dtype:
        if base.size() != size or base.stride() != stride or base.storage_offset() != offset:
            base = base.as_strided(size, stride, offset)
    else:
        base = over(base.untyped_storage(), layout._replace(bits=None))
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


# ---- storages that were emptied ------------------------------------------------------------------


def is_empty(tensor: Tensor) -> bool:
    """Whether a tensor has elements but no bytes behind them."""
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


_ONE_UNIT = "One region must not span several FSDP units: wrap each unit by itself."


def demand_bytes(tensor: Tensor, where: str, remedy: str = _ONE_UNIT) -> None:
    """Raise ``UnsupportedError`` if somebody has freed the bytes behind a tensor that is needed."""
    if is_empty(tensor):
        raise UnsupportedError(
            explain(
                "the storage of a tensor that the region needs was freed",
                expected="a resident tensor",
                got=f"an empty storage behind a {tuple(tensor.shape)} {tensor.dtype} tensor",
                where=where,
                remedy=remedy,
            )
        )


class Emptied:
    """A storage whose bytes were freed although tensors still look at it, because somebody can make them again.

    ``refill`` is called when lowtide itself meets such a tensor; it must end in :meth:`fill`.
    """

    __slots__ = ("__weakref__", "_storage", "nbytes", "refill")

    def __init__(self, tensor: Tensor, refill: Callable[[], None]) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.refill = refill
        # Held: as long as we are asked for by address, nobody else may have it.
        self._storage: torch.UntypedStorage | None = storage
        storage.resize_(0)
        _emptied[storage._cdata] = self

    def fill(self, source: Tensor) -> Tensor:
        """Give the storage the bytes behind ``source``; returns ``source`` as it looks over them.

        Where torch can exchange them, ``source`` itself is empty afterwards. Where it cannot (before 2.13), they are
        copied, and both are there for a moment. Versions do not change: what was saved is what is back.
        """
        storage = self._storage
        assert storage is not None
        given = source.untyped_storage()
        assert given.nbytes() == self.nbytes
        layout = layout_of(source)
        if swap_bytes is not None:
            swap_bytes(storage, given)
        else:
            storage.resize_(self.nbytes)
            over(storage, _bytes_layout(self.nbytes)).copy_(whole(source))
        self.forget()
        return over(storage, layout)

    def forget(self) -> None:
        """The storage is full again, or nobody will fill it. Repeating it is harmless."""
        storage, self._storage = self._storage, None
        if storage is not None:
            _emptied.pop(storage._cdata, None)

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        self.forget()


# By address. Weak: an entry belongs to the graph that can make the bytes again.
_emptied: weakref.WeakValueDictionary[int, Emptied] = weakref.WeakValueDictionary()


def refill_if_emptied(tensor: Tensor) -> None:
    """Have the bytes behind a tensor made again if they were freed at the user's word."""
    if is_empty(tensor):
        entry = _emptied.get(storage_key(tensor))
        if entry is not None:
            entry.refill()
