"""Float32 masters and their bfloat16 weights in one storage, one form at a time: the documents' own layout (P1).

Law: four bytes an element, whatever the form. As float32 the bytes are the master; as bfloat16 the first half is the
weights, in a row, and the second half what rounding left over. A change of form is exact, happens in place with a
scratch that does not depend on the tensor's size, and asks the device for no number.

[Note: in place]
    A block of elements changes its form by itself, into its weights and then its codes. That leaves the halves of all
    blocks in turn, weights and codes, where all weights are to come before all codes: a permutation of equal pieces,
    which is followed cycle by cycle with one piece put aside. The rest behind the last whole block waits in a scratch
    of its own, and the codes make room for its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

import torch
from torch.autograd.graph import increment_version

from lowtide.errors import StateError, UnsupportedError, explain
from lowtide.optim import residual
from lowtide.storage import PLAIN_TYPES, Layout, over

__all__ = ["SharedMasters"]

Tensor = torch.Tensor
_Form = Literal["fp32", "bf16"]

# Elements of a block; a multiple of eight, so that the mask of ties is cut between bytes. Large enough that a few dozen
# operators for each block, or launches, do not count.
_BLOCK_CPU = 1 << 19
_BLOCK_DEVICE = 1 << 20


class SharedMasters:
    """Float32 tensors that become bfloat16 weights and back, in their own storage (P1).

    For an optimizer that insists on resident float32 tensors: call :meth:`to_fp32` before its step and :meth:`to_bf16`
    before forward. Cost: three passes over the bytes each way, a scratch of about 13 MiB (5 MiB on the CPU) whatever
    the size, and in mode ``exact`` one bit an element that stays.

    Hazard: the tensors of the form that is *not* current show the other's bytes; read and write those of the last call
    only. Autograd notices: a graph that saved weights cannot go backward once they are masters again.

    Args:
        masters: float32 tensors, contiguous, each alone in its storage. They are the float32 form, the objects
            themselves, and the current one.
        mode: see :mod:`lowtide.optim.residual`.

    Raises:
        UnsupportedError: a tensor has another type, is not contiguous, shares its storage or is no leaf; an unknown
            mode.

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
        if mode not in get_args(residual.Mode):
            raise _refused(f"a mode of {get_args(residual.Mode)}", repr(mode), "SharedMasters")
        for number, master in enumerate(self._masters):
            _demand_own_storage(master, number)
        held = [m.untyped_storage().data_ptr() for m in self._masters if m.numel()]
        if len(set(held)) != len(held):
            raise _refused("tensors with a storage each", "two that share one", "SharedMasters")
        self._weights = [_half_of(master) for master in self._masters]
        self._ties = [
            torch.zeros(residual.tie_bytes(m.numel()), dtype=torch.uint8, device=m.device) if mode == "exact" else None
            for m in self._masters
        ]
        # None while bytes move: a change of form that was interrupted leaves neither.
        self._form: _Form | None = "fp32"

    def to_bf16(self) -> list[Tensor]:
        """The weights: the masters' casts. Harmless when they are current already.

        Raises:
            StateError: an earlier change of form was interrupted; the bytes are neither form.
        """
        self._become("bf16", _to_halves)
        return list(self._weights)

    def to_fp32(self) -> list[Tensor]:
        """The masters, with the weights' changes if they were written. Harmless when they are current already.

        Raises:
            StateError: an earlier change of form was interrupted; the bytes are neither form.
        """
        self._become("fp32", _to_whole)
        return list(self._masters)

    @torch.no_grad()
    def _become(self, form: _Form, change: Callable[[Tensor, Tensor | None, residual.Mode], None]) -> None:
        if self._form == form:
            return
        if self._form is None:
            raise StateError(
                explain(
                    "a change of form was interrupted",
                    expected="masters or weights",
                    got="bytes that are neither",
                    where="SharedMasters",
                    remedy="Write the masters again, from a checkpoint, and make new SharedMasters of them.",
                )
            )
        self._form = None
        for master, ties in zip(self._masters, self._ties, strict=True):
            if master.numel():
                change(master.detach().view(-1), ties, self._mode)
        # Writes to the masters' bytes are known to autograd. That they are the weights' bytes too, it cannot know.
        increment_version(self._weights)
        self._form = form


def _half_of(master: Tensor) -> Tensor:
    """A bfloat16 tensor of the master's shape over the first half of its storage."""
    return over(master.untyped_storage(), Layout(master.size(), master.stride(), 0, torch.bfloat16, None))


class _Row:
    """One master's bytes, seen as whole blocks and a rest, with the scratch for a change of form."""

    def __init__(self, master: Tensor, ties: Tensor | None) -> None:
        n = master.numel()
        block = min(n, _BLOCK_CPU if master.device.type == "cpu" else _BLOCK_DEVICE)
        self.master = master
        self.ties = ties
        self.block = block
        self.blocks = n // block
        self.whole = self.blocks * block
        self.halves = master.view(torch.int16)
        # Both halves of one block, and of the rest.
        self.pair = torch.empty(2 * block, dtype=torch.int16, device=master.device)
        self.rest = torch.empty(2 * (n - self.whole), dtype=torch.int16, device=master.device)

    def parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Whole blocks of the master and their masks."""
        for start in range(0, self.whole, self.block):
            yield self.master[start : start + self.block], self.mask(start, start + self.block)

    def mask(self, start: int, stop: int) -> Tensor | None:
        return None if self.ties is None else self.ties[start // 8 : residual.tie_bytes(stop)]

    def shift_codes(self, *, up: bool) -> None:
        """Move the codes of all blocks by the rest's length, away from the weights or back."""
        by, piece = self.rest.numel() // 2, self.pair.numel()
        low, high = self.whole, 2 * self.whole
        starts = range(low, high, piece)
        for start in reversed(starts) if up else starts:
            stop = min(high, start + piece)
            here, there = self.halves[start:stop], self.halves[start + by : stop + by]
            source, target = (here, there) if up else (there, here)
            # The two overlap.
            target.copy_(self.pair[: stop - start].copy_(source))

    def permute(self, source_of: Callable[[int], int]) -> None:
        """Put into each place of half a block what ``source_of`` says, cycle by cycle."""
        places = self.halves[: 2 * self.whole].view(-1, self.block).unbind(0)
        aside = self.pair[: self.block]
        done = bytearray(len(places))
        for first in range(len(places)):
            if done[first] or source_of(first) == first:
                continue
            aside.copy_(places[first])
            place = first
            while (source := source_of(place)) != first:
                places[place].copy_(places[source])
                done[place] = True
                place = source
            places[place].copy_(aside)
            done[place] = True


def _to_halves(master: Tensor, ties: Tensor | None, mode: residual.Mode) -> None:
    row = _Row(master, ties)
    block, whole, blocks = row.block, row.whole, row.blocks
    for part, mask in row.parts():
        residual.split(part, row.pair[:block].view(torch.bfloat16), row.pair[block:], mask, mode)
        part.view(torch.int16).copy_(row.pair)
    behind = row.rest.numel() // 2
    if behind:
        weight, code = row.rest[:behind].view(torch.bfloat16), row.rest[behind:]
        residual.split(master[whole:], weight, code, row.mask(whole, master.numel()), mode)
    # See [Note: in place].
    row.permute(lambda place: 2 * place if place < blocks else 2 * (place - blocks) + 1)
    if behind:
        row.shift_codes(up=True)
        row.halves[whole : whole + behind] = row.rest[:behind]
        row.halves[2 * whole + behind :] = row.rest[behind:]


def _to_whole(master: Tensor, ties: Tensor | None, mode: residual.Mode) -> None:
    row = _Row(master, ties)
    block, whole, blocks = row.block, row.whole, row.blocks
    behind = row.rest.numel() // 2
    if behind:
        row.rest[:behind] = row.halves[whole : whole + behind]
        row.rest[behind:] = row.halves[2 * whole + behind :]
        row.shift_codes(up=False)
    row.permute(lambda place: place // 2 + (blocks if place % 2 else 0))
    if behind:
        weight, code = row.rest[:behind].view(torch.bfloat16), row.rest[behind:]
        residual.merge(weight, code, row.mask(whole, master.numel()), master[whole:], mode)
    for part, mask in row.parts():
        row.pair.copy_(part.view(torch.int16))
        residual.merge(row.pair[:block].view(torch.bfloat16), row.pair[block:], mask, part, mode)


def _demand_own_storage(master: Tensor, number: int) -> None:
    where = f"tensor {number} of SharedMasters"
    if type(master) not in PLAIN_TYPES:
        raise _refused("a plain tensor or a parameter", f"a {type(master).__name__}", where)
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
