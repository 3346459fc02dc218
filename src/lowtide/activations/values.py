"""The words of the tape: values, nodes, references and handles. Data only.

A *value* is the contents of one storage between two writes (storage, version).
A *node* is one recorded operator call. A *reference* says how an argument looks
at a value: the value itself where it looks as the value's base does, else a
pair (value, layout). A *handle* is all that autograd holds of a saved tensor.

Law: a value does not point at its node, a node not at a handle, so that a tape
dies by reference counting with its graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide.policy import CheckpointPolicy
from lowtide.storage import Layout

if TYPE_CHECKING:
    from lowtide.activations.tape import Tape
    from lowtide.residency.swap_tensor import SwapTensor

__all__ = ["LEAF", "FunctionNode", "Handle", "Node", "Reference", "StorageRecord", "Value", "Write"]

LEAF = -1


class Value:
    """The contents of one storage between two writes.

    Defaults live on the class: one of these is made per operator of the user's
    forward, and most of them never leave their defaults.
    """

    held: torch.Tensor | None = None  # the tensor that keeps its bytes on the device
    version = 0  # of `held`, when it was held
    base_layout: Layout | None = None  # how `held` (or the replayed result) looks at the storage
    swap: SwapTensor | None = None  # its copy on the lower tier
    link: Handle | None = None  # the value of an earlier tape that it is
    cache: torch.Tensor | None = None  # replayed during this backward
    cache_version = 0
    handed_out = False  # autograd has seen `cache`: its buffer must not be reused
    uses = 0  # reads planned by nodes that have not run in this backward
    pending = 0  # handles that autograd has not unpacked in this backward
    live = 0  # handles that autograd holds
    parameter = False  # it shows a parameter: never moved, never counted
    answer: CheckpointPolicy | None = None  # what a policy said; follows in-place writes (R18)
    foreign = False  # existed before the region
    opaque: str | None = None  # why its producer cannot be replayed
    poison: str | None = None  # why it can never be given out
    record: StorageRecord | None = None  # only while the region runs

    def __init__(self, node: int) -> None:
        self.node = node  # index of the node that makes it, or LEAF


class StorageRecord:
    """What the tape knows of one storage while its region runs."""

    holders: list[Value] | None = None  # every value held by reference to it (R7)
    body: Any = None  # the Function call that allocated it

    def __init__(self, value: Value, version: int | None) -> None:
        self.value = value  # its current contents
        self.version = version  # expected `_version`, or None once it has two counters


Reference = Value | tuple[Value, Layout]


class Write:
    """One tensor that a recorded call overwrites."""

    __slots__ = ("device", "full", "layout", "new", "old")

    def __init__(self, layout: Layout, old: Value, new: Value, device: torch.device, *, full: bool) -> None:
        self.layout = layout  # of the tensor it is written through
        self.old = old  # the contents before; not read where `full`
        self.new = new
        self.device = device
        self.full = full


class Node:
    """One recorded operator call; defaults live on the class, as in :class:`Value`."""

    positions: tuple[int, ...] = ()  # where args holds references
    lists: tuple[int, ...] = ()  # where args holds lists with references
    kwargs: dict[str, Any] | None = None
    writes: list[Write] | None = None
    random: tuple[torch.Generator, torch.Tensor] | None = None

    def __init__(self, operator: Any, args: list[Any]) -> None:
        self.operator = operator
        self.args = args
        self.inputs: list[Value] = []
        self.outputs: list[tuple[int, Value]] = []  # (index of the output, value)


class FunctionNode:
    """One ``autograd.Function.apply`` call, replayed by calling its forward with a stub context (R17)."""

    __slots__ = (
        "args",
        "autocast",
        "default_device",
        "function",
        "generators",
        "inputs",
        "needs_grad",
        "outputs",
        "saved_count",
    )

    def __init__(self) -> None:
        self.function: Any = None
        self.args: list[Any] = []
        self.inputs: list[Value] = []
        self.outputs: list[tuple[int, Value]] = []  # k >= 0: output k; k < 0: saved tensor number -1 - k
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.autocast: list[tuple[str, bool, torch.dtype]] = []
        self.default_device = torch.get_default_device()
        self.needs_grad: tuple[bool, ...] = ()
        self.saved_count = 0


class Handle:
    """What autograd holds in place of a saved tensor."""

    epoch = -1  # the backward (by number) that unpacked it last
    checksum: Any = None  # taken at pack, where the region certifies

    def __init__(self, tape: Tape, value: Value, layout: Layout) -> None:
        self.tape = tape
        self.value = value
        self.layout = layout

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        self.tape.forget(self)
