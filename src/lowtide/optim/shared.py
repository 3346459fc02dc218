"""Float32 masters and their bfloat16 weights in one storage, one form at a time: the documents' own layout (P1).

Law: four bytes an element, whatever the form. As float32 the bytes are the master; as bfloat16 the first half is the
weights, in a row, and the second half what rounding left over. A change of form is exact and moves bytes only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide.errors import UnsupportedError, explain
from lowtide.optim import residual
from lowtide.storage import Layout, over

__all__ = ["SharedMasters"]

Tensor = torch.Tensor

# Elements that change form at a time; a multiple of eight, so that the mask of ties is cut between bytes.
_CHUNK = 1 << 16


class SharedMasters:
    """Float32 tensors that become bfloat16 weights and back, in their own storage (P1).

    For an optimizer that insists on resident float32 tensors: call :meth:`to_fp32` before its step and :meth:`to_bf16`
    before forward. Cost: a pass over the bytes each way, two bytes an element of scratch for one tensor at a time, and
    in mode ``exact`` one bit an element that stays. Hazard: the tensors of the form that is *not* current show the
    other's bytes; read and write those of the last call only.

    Args:
        masters: float32 tensors, contiguous, each alone in its storage. They are the float32 form, the objects
            themselves, and the current one.
        mode: see :mod:`lowtide.optim.residual`.

    Raises:
        UnsupportedError: a tensor has another type, is not contiguous, or shares its storage.

    >>> shared = SharedMasters([torch.tensor([1.0, 3.1415927])])
    >>> [weights] = shared.to_bf16()
    >>> weights
    tensor([1.0000, 3.1406], dtype=torch.bfloat16)
    >>> shared.to_fp32()[0][1].item() == torch.tensor(3.1415927).item()
    True
    """

    def __init__(self, masters: Iterable[Tensor], *, mode: residual.Mode = "exact") -> None:
        self._masters = list(masters)
        self._mode: residual.Mode = mode
        for number, master in enumerate(self._masters):
            _demand_own_storage(master, number)
        if len({m.untyped_storage().data_ptr() for m in self._masters if m.numel()}) != sum(
            bool(m.numel()) for m in self._masters
        ):
            raise _refused("tensors with a storage each", "two that share one", "SharedMasters")
        self._weights = [_half_of(master) for master in self._masters]
        self._ties = [
            torch.zeros(residual.tie_bytes(m.numel()), dtype=torch.uint8, device=m.device) if mode == "exact" else None
            for m in self._masters
        ]
        self._is_fp32 = True

    @torch.no_grad()
    def to_bf16(self) -> list[Tensor]:
        """The weights: the masters' casts. Harmless when they are current already."""
        if self._is_fp32:
            for master, ties in zip(self._masters, self._ties, strict=True):
                _to_halves(master.detach().view(-1), ties, self._mode)
            self._is_fp32 = False
        return list(self._weights)

    @torch.no_grad()
    def to_fp32(self) -> list[Tensor]:
        """The masters, with the weights' changes if they were written. Harmless when they are current already."""
        if not self._is_fp32:
            for master, ties in zip(self._masters, self._ties, strict=True):
                _to_whole(master.detach().view(-1), ties, self._mode)
            self._is_fp32 = True
        return list(self._masters)


def _half_of(master: Tensor) -> Tensor:
    """A bfloat16 tensor of the master's shape over the first half of its storage."""
    return over(master.untyped_storage(), Layout(master.size(), master.stride(), 0, torch.bfloat16, None))


def _rows(master: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves of a row's bytes: weights, and codes."""
    n = master.numel()
    halves = master.view(torch.int16)
    return halves[:n].view(torch.bfloat16), halves[n:]


def _to_halves(master: Tensor, ties: Tensor | None, mode: residual.Mode) -> None:
    n = master.numel()
    weights, codes = _rows(master)
    kept = torch.empty(n, dtype=torch.int16, device=master.device)
    scratch = torch.empty(min(n, _CHUNK), dtype=torch.bfloat16, device=master.device)
    # Upwards: what is written lies below everything that is still to be read.
    for start in range(0, n, _CHUNK):
        stop = min(n, start + _CHUNK)
        weight = scratch[: stop - start]
        mask = None if ties is None else ties[start // 8 : residual.tie_bytes(stop)]
        residual.split(master[start:stop], weight, kept[start:stop], mask, mode)
        weights[start:stop] = weight
    codes.copy_(kept)


def _to_whole(master: Tensor, ties: Tensor | None, mode: residual.Mode) -> None:
    n = master.numel()
    weights, codes = _rows(master)
    kept = codes.clone()
    # Downwards: what is written lies above everything that is still to be read.
    for start in reversed(range(0, n, _CHUNK)):
        stop = min(n, start + _CHUNK)
        mask = None if ties is None else ties[start // 8 : residual.tie_bytes(stop)]
        weight = weights[start:stop].clone()
        residual.merge(weight, kept[start:stop], mask, master[start:stop], mode)


def _demand_own_storage(master: Tensor, number: int) -> None:
    where = f"tensor {number} of SharedMasters"
    if master.dtype is not torch.float32:
        raise _refused("float32", str(master.dtype).removeprefix("torch."), where)
    if not master.is_contiguous():
        raise _refused("a contiguous tensor", f"strides {master.stride()}", where)
    if master.storage_offset() or master.untyped_storage().nbytes() != 4 * master.numel():
        raise _refused("a tensor with a storage of its own", "a part of a larger one", where)
    if not master.is_leaf:
        raise _refused("a leaf", "the result of a computation with gradients", where)


def _refused(expected: str, got: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "these bytes cannot change their form in place",
            expected=expected,
            got=got,
            where=where,
            remedy="Pass tensor.detach().clone().contiguous(), or use lowtide.reuse_fp32_param.",
        )
    )
