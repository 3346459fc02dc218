"""Links between the layers of a chunk: an output that one tape can make again stands for the next layer's input.

Of the layers of a *chunk* only the first one's input is kept. Each is a region
with a tape of its own. When one ends, it *offers* its outputs; a later layer of
the chunk that reads such a tensor, unchanged, keeps a handle on the offering
tape in place of the tensor. Law: an offer belongs to its tape, hence to its
graph, and is found by the identity of the storage and its version; whatever
does not match is kept as every input is, and counted with its reason. Data and
look-ups only: nothing here runs an operator.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lowtide import _torch
from lowtide.storage import PLAIN_TYPES

if TYPE_CHECKING:
    from lowtide.activations.tape import Tape
    from lowtide.activations.values import Value
    from lowtide.report.counters import RegionRow

__all__ = ["SHARDED", "Chunk", "Missed", "Offer", "Place", "count_missed", "find_offer", "plain_parts", "tensors_of"]

Tensor = torch.Tensor

NOT_OUTPUT = "its input is not the very output of an earlier layer of its chunk"
WRITTEN = "its input was written to after an earlier layer of its chunk had made it"
CANNOT_MAKE = "an earlier layer of its chunk cannot make its output again"
SHARDED = (
    "A sharded layer's parameters are there in its own backward only, and a chunk computes all of its layers in that "
    "of the last one: use fully_shard(..., reshard_after_forward=False), or full_recompute_num_layers=1."
)
_REMEDY = "Pass a layer's output on as it is, or use chunks of one layer (full_recompute_num_layers=1)."


class Chunk:
    """Layers of which only the first one's input is kept. Its identity is all that it has."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands in its chunk."""

    chunk: Chunk
    index: int
    count: int

    @property
    def offers(self) -> bool:
        """Whether a layer of the chunk comes after it."""
        return self.index + 1 < self.count

    def is_after(self, other: Place) -> bool:
        """Whether it may stand on what the other makes: so a chain of links is never longer than the chunk."""
        return self.chunk is other.chunk and self.index > other.index


class Offer:
    """One output of a layer, as its tape can make it again; ``why_not`` says why it cannot."""

    __slots__ = ("__weakref__", "_pin", "place", "tape", "value", "version", "why_not")

    def __init__(self, tape: Tape, place: Place, tensor: Tensor, value: Value, why_not: str | None) -> None:
        self.tape = weakref.ref(tape)
        self.place = place
        self.value = value
        self.version = tensor._version
        self.why_not = why_not
        # Nobody else gets the address as long as we are asked for by it; the bytes are free to go.
        self._pin = _torch.take_weak_storage(tensor.untyped_storage())
        _offers[self._pin] = self

    def __del__(self) -> None:
        _torch.free_weak_storage(self._pin)


# By the storage's address. Weak: an offer belongs to its tape.
_offers: weakref.WeakValueDictionary[int, Offer] = weakref.WeakValueDictionary()


def find_offer(tensor: Tensor, place: Place) -> tuple[Offer | None, str]:
    """The offer that a tensor stands for where a layer at ``place`` reads it, or None and why there is none."""
    offer = _offers.get(_torch.storage_key(tensor))
    if offer is None or not place.is_after(offer.place):
        return None, NOT_OUTPUT
    if tensor._version != offer.version:
        return None, WRITTEN
    if offer.why_not is not None:
        return None, f"{CANNOT_MAKE}: {offer.why_not}"
    return offer, ""


def tensors_of(out: Any) -> Iterator[Tensor]:
    """Every tensor of an output: in containers, and in dataclasses, which torch's trees do not open."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_of(getattr(leaf, field.name))


def plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The strided tensors whose bytes a tensor consists of: itself, or the parts of a subclass."""
    if type(tensor) in PLAIN_TYPES:
        if tensor.layout is torch.strided:
            yield tensor
    elif _torch.is_traceable_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))


@dataclasses.dataclass
class Missed:
    """An input that a layer behind the first of its chunk keeps after all."""

    value: Value
    reason: str
    requires_grad: bool


def count_missed(missed: list[Missed], row: RegionRow, *, linked: bool) -> None:
    """Count what should not have been kept, with its reason.

    What every layer is given besides (masks, positions) is no output of any: it is counted only where a layer
    found nothing else to stand on, and then what has a gradient is meant.
    """
    kept = [one for one in missed if one.value.held is not None]
    others = [one for one in kept if one.reason == NOT_OUTPUT]
    if linked:
        others = []
    elif any(one.requires_grad for one in others):
        others = [one for one in others if one.requires_grad]
    for one in [one for one in kept if one.reason != NOT_OUTPUT] + others:
        assert one.value.held is not None
        row.refuse(one.reason, one.value.held.untyped_storage().nbytes(), _REMEDY)
