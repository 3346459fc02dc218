"""An optimizer's state out of its segments and into them, in full, in host memory: checkpoints, copies, taking over.

Law: one segment at a time; the device never holds more than it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lowtide._torch import like_sharded
from lowtide.optim.masters import MASTER
from lowtide.optim.parameter import SteppedParameter
from lowtide.optim.segment import IN_SEGMENT, HeldSegment, row_in
from lowtide.optim.tensors import is_sharded
from lowtide.optim.wrapper import counts_on_device

__all__ = ["Place", "export_states", "import_states", "kept_bytes"]

Tensor = torch.Tensor
# Where a piece of a parameter lies.
Place = tuple[HeldSegment, int]


def export_states(
    parameters: Sequence[tuple[SteppedParameter, Sequence[Place]]],
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The state of each parameter as the plain optimizer's: arrays with its shape and strides, in host memory.

    With a master, its float32 value is ``state["master_param"]``. A segment of several parameters is read once, and its
    bytes are held from the first to the last of those that were asked for.
    """
    due = Counter(id(segment) for _, places in parameters for segment, _ in places)
    read: dict[int, Tensor] = {}
    for parameter, places in parameters:
        parts = []
        for segment, number in places:
            if id(segment) not in read:
                read[id(segment)] = segment.read()
            parts.append(_piece(segment, number, read[id(segment)]))
            due[id(segment)] -= 1
            if not due[id(segment)]:
                del read[id(segment)]
        yield parameter.parameter, {name: _whole(parameter, name, [p[name] for p in parts]) for name in parts[0]}


def _whole(parameter: SteppedParameter, name: str, values: list[Any]) -> Any:
    """One entry of all pieces, in full. What is the same for all pieces is the first one's."""
    if not parameter.is_array(name, values[0]):
        return values[0].detach().clone() if isinstance(values[0], Tensor) else values[0]
    value = parameter.whole(name, [row.detach().to("cpu") for row in values])
    return like_sharded(value, parameter.parameter) if is_sharded(parameter.parameter) else value


def _piece(segment: HeldSegment, number: int, flat: Tensor) -> dict[str, Any]:
    piece, owner, state = segment.plan.pieces[number], segment.owners[number], segment.states[number]
    assert state is not None
    rows = {entry.array.name: row_in(flat, entry) for entry in piece.entries}
    found = {name: rows[name] if value is IN_SEGMENT else value for name, value in state.items()}
    master = owner.masters.export(owner.weight(piece).to("cpu"), rows) if segment.masters[number] else None
    if master is not None:
        found[MASTER] = master
    return found


def import_states(
    segments: Iterable[HeldSegment], states: Mapping[Tensor, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Replace the state of every piece by what ``states`` says of its parameter, which may be nothing.

    Each segment is put together in host memory and moved as it is.
    """
    for segment in segments:
        flat = torch.zeros(segment.nbytes, dtype=torch.uint8, device="cpu")
        given = [
            _fill(segment, number, states.get(owner.parameter), flat, groups[owner.group])
            for number, owner in enumerate(segment.owners)
        ]
        if not any(given):
            segment.forget()
        elif segment.nbytes:
            segment.write(flat)


def _fill(
    segment: HeldSegment, number: int, state: Mapping[str, Any] | None, flat: Tensor, group: Mapping[str, Any]
) -> bool:
    """Write one piece's state into the bytes of its segment; whether there was any."""
    piece, owner = segment.plan.pieces[number], segment.owners[number]
    segment.masters[number] = False
    segment.states[number] = None
    if not state:
        return False
    rows = {entry.array.name: row_in(flat, entry) for entry in piece.entries}
    kept: dict[str, Any] = {}
    on_device = counts_on_device(group)
    for name, value in state.items():
        if name == MASTER:
            continue
        taken = owner.piece_of(name, value, piece, counts_on_device=on_device)
        if name in rows:
            rows[name].copy_(taken)
            kept[name] = IN_SEGMENT
        else:
            kept[name] = taken
    master = state.get(MASTER)
    if master is not None and owner.masters.arrays:
        row = owner.piece_of(MASTER, master, piece, counts_on_device=on_device)
        owner.masters.take(row.to("cpu", torch.float32), rows)
        segment.masters[number] = True
    segment.states[number] = kept
    return True


def kept_bytes(segments: Iterable[HeldSegment]) -> int:
    """Bytes of state that does not lie in a segment."""
    return sum(
        value.numel() * value.element_size()
        for segment in segments
        for state in segment.states
        for value in (state or {}).values()
        if isinstance(value, Tensor)
    )
