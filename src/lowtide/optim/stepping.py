"""The arithmetic of one segment: masters and state in, one update by the optimizer's class, parameters and state out.

Law: a piece without a gradient in this step is not touched. What the class makes
of a piece's state is kept under its own names, whether it lies in the segment or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.optim.layout import Piece
from lowtide.optim.parameter import SteppedParameter
from lowtide.optim.segment import IN_SEGMENT, HeldSegment
from lowtide.optim.tensors import Scratch
from lowtide.optim.worker import Share, Worker

__all__ = ["update_segment"]

Tensor = torch.Tensor


@dataclass
class _Stepped:
    """One piece while it is stepped."""

    number: int
    piece: Piece
    owner: SteppedParameter
    weight: Tensor
    target: Tensor  # a row
    rows: dict[str, Tensor]
    share: Share


def update_segment(segment: HeldSegment, worker: Worker, grads: Mapping[int, Tensor], scratch: Scratch) -> None:
    """Step every piece of a segment, which is on the device, whose parameter has an entry in ``grads`` (by id)."""
    scratch.begin()
    stepped = [
        _prepare(segment, number, piece, grads[id(segment.owners[number])], scratch)
        for number, piece in segment.numbered()
        if id(segment.owners[number]) in grads
    ]
    worker.update([one.share for one in stepped])
    for one in stepped:
        _keep(segment, one, scratch)


def _prepare(segment: HeldSegment, number: int, piece: Piece, grad: Tensor, scratch: Scratch) -> _Stepped:
    owner = segment.owners[number]
    rows = {entry.array.name: segment.view(entry) for entry in piece.entries}
    weight = owner.weight(piece)
    target = owner.masters.target(weight, rows, made=segment.masters[number], scratch=scratch)
    grad_row = owner.row_of(grad, piece)
    if grad_row.dtype != target.dtype:
        grad_row = scratch.row(grad_row.numel(), target.dtype, target.device).copy_(grad_row)
    state = dict(segment.states[number] or {})
    for entry in piece.entries:
        if state.get(entry.array.name) is IN_SEGMENT:
            state[entry.array.name] = owner.array(rows[entry.array.name], entry.array)
    # A detached view: what the class steps is a leaf of its own over the same memory.
    shaped = owner.shaped(target).detach()
    share = Share(owner.group, shaped, owner.shaped(grad_row), state)
    return _Stepped(number, piece, owner, weight, target, rows, share)


def _keep(segment: HeldSegment, one: _Stepped, scratch: Scratch) -> None:
    """Put what the class made into its places: arrays into the segment, the master into the parameter and its rest."""
    state: dict[str, Any] = {}
    entries = {entry.array.name: entry for entry in one.piece.entries}
    for name, value in one.share.state.items():
        entry = entries.get(name)
        if entry is None or not isinstance(value, Tensor):
            # A class may keep the very gradient that it was given.
            state[name] = value.clone() if isinstance(value, Tensor) and scratch.owns(value) else value
            continue
        home = one.owner.array(one.rows[name], entry.array)
        if value.shape != home.shape or value.dtype != home.dtype:
            state[name] = value  # another array under a known name: it stays as it is
            continue
        if value.data_ptr() != home.data_ptr():
            home.copy_(value)
        state[name] = IN_SEGMENT
    segment.states[one.number] = state
    one.owner.masters.finish(one.target, one.weight, one.rows)
    if not one.owner.dense:
        one.owner.write(one.weight)
    segment.masters[one.number] = True
