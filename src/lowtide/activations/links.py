"""Links between the layers of a chunk: an output that one tape can make again stands for the next layer's input.

Of the layers of a *chunk* only the first one's input is kept. Each is a region
with a tape of its own. When one ends, it *offers* its outputs; a later layer of
the chunk that reads such a tensor, unchanged, keeps a handle on the offering
tape in place of the tensor. Law: an offer belongs to its tape, hence to its
graph, and is found by the identity of the storage and its version; whatever
does not match is kept as every input is, and counted with its reason.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lowtide import _torch, device
from lowtide.activations.certify import checksum
from lowtide.storage import PLAIN_TYPES, whole

if TYPE_CHECKING:
    from lowtide.activations.tape import Tape
    from lowtide.activations.values import Value
    from lowtide.report.counters import RegionRow

__all__ = [
    "SHARDED",
    "TOO_DEAR",
    "Chunk",
    "Missed",
    "Offer",
    "Place",
    "count_missed",
    "find_offer",
    "main_input",
    "note_write",
    "plain_parts",
    "tensors_of",
]

Tensor = torch.Tensor

_COMPARED_PASSES = 2

NOT_OUTPUT = "its input is not the very output of an earlier layer of its chunk, or only of one without gradients"
WRITTEN = "its input was written to after an earlier layer of its chunk had made it"
UNSEEN = "its input was written to, unseen by any version, after an earlier layer of its chunk had made it"
GONE = "its input is a part of a tensor subclass that is gone, so a write to that cannot be ruled out"
ELSEWHERE = "its input was made by an earlier layer of its chunk on another stream"
TOO_DEAR = "more bytes would have to be kept for that than it has"
CANNOT_MAKE = "an earlier layer of its chunk cannot make its output again"
SHARDED = (
    "A sharded layer's parameters are there in its own backward only, and a chunk computes all of its layers in that "
    "of the last one: use fully_shard(..., reshard_after_forward=False), or full_recompute_num_layers=1."
)
_REMEDY = "Pass a layer's output on as it is, or use chunks of one layer (full_recompute_num_layers=1)."


class Chunk:
    """Layers of which only the first one's input is kept.

    What is written between two layers without moving a version (by a collective, through ``.data``) stands in the
    model's code and happens in every step: so in the first passes the bytes themselves are compared, and in all of them
    once such a write was found.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._latest = -1
        self._suspect = False

    def begin_pass(self, index: int) -> None:
        """A layer offers something: it begins a pass unless it is behind the latest. The first may offer nothing."""
        if index <= self._latest or self._latest < 0:
            self._passes += 1
        self._latest = index

    def suspect(self) -> None:
        """A write was found that no version tells of."""
        self._suspect = True

    @property
    def compares(self) -> bool:
        """Whether bytes are compared in this pass. Costs one pass over each output, and the host waits for it."""
        return self._suspect or self._passes <= _COMPARED_PASSES


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

    __slots__ = (
        "__weakref__",
        "_pin",
        "_stream",
        "_subclasses",
        "_sum",
        "_written",
        "place",
        "tape",
        "value",
        "version",
        "why_not",
    )

    def __init__(
        self,
        tape: Tape,
        place: Place,
        tensor: Tensor,
        value: Value,
        why_not: str | None,
        *,
        subclasses: tuple[Tensor, ...],
    ) -> None:
        self.tape = weakref.ref(tape)
        self.place = place
        self.value = value
        self.version = tensor._version
        self.why_not = why_not
        # A write through a subclass (DTensor) moves the version of that, and not of the part that is written.
        self._subclasses = tuple((weakref.ref(one), one._version) for one in subclasses)
        self._written = False
        self._stream = _stream_of(tensor)
        compares = place.chunk.compares and why_not is None and not device.capturing(tensor.device)
        self._sum = checksum(whole(tensor)) if compares else None
        # Nobody else gets the address as long as we are asked for by it; the bytes are free to go.
        self._pin = _torch.take_weak_storage(tensor.untyped_storage())
        _offers[self._pin] = self

    def note_write(self) -> None:
        """What stands in the storage now is another value, whatever its version says."""
        self._written = True

    def why_not_read(self, tensor: Tensor) -> str | None:
        """Why ``tensor``, which looks at the offered storage, may not show what was offered, or not be read here."""
        if self._written or tensor._version != self.version:
            return WRITTEN
        for reference, version in self._subclasses:
            one = reference()
            if one is None:
                return GONE
            if one._version != version:
                return WRITTEN
        if _stream_of(tensor) != self._stream:
            return ELSEWHERE  # its backward would make there what the layer before frees here
        if self._sum is not None and not torch.equal(self._sum, checksum(whole(tensor))):
            self.place.chunk.suspect()
            return UNSEEN
        return None

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        _torch.free_weak_storage(self._pin)


def _stream_of(tensor: Tensor) -> Any:
    return device.current_stream(tensor.device) if device.is_accelerator(tensor.device) else None


# By the storage's address. Weak: an offer belongs to its tape.
_offers: weakref.WeakValueDictionary[int, Offer] = weakref.WeakValueDictionary()


def find_offer(tensor: Tensor, place: Place) -> tuple[Offer | None, str]:
    """The offer that a tensor stands for where a layer at ``place`` reads it, or None and why there is none."""
    offer = _offers.get(_torch.storage_key(tensor))
    if offer is None or not place.is_after(offer.place):
        return None, NOT_OUTPUT
    why_not = offer.why_not_read(tensor)
    if why_not is not None:
        return None, why_not
    if offer.why_not is not None:
        return None, f"{CANNOT_MAKE}: {offer.why_not}"
    return offer, ""


def note_write(tensor: Tensor) -> None:
    """A region sees a write to a storage. Not every write moves a version: ``.data`` and collectives do not."""
    offer = _offers.get(_torch.storage_key(tensor))
    if offer is not None:
        offer.note_write()


def tensors_of(out: Any) -> Iterator[Tensor]:
    """Every tensor of an output: in containers, and in dataclasses, which torch's trees do not open."""
    waiting, seen = [out], set[int]()
    while waiting:
        for leaf in tree_leaves(waiting.pop(0)):
            if isinstance(leaf, Tensor):
                yield leaf
            elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
                seen.add(id(leaf))  # one may lead back to itself
                # A field may have no value yet.
                fields = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
                waiting.append(fields)


def plain_parts(tensor: Any, around: tuple[Tensor, ...] = ()) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """The strided tensors whose bytes a tensor consists of, each with the subclasses ``around`` it."""
    if type(tensor) in PLAIN_TYPES:
        if tensor.layout is torch.strided:
            yield tensor, around
    elif _torch.is_traceable_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name), (*around, tensor))


def main_input(inputs: Any) -> frozenset[int]:
    """The storages behind the first argument of a layer that has a gradient."""
    for tensor in tensors_of(inputs):
        if tensor.requires_grad:
            return frozenset(_torch.storage_key(part) for part, _ in plain_parts(tensor))
    return frozenset()


@dataclasses.dataclass
class Missed:
    """An input that a layer behind the first of its chunk keeps after all."""

    value: Value
    reason: str
    requires_grad: bool
    main: bool  # it is what the layer works on: its first argument with a gradient


def count_missed(missed: list[Missed], row: RegionRow, *, linked: bool) -> None:
    """Count what should not have been kept, with its reason.

    What every layer is given besides (masks, positions) is no output of any: it is counted only where it is what
    the layer works on, or where the layer found nothing else to stand on; then what has a gradient is meant.
    """
    kept = [one for one in missed if one.value.held is not None]
    others = [one for one in kept if one.reason == NOT_OUTPUT]
    if linked:
        others = [one for one in others if one.main]
    elif any(one.requires_grad for one in others):
        others = [one for one in others if one.requires_grad]
    for one in [one for one in kept if one.reason != NOT_OUTPUT] + others:
        assert one.value.held is not None
        row.refuse(one.reason, one.value.held.untyped_storage().nbytes(), _REMEDY)
