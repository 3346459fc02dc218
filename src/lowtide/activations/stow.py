"""From values to swap tensors: what may move, what may not and why, and the bytes of every fate.

Law: whatever was asked to move and does not is counted with its reason.
Launches no copy: that is the schedule's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide import _torch
from lowtide.activations.certify import checksum
from lowtide.activations.tape import Tape
from lowtide.activations.values import LEAF, Value
from lowtide.policy import CheckpointPolicy, Fate, fate_of
from lowtide.report.counters import RegionRow
from lowtide.residency.eligibility import why_not_move
from lowtide.residency.group import Storage
from lowtide.residency.manager import SwapManager
from lowtide.storage import PLAIN_TYPES

__all__ = ["account", "stow"]


def _wants_to_move(value: Value) -> bool:
    answer = value.answer
    if answer is None or value.parameter or value.held is None or value.swap is not None:
        return False
    return fate_of(answer) is Fate.SWAP


def stow(tape: Tape, row: RegionRow, needed: Iterable[Value] | None) -> Storage | None:
    """Hand what was asked to move to the residency; None if nothing may.

    ``needed`` is given at the region's end; before it, everything that autograd
    holds so far is taken (only on tapes that do not record).
    """
    values = tape.holding if needed is None else needed
    wanting = [value for value in values if value.answer is not None and _wants_to_move(value)]
    tape.unlaunched_bytes = 0
    if not wanting:
        return None
    manager = SwapManager()
    storage = Storage(tape.name)
    buffers = _buffers(tape, manager)
    for value in wanting:
        held = value.held
        assert held is not None
        nbytes = held.untyped_storage().nbytes()
        why_not = _BUFFER if _torch.storage_key(held) in buffers else why_not_move(held, nbytes, manager)
        if why_not is not None:
            row.refuse(why_not[0], nbytes, why_not[1])
            value.answer = CheckpointPolicy.PREFER_SAVE
            continue
        if held._version != value.version:
            continue  # poisoned at the end of the region, or a plain error of the user's: never copied
        value.swap = manager.adopt(held, tape.name)
        value.swap.must |= value.answer is CheckpointPolicy.MUST_SWAP
        if tape.certify and not tape.recording:
            # Nothing is replayed here: what is proved is that the bytes come back as they left.
            value.swap.certify(checksum)
        value.held = None
        row.kept_bytes += nbytes  # until its copy is launched
        storage.swap(value.swap)
    return storage


_BUFFER = ("buffers never move", "Nothing to do: they stay with their module.")


def _buffers(tape: Tape, manager: SwapManager) -> set[int]:
    """Storages of the buffers of the wrapped module and of the models whose order is learned."""
    module = tape.module() if tape.module is not None else None
    found = set(manager.learned_buffers)
    if module is not None:
        found.update(_torch.storage_key(b) for b in module.buffers() if type(b) in PLAIN_TYPES)
    return found


def account(row: RegionRow, needed: Iterable[Value], dead: list[Value]) -> None:
    """Count the bytes of every fate at the end of a region."""
    row.dead_bytes += sum(value.base_layout.nbytes for value in dead if value.base_layout is not None)
    for value in needed:
        if value.parameter:
            continue
        held = value.held
        if held is not None:
            _account_held(row, value, held)
        elif value.swap is None and (value.link is not None or (value.node != LEAF and value.pending > 0)):
            assert value.base_layout is not None
            row.recomputed_bytes += value.base_layout.nbytes


def _account_held(row: RegionRow, value: Value, held: torch.Tensor) -> None:
    nbytes = held.untyped_storage().nbytes()
    row.kept_bytes += nbytes
    if value.node == LEAF and value.opaque is not None:
        row.refuse(value.opaque, nbytes, _opaque_remedy(value.opaque))
        if runs_again_helps(value.opaque):
            row.opaque_bytes += nbytes


def runs_again_helps(reason: str) -> bool:
    """Whether running the module again would spare what is kept for this reason."""
    return reason.startswith(("autograd.Function", "opaque operator"))


def _opaque_remedy(reason: str) -> str:
    if reason.startswith("autograd.Function") and "not declared" in reason:
        return "Declare it with lowtide.pure if it is, or wrap with recompute='call'."
    if runs_again_helps(reason):
        return "Wrap with recompute='call' to run the module again instead of keeping it."
    return "Nothing to do: keeping it is what makes the result right."
