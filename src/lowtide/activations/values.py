"""The words of the tape: values, nodes, references and handles. Data only.

A *value* is the contents of one storage between two writes (storage, version).
A *node* is one recorded operator call. A *reference* says how an argument looks
at a value: the value itself where it looks as the value's base does, else a
pair (value, layout). A *handle* is all that autograd holds of a saved tensor.

Law: a value does not point at its node, a node not at a handle, so that a tape
dies by reference counting with its graph.
"""

from __future__ import annotations

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
    """The contents of one storage between two writes."""

    __slots__ = (
        "answer",
        "base_layout",
        "cache",
        "cache_version",
        "foreign",
        "handed_out",
        "held",
        "node",
        "opaque",
        "pending",
        "poison",
        "record",
        "swap",
        "uninitialised",
        "uses",
        "version",
    )

    def __init__(self, node: int) -> None:
        self.node = node  # index of the node that makes it, or LEAF
        self.held: torch.Tensor | None = None  # the tensor that keeps its bytes on the device
        self.version = 0  # of `held`, when it was held
        self.base_layout: Layout | None = None  # how `held` (or the replayed result) looks at the storage
        self.swap: SwapTensor | None = None  # its copy on the lower tier
        self.cache: torch.Tensor | None = None  # replayed during this backward
        self.cache_version = 0
        self.handed_out = False  # autograd has seen `cache`: its buffer must not be reused
        self.uses = 0  # reads planned by nodes that have not run
        self.pending = 0  # handles that autograd has not unpacked
        self.answer: CheckpointPolicy | None = None  # what a policy said; follows in-place writes (R18)
        self.foreign = False  # existed before the region
        self.opaque: str | None = None  # why its producer cannot be replayed
        self.uninitialised = False  # fresh from an empty*() (R3)
        self.poison: str | None = None  # why it can never be given out
        self.record: StorageRecord | None = None  # only while the region runs


class StorageRecord:
    """What the tape knows of one storage while its region runs."""

    __slots__ = ("body", "holders", "value", "version")

    def __init__(self, value: Value, version: int | None, body: Any) -> None:
        self.value = value  # its current contents
        self.version = version  # expected `_version`, or None once it has two counters
        self.holders: list[Value] | None = None  # every value held by reference to it (R7)
        self.body = body  # the Function call that allocated it


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
    """One recorded operator call."""

    __slots__ = ("args", "inputs", "kwargs", "lists", "operator", "outputs", "positions", "random", "writes")

    def __init__(self) -> None:
        self.operator: Any = None
        self.args: list[Any] = []
        self.positions: tuple[int, ...] = ()  # where args holds references
        self.lists: tuple[int, ...] = ()  # where args holds lists with references
        self.kwargs: dict[str, Any] | None = None
        self.inputs: list[Value] = []
        self.outputs: list[tuple[int, Value]] = []  # (index of the output, value)
        self.writes: list[Write] | None = None
        self.random: tuple[torch.Generator, torch.Tensor] | None = None


class FunctionNode:
    """One ``autograd.Function.apply`` call, replayed by calling its forward with a stub context (R17)."""

    __slots__ = ("args", "autocast", "function", "generators", "inputs", "needs_grad", "outputs", "saved_count")

    def __init__(self) -> None:
        self.function: Any = None
        self.args: list[Any] = []
        self.inputs: list[Value] = []
        self.outputs: list[tuple[int, Value]] = []  # k >= 0: output k; k < 0: saved tensor number -1 - k
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.autocast: list[tuple[str, bool, torch.dtype]] = []
        self.needs_grad: tuple[bool, ...] = ()
        self.saved_count = 0


class Handle:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "checksum", "done", "layout", "tape", "value")

    def __init__(self, tape: Tape, value: Value, layout: Layout) -> None:
        self.tape = tape
        self.value = value
        self.layout = layout
        self.done = False
        self.checksum: Any = None

    def __del__(self) -> None:
        # A branch of the graph that never ran backward: its value may go.
        if not self.done:
            self.tape.forget(self.value)
