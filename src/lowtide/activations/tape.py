"""One tape: what a region's forward knows of its values, and what survives its end.

Law: a value's bytes are held, lie on the lower tier, or can be made again from
values that are; what autograd does not need is dropped at the region's end.
The rules R1-R18 are those of ``ARCHITECTURE.md``. Runs no operator of the
user's (see ``recorder``) and replays none (see ``replay``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch, device
from lowtide.activations.links import NOT_OUTPUT, SHARDED, TOO_DEAR, Missed, Offer, Place, find_offer
from lowtide.activations.values import LEAF, FunctionNode, Handle, Node, StorageRecord, Value
from lowtide.errors import ModifiedError, UnsupportedError, explain
from lowtide.policy import Fate, fate_of, stronger
from lowtide.storage import PLAIN_TYPES, Layout, demand_bytes, is_parameter, layout_of, over, whole

if TYPE_CHECKING:
    from lowtide.activations.answers import Answers
    from lowtide.activations.function_node import Body
    from lowtide.residency.group import Storage
    from lowtide.residency.manager import Visit

__all__ = ["Packed", "Tape"]

Tensor = torch.Tensor

# Copy-on-write of an external tensor that a region reads and then overwrites (R7).
_COPY_LIMIT = 64 << 20

_READS_MORE = (
    "A layer of a chunk also reads what makes its output, which its own backward may not need: "
    "full_recompute_num_layers=1 spares that."
)


class Packed:
    """A packed tensor subclass: its plain parts packed one by one, rebuilt at unpack."""

    __slots__ = ("context", "parts", "size", "stride", "subclass")

    def __init__(self, tensor: Any, pack: Any) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.subclass = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.parts = {name: pack(getattr(tensor, name)) for name in names}


class Tape:
    """The record of one region call; owned by the handles that autograd holds."""

    __slots__ = (
        "__weakref__",
        "answers",
        "backward",
        "body",
        "certify",
        "closed",
        "dropped",
        "drops",
        "epoch",
        "flags",
        "holding",
        "last_reader",
        "lent",
        "linked",
        "lock",
        "main",
        "missed",
        "module",
        "moves_state",
        "muted",
        "name",
        "nodes",
        "offers",
        "on_backward",
        "packed",
        "parameter_parts",
        "place",
        "plan_is_new",
        "planned",
        "read_again",
        "recording",
        "spill",
        "spill_bytes",
        "storages",
        "swapped",
        "unlaunched_bytes",
        "visit",
    )

    def __init__(self, name: str, answers: Answers, *, recording: bool, certify: bool = False) -> None:
        self.name = name
        self.answers = answers
        self.recording = recording  # False inside a swap-only region: nothing there is ever replayed
        self.certify = certify
        self.storages: dict[int, StorageRecord] = {}
        self.nodes: list[Node | FunctionNode | None] = []
        self.holding: list[Value] = []  # every value that was ever held by reference
        self.packed: list[Value] = []
        self.parameter_parts: set[int] = set()  # storages behind parameters that are tensor subclasses (DTensor)
        self.body: Body | None = None  # the autograd.Function whose forward runs now
        self.muted = False  # a replay runs while the region is still open
        self.closed = False
        self.lock = threading.RLock()  # several backward threads may unpack at once
        self.planned: set[int] = set()  # nodes whose reads are counted in Value.uses
        self.plan_is_new = False  # no node has run since the reads were counted
        self.epoch = 0  # number of the backward
        self.backward = _torch.NO_BACKWARD  # the engine's id of the backward that has unpacked from us and still runs
        self.last_reader: tuple[int | None, list[Value]] | None = None  # such a node, and what it may read again
        self.read_again: list[tuple[Value, Tensor]] = []  # by nodes of which this backward asks for a half only
        self.lent: list[Value] = []  # values that are held between the halves only
        self.drops = False  # this backward may drop held values at their last use (R16)
        self.dropped = False
        self.swapped: list[Storage] = []
        self.unlaunched_bytes = 0  # held, asked to move, not yet handed to the residency
        self.spill_bytes = 1 << 62
        self.spill: Any = None  # called with the tape when those pass the bound on bytes in flight
        self.flags = device.numeric_flags() if recording else None  # R12
        self.visit: Visit | None = None
        self.module: Any = None  # weak reference to the wrapped module: its buffers never move
        self.on_backward: Visit | None = None  # told once when backward first reaches this tape
        self.moves_state: str | None = None  # what a second run of the Python would move twice
        self.place: Place | None = None  # in the chunk of layers that it belongs to
        self.offers: list[Offer] = []  # outputs that later layers of the chunk may stand on
        self.linked: list[Value] = []  # inputs that earlier layers of the chunk make again
        self.missed: list[Missed] = []  # inputs that they do not
        self.main: frozenset[int] = frozenset()  # storages of the input that the layer works on

    # ---- values -------------------------------------------------------------------------------

    def add_record(self, storage: torch.UntypedStorage, version: int | None, value: Value) -> StorageRecord:
        """Start to follow a storage; pins its C++ struct so that its address is not reused meanwhile."""
        record = StorageRecord(value, version)
        record.body = self.body
        value.record = record
        self.storages[_torch.take_weak_storage(storage)] = record
        return record

    def value_of(self, tensor: Tensor) -> Value:
        """The value a tensor shows now; an unknown storage or an unseen write opens a leaf (R8)."""
        storage = tensor.untyped_storage()
        record = self.storages.get(storage._cdata)
        if record is None:
            value = Value(LEAF)
            value.foreign = True
            self.add_record(storage, tensor._version, value)
            return value
        if record.version is not None and tensor._version != record.version:
            old = record.value
            record.value = value = Value(LEAF)
            value.foreign, value.record, record.version = old.foreign, record, tensor._version
            value.opaque = "its storage was written by something the tape could not see"
            return value
        return record.value

    def note_parameter(self, tensor: Any) -> None:
        """The plain parts of a parameter that is a subclass belong to it as a view would."""
        if type(tensor) not in PLAIN_TYPES and _torch.is_traceable_subclass(tensor) and is_parameter(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                part = getattr(tensor, name)
                if type(part) in PLAIN_TYPES:
                    self.parameter_parts.add(_torch.storage_key(part))

    def hold(self, value: Value, tensor: Tensor) -> None:
        """Keep a value's bytes by reference, as they look through ``tensor``, which may have history for now."""
        value.base_layout = layout_of(tensor)
        self.hold_base(value, tensor)

    def hold_base(self, value: Value, tensor: Tensor) -> None:
        """Likewise, for a tensor that looks as the value's base does."""
        value.held = tensor if self.recording else tensor.detach()
        value.version = tensor._version
        record = value.record
        if record is not None:
            if record.holders is None:
                record.holders = [value]
            else:
                record.holders.append(value)
        self.holding.append(value)

    def hold_leaf(self, value: Value, tensor: Tensor) -> None:
        """Hold what cannot be replayed, and ask who may answer for it: the region's inputs and opaque results."""
        value.base_layout = layout_of(tensor)
        self.hold_base(value, tensor)
        value.parameter = is_parameter(tensor) or _torch.storage_key(tensor) in self.parameter_parts
        if self.place is not None and value.foreign and not value.parameter and self._link(value, tensor, self.place):
            return
        if value.answer is None and not value.parameter:
            value.answer = self.answers.for_leaf(tensor, foreign=value.foreign)

    def _link(self, value: Value, tensor: Tensor, place: Place) -> bool:
        """Let an input be what an earlier layer of the chunk makes again; False if none does."""
        if place.index == 0 or value.link is not None:
            return value.link is not None
        if value.opaque is not None:
            return False  # written in this region, which counts it: what was offered is not what it shows
        offer, why_not = find_offer(tensor, place)
        before = None if offer is None else offer.tape()
        if offer is None or before is None:
            main = _torch.storage_key(tensor) in self.main
            if all(one.value is not value for one in self.missed):
                # An offer whose tape has gone a moment ago is none.
                self.missed.append(Missed(value, why_not or NOT_OUTPUT, tensor.requires_grad, main))
            return False
        value.link = before.handle_for(offer.value)
        self.linked.append(value)
        return True

    def before_write(self, record: StorageRecord, tensor: Tensor) -> None:
        """A visible write comes: un-hold or copy every value held by reference to that storage (R7)."""
        for value in record.holders or ():
            if value.held is not None:
                if value.node != LEAF or value.link is not None:
                    value.held = None
                else:
                    self._copy_before_write(value, tensor)
        record.holders = None

    def _copy_before_write(self, value: Value, tensor: Tensor) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes > _COPY_LIMIT:
            raise UnsupportedError(
                explain(
                    "the region overwrites a large tensor that it has already read",
                    expected=f"at most {_COPY_LIMIT} bytes to copy before the write",
                    got=f"{nbytes} bytes",
                    where=self.name,
                    remedy="Move the write out of the wrapped module, or wrap with recompute='call'.",
                )
            )
        held = value.held
        assert held is not None
        layout = layout_of(held)
        copy = whole(tensor).clone()
        value.held = over(copy.untyped_storage(), layout._replace(bits=None))
        value.base_layout = layout._replace(bits=None)
        value.version = value.held._version

    # ---- pack ---------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd for every tensor it saves inside the region."""
        if self.body is not None:
            self.body.saw_pack(tensor)
        if type(tensor) not in PLAIN_TYPES:
            self.note_parameter(tensor)
            return Packed(tensor, self.pack) if _torch.is_traceable_subclass(tensor) else tensor
        if tensor.layout is not torch.strided:  # R14
            return tensor
        record = self.storages.get(tensor.untyped_storage()._cdata)
        if record is not None and (record.version is None or tensor._version == record.version):
            value = record.value
        else:
            value = self.value_of(tensor)
        if value.node == LEAF and _is_loose(value):
            self.hold_leaf(value, tensor)
        if self.answers.swap_is_innermost and not value.parameter:
            self._answer_packed(value, tensor)
        handle = Handle(self, value, _shared_layout(value, tensor))
        if value.live == 0:
            self.packed.append(value)
        value.live += 1
        value.pending += 1
        if self.certify and self.recording:
            self._certify(handle, tensor)
        if self.unlaunched_bytes > self.spill_bytes:
            self.spill(self)
        return handle

    def _answer_packed(self, value: Value, tensor: Tensor) -> None:
        """Ask the innermost ``swap_wrapper``; count what waits to leave, since its region may be a whole model."""
        answer = self.answers.for_packed(tensor)
        value.answer = answer if value.answer is None else stronger(value.answer, answer)
        fate = fate_of(value.answer)
        if fate is not Fate.RECOMPUTE and value.held is None and value.swap is None:
            self.hold(value, tensor)
        if fate is Fate.SWAP and value.pending == 0 and value.swap is None:
            self.unlaunched_bytes += tensor.untyped_storage().nbytes()

    def handle_for(self, value: Value) -> Handle:
        """A handle for a later tape, one of whose inputs is this value."""
        with self.lock:
            assert value.base_layout is not None
            handle = Handle(self, value, value.base_layout)
            if value.live == 0 and value not in self.packed:
                # A later layer may run any number of times on one output.
                self.packed.append(value)
            value.live += 1
            value.pending += 1
            return handle

    def reach(self, visit: Visit) -> None:
        """Tell the latest visit when backward first unpacks from here; earlier ones hear it from their tensors."""
        self.on_backward = visit

    def _certify(self, handle: Handle, tensor: Tensor) -> None:
        from lowtide.activations.certify import checksum  # noqa: PLC0415 - only paid for when asked

        handle.checksum = checksum(tensor)

    # ---- the end of the region ----------------------------------------------------------------

    def offer(self, tensors: Iterable[tuple[Tensor, tuple[Tensor, ...]]]) -> None:
        """The region is about to end with these outputs: let later layers of its chunk stand on them."""
        assert self.place is not None
        self.place.chunk.begin_pass(self.place.index)
        for tensor, subclasses in tensors:
            record = self.storages.get(tensor.untyped_storage()._cdata)
            if record is None or record.value.foreign:
                continue  # an input passed on: it is whatever it was before
            value, why_not = record.value, None
            if record.version is not None and tensor._version != record.version:
                why_not = "it was written to by something the tape could not see"
            elif value.node == LEAF:
                why_not = value.opaque or "it is kept"
            elif value.held is not None or value.swap is not None:
                why_not = value.opaque or "a policy keeps it"
            self.offers.append(Offer(self, self.place, tensor, value, why_not, subclasses=subclasses))

    def close(self) -> tuple[dict[Value, None], list[Value]]:
        """Prune to the closure of what was packed and drop everything else.

        Returns the values that are needed, and those that were held by request and are not (dead).
        """
        needed = self.plan()
        self._keep_for_offers(needed)
        dead: list[Value] = []
        for value in self.holding:
            held = value.held
            if value not in needed:
                if held is not None and value.node != LEAF:
                    dead.append(value)
                self._let_go(value)
            elif held is not None:
                if value.link is not None:
                    value.held = None
                    continue
                if held._version != value.version:
                    value.poison = "a tensor that the region used was modified by an operation the tape could not see"
                if self.recording:
                    # Holding a tensor with history beyond the region would be an uncollectable cycle.
                    value.held = held.detach()
        kept_nodes, nodes = self.planned, self.nodes
        self.nodes = [node if index in kept_nodes else None for index, node in enumerate(nodes)]
        self._release_records()
        self.holding = []
        self.closed = True
        if self.offers:
            self.forget_plan()  # nobody has taken an offer so far; who takes one changes what will be read
        return needed, dead

    def _keep_for_offers(self, needed: dict[Value, None]) -> None:
        for offer in self.offers:
            if offer.why_not is None:
                self._keep_for(offer, needed)

    def _keep_for(self, offer: Offer, needed: dict[Value, None]) -> None:
        """Add what an offer is made from to what is needed, unless the output itself is fewer bytes to keep."""
        more: dict[Value, None] = {}
        made_by: set[int] = set()
        stack = [offer.value]
        while stack:
            value = stack.pop()
            if value in needed or value in more:
                continue
            more[value] = None
            node = None if value.node == LEAF or value.held is not None else self.nodes[value.node]
            if node is not None and value.swap is None and value.node not in self.planned:
                made_by.add(value.node)
                stack += node.inputs
        # What existed before the region is somebody's already; what the region could not do twice is kept for this.
        kept = [value.held for value in more if value.held is not None and not value.foreign]
        layout = offer.value.base_layout
        assert layout is not None
        if sum({_torch.storage_key(one): one.untyped_storage().nbytes() for one in kept}.values()) > layout.nbytes:
            offer.why_not = TOO_DEAR
            return
        needed.update(more)
        self.planned |= made_by

    def forget_plan(self) -> None:
        """Take back the reads that were counted; the next backward counts for itself."""
        for node in self.nodes:
            if node is not None:
                for value in node.inputs:
                    value.uses = 0
        self.planned = set()
        self.plan_is_new = False

    def plan(self) -> dict[Value, None]:
        """Count who will read what in the next backward, if it unpacks every handle that is alive.

        Ordered: the copies of a region leave in the same order in every step.
        """
        needed: dict[Value, None] = {}
        kept_nodes: set[int] = set()
        nodes = self.nodes
        self.epoch += 1
        stack = [value for value in self.packed if value.live > 0]
        for value in stack:
            value.pending = value.live
        while stack:
            value = stack.pop()
            if value in needed:
                continue
            needed[value] = None
            index = value.node
            if index == LEAF or value.held is not None or value.swap is not None or index in kept_nodes:
                continue
            node = nodes[index]
            if node is None:
                continue
            kept_nodes.add(index)
            for source in node.inputs:
                source.uses += 1
                stack.append(source)
        self.planned = kept_nodes
        self.plan_is_new = True
        return needed

    def _release_records(self) -> None:
        free = _torch.free_weak_storage
        for key, record in self.storages.items():
            # Values and records point at each other.
            record.value.record = record.body = None
            holders = record.holders
            if holders is not None:
                for value in holders:
                    value.record = None
                record.holders = None
            free(key)
        self.storages = {}

    def abandon(self) -> None:
        """An exception left the region: leave nothing behind."""
        for value in self.holding:
            self._let_go(value)
            value.record = None
        self._release_records()
        self.packed = []
        self.holding = []
        self.offers = []
        self.linked = []
        self.missed = []
        self.nodes = []
        self.swapped = []
        self.closed = True

    @staticmethod
    def _let_go(value: Value) -> None:
        value.held = value.link = None
        if value.swap is not None:
            value.swap.release()
            value.swap = None

    # ---- backward -----------------------------------------------------------------------------

    def forget(self, handle: Handle) -> None:
        """Autograd dropped a handle; a branch that never ran backward had not unpacked it."""
        value = handle.value
        if handle.epoch == self.epoch:
            value.live -= 1  # read only when the next backward plans
            return
        with self.lock:
            value.live -= 1
            value.pending -= 1
            if self.closed:
                self.drop_if_done(value)

    def drop_if_done(self, value: Value) -> None:
        """Drop a value's bytes if nobody will read them again (R16)."""
        if self.last_reader is not None and value in self.last_reader[1]:
            return  # the node may read it again: it is asked for anew when another node reads
        if value.uses <= 0 and value.pending <= 0:
            if self.closed:
                value.cache = None
            if self.drops and (value.held is not None or value.swap is not None or value.link is not None):
                self._let_go(value)
                self.dropped = True

    def check_held(self, value: Value) -> Tensor:
        """The tensor held for a value, or an error if it is not what was saved."""
        held = value.held
        assert held is not None
        if held._version != value.version:
            raise ModifiedError(
                explain(
                    "one of the variables needed for gradient computation has been modified by an inplace operation",
                    expected=f"version {value.version}",
                    got=f"version {held._version} of a {tuple(held.shape)} {held.dtype} tensor",
                    where=self.name,
                    remedy="Do not write to it between forward and backward, or save a clone."
                    + ("" if self.place is None else f" {_READS_MORE}"),
                )
            )
        if self.place is None:
            demand_bytes(held, self.name)
        else:
            demand_bytes(held, self.name, SHARDED)
        return held


def _shared_layout(value: Value, tensor: Tensor) -> Layout:
    """The layout of a tensor; the base's own object where they are equal, which unpack recognises by identity."""
    base = value.base_layout
    if base is not None and value.held is tensor:
        return base
    layout = layout_of(tensor)
    return base if base is not None and layout == base else layout


def _is_loose(value: Value) -> bool:
    """Whether nothing keeps a value's bytes yet."""
    return value.held is None and value.swap is None and value.poison is None
