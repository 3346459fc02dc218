"""``SwapLayerInputManager``: one layer's part in the swap of layer inputs, and what one call of the layer does.

Law: the layer's input moves and nothing else. A region that records (the
layer's own, or one around several layers) keeps its input as a leaf: that leaf
moves. A layer that is not recomputed becomes a region whose policy speaks of
that storage only. The schedule is the chain of the layers of one tag. A manager
knows its layer weakly and owns no tensors: what moves belongs to the graphs.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch.utils._pytree import tree_leaves

from lowtide import _torch
from lowtide.activations.answers import SwapFrame
from lowtide.activations.call_mode import is_running_again
from lowtide.activations.region import Region, notify_on_backward, open_tape, stow_open_tapes
from lowtide.activations.tape import Tape
from lowtide.activations.values import LEAF, Value
from lowtide.activations.wrappers import swap_wrapper
from lowtide.errors import ScheduleError, UnsupportedError, explain
from lowtide.policy import CheckpointPolicy, is_must
from lowtide.recipes.layer_inputs_room import check_room
from lowtide.recipes.layer_inputs_tensors import SwapTensors, marked, why_not_valid
from lowtide.residency.manager import SwapManager
from lowtide.residency.swap_tensor import SwapTensor
from lowtide.storage import PLAIN_TYPES

__all__ = ["LayerGroup", "SwapLayerInputManager"]

Tensor = torch.Tensor

_HELD = (
    "somebody else recomputes this layer, or packs what it saves, and keeps its input: moving it would free nothing",
    "Use lowtide.checkpoint_wrapper in place of torch.utils.checkpoint, or name the module that calls it instead.",
)
_NOT_A_LEAF = (
    "This layer runs inside of a region that is recomputed as a whole: only what enters that region is kept, and moves."
)
_NOTHING_MOVED = (
    "Nothing of the input's own storage moves: autograd keeps none of it (as where a layer begins with a conversion), "
    "or the row of a region inside of the layer says why it stays."
)


class LayerGroup(Sequence["SwapLayerInputManager"]):
    """The managers of one ``module_tag`` in the order of their layers; holds them weakly.

    ``prefetch`` is how many layers ahead backward loads (None: as
    ``SwapManager().configure`` says); ``micro_batches`` how many are in flight,
    for the check of host memory.
    """

    def __init__(self, tag: str, home: dict[str, LayerGroup]) -> None:
        self.tag = tag
        self._home = home  # the map that it stands in
        self.prefetch: int | None = None
        self.micro_batches = 1
        self.transient = False  # to be forgotten with its last layer
        self.checked_bytes = 0  # the largest input that the lower tier was found to have room for
        self._references: list[weakref.ref[SwapLayerInputManager]] = []

    def append(self, manager: SwapLayerInputManager) -> None:
        """Put a manager at the end."""
        self._references.append(weakref.ref(manager, self._gone))
        self._number()

    def remove(self, manager: SwapLayerInputManager) -> None:
        """Take a manager out. Harmless where it is not in."""
        self._references = [one for one in self._references if one() not in (manager, None)]
        self._number()

    def _gone(self, _: object) -> None:
        self._references = [one for one in self._references if one() is not None]
        self._number()
        # Layers may die with the interpreter, when the names of this module are gone.
        if self.transient and not self._references and self._home.get(self.tag) is self:
            del self._home[self.tag]

    def _number(self) -> None:
        self.checked_bytes = 0
        for index, manager in enumerate(self):
            manager.layer_idx = index

    @overload
    def __getitem__(self, index: int) -> SwapLayerInputManager: ...
    @overload
    def __getitem__(self, index: slice) -> list[SwapLayerInputManager]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return the manager of a layer by its position."""
        return list(self)[index]

    def __iter__(self) -> Iterator[SwapLayerInputManager]:
        for reference in self._references:
            manager = reference()
            if manager is not None:
                yield manager

    def __len__(self) -> int:
        return len(self._references)

    def join(self, manager: SwapLayerInputManager) -> None:
        """Chain the layers where that has not happened, or has been undone."""
        following = manager.layer_idx + 1
        if following < len(self):
            first, second = manager.layer, self[following].layer
            if SwapManager().neighbours(first)[1] is not second:
                self.link()
        elif following > 1 and not SwapManager().is_chained(manager.layer):
            self.link()

    def link(self) -> None:
        """Chain the layers anew, in their order."""
        router = SwapManager()
        layers = [manager.layer for manager in self]
        for layer in layers:
            for other in router.neighbours(layer):
                if other is not None and not any(other is one for one in layers):
                    raise _another_chain(layer, other)
        for layer in layers:
            router.unchain(layer)
        for first, second in itertools.pairwise(layers):
            router.link(first, second, self.prefetch)


def _another_chain(layer: Any, other: Any) -> ScheduleError:
    return ScheduleError(
        explain(
            "a layer whose input is to move stands in another chain",
            expected="a layer that is chained to none but its neighbours in the list",
            got=f"a {type(layer).__name__} chained to a {type(other).__name__}",
            where="layer inputs",
            remedy="Undo that chain: SwapManager().unchain(layer). The swap of layer inputs makes its own.",
        )
    )


class _Local(threading.local):
    def __init__(self) -> None:
        # Of the open layer calls: the storages that move, and who answered for tensors so far.
        self.open: list[tuple[frozenset[int], SwapFrame | None]] = []


_local = _Local()


def _only_inputs(tensor: Tensor) -> CheckpointPolicy:
    """The policy of a layer that is not recomputed: its input moves, others as somebody else says."""
    keys, outer = _local.open[-1]
    if _torch.storage_key(tensor) in keys or marked(tensor):
        return CheckpointPolicy.PREFER_SWAP
    return CheckpointPolicy.PREFER_SAVE if outer is None else outer.for_tensor(tensor)


def _as_it_is(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _as_region(region: Region, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return region.run(fn, args, kwargs)


class _Below:
    """What runs inside of a layer's own region; the region asks it for its module."""

    def __init__(self, manager: SwapLayerInputManager, fn: Callable[..., Any]) -> None:
        self._manager = manager
        self._fn = fn
        self.__self__ = getattr(fn, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._manager.call(self._fn, args, kwargs)


class SwapLayerInputManager:
    """Swaps the input of one layer; found through ``manager_map`` by ``module_tag`` (L4).

    Layers of one tag are a chain in the order in which they were registered:
    the input of layer *i* leaves when it ends, is released when layer *i + 1*
    ends, and comes back when backward enters layer *i + 1*; that of the last
    never leaves. Costs the link's time for one input a layer in each direction,
    and its bytes on the lower tier. Hazard: layers of two models that are alive
    at once form one chain, unless they have different tags.

    Args:
        layer: held weakly.
        module_tag: which group of layers it belongs to.
        name: for messages and the report.

    >>> import torch
    >>> layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> managers = [SwapLayerInputManager(layer, "example") for layer in layers]
    >>> [manager.layer_idx for manager in SwapLayerInputManager.manager_map["example"]]
    [0, 1]
    """

    manager_map: ClassVar[dict[str, LayerGroup]] = {}

    def __init__(self, layer: Any, module_tag: str = "default", *, name: str | None = None) -> None:
        self.module_tag = module_tag
        self.layer_idx = 0
        self._layer = weakref.ref(layer)
        self._calls: list[weakref.ref[Any]] = []  # each micro-batch's input: its swap tensor, or its value on a tape
        self.group = self.manager_map.setdefault(module_tag, LayerGroup(module_tag, self.manager_map))
        self.group.append(self)
        where = name or f"{type(layer).__name__} {self.layer_idx}: input"
        self._region_call: Callable[..., Any] = swap_wrapper(_as_it_is, _only_inputs, name=where)

    @property
    def _region(self) -> Region:
        region: Region = self._region_call._lowtide_region  # type: ignore[attr-defined]
        return region

    @property
    def layer(self) -> Any:
        """The layer; None once it is gone."""
        return self._layer()

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its tag, whose input never leaves."""
        return self.layer_idx + 1 == len(self.group)

    def belongs_to(self, layer: Any) -> bool:
        """Whether this is the manager of that very layer."""
        return self._layer() is layer

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the layer, by deepcopy or pickle, is a further layer of the tag.
        return SwapLayerInputManager, (self.layer, self.module_tag)

    @classmethod
    def configure(
        cls, module_tag: str = "default", *, prefetch: int | None = None, micro_batches: int | None = None
    ) -> None:
        """Set how far ahead backward loads, and how many micro-batches are in flight, for the layers of a tag.

        >>> SwapLayerInputManager.configure("example", prefetch=2)
        """
        given = {"prefetch": prefetch, "micro_batches": micro_batches}
        wanted = {what: value for what, value in given.items() if value is not None}
        for what, value in wanted.items():
            _check_count(what, value)
        group = cls.manager_map.setdefault(module_tag, LayerGroup(module_tag, cls.manager_map))
        for what, value in wanted.items():
            setattr(group, what, value)
        group.checked_bytes = 0
        group.link()

    @classmethod
    def forget(cls, module_tag: str) -> None:
        """Unregister the layers of a tag and undo their chain. Graphs that are alive run backward as before."""
        group = cls.manager_map.pop(module_tag, None)
        for manager in [] if group is None else list(group):
            SwapManager().unchain(manager.layer)
            manager.group.remove(manager)

    def unregister(self) -> None:
        """Take this layer out of its tag; its neighbours are chained at their next call."""
        self.group.remove(self)
        if self.layer is not None:
            SwapManager().unchain(self.layer)

    @property
    def batch_stack(self) -> list[SwapTensors]:
        """The inputs that move, one for each micro-batch whose graph is alive, the oldest first.

        A view of what the graphs own. Keeps the bytes alive as long as you keep it.
        """
        return [SwapTensors.over([moving]) for moving in self._moving()]

    def _moving(self) -> list[SwapTensor]:
        found = [_swap_tensor(reference()) for reference in self._calls]
        return [moving for moving in found if moving is not None]

    def enter_backward(self) -> None:
        """Backward of the oldest micro-batch is about to enter this layer: load what it and those before it need."""
        for moving in self._moving()[:1]:
            visit = moving.visit
            if visit is not None:
                visit.reached()

    # ---- one call of the layer ----------------------------------------------------------------

    def run(self, fn: Callable[..., Any], region: Region | None, args: Any, kwargs: Any) -> Any:
        """Call ``fn`` as the layer's own region, with this manager inside of it, or around where it runs again."""
        if region is None:
            return self.call(fn, args, kwargs)
        if region._runs_again:
            return self.call(functools.partial(_as_region, region, fn), args, kwargs)
        return region.run(_Below(self, fn), args, kwargs)

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the layer's forward; with gradients on, let its input move."""
        layer = self.layer
        if layer is None or not torch.is_grad_enabled() or is_running_again():
            return forward(*args, **kwargs)
        hidden = self._hidden_states(args, kwargs)
        tensors, why_not = self._parts(hidden, args, kwargs)
        if why_not is not None:
            return self._plain(forward, args, kwargs, hidden, why_not)
        tape = open_tape()
        if _others_keep(tape):
            return self._plain(forward, args, kwargs, hidden, _HELD, held=True)
        self.group.join(self)
        self._check_room(tensors[0])
        self._calls = [reference for reference in self._calls if _may_move(reference())]
        if tape is not None and tape.recording:
            self._mark(tape, layer, tensors)
            return forward(*args, **kwargs)
        return self._as_unit(tape, layer, tensors, functools.partial(self._region_call, forward, args, kwargs))

    def _hidden_states(self, args: Any, kwargs: Any) -> Tensor:
        named = kwargs.get("hidden_states")
        if isinstance(named, Tensor):
            return named
        found = next((value for value in args if isinstance(value, Tensor)), None)
        if found is None:
            raise UnsupportedError(
                explain(
                    "a layer whose input is to move was called without one",
                    expected="a tensor as the keyword hidden_states or as the first positional tensor",
                    got=f"({', '.join([*(type(a).__name__ for a in args), *kwargs])})",
                    where=self._region.name,
                    remedy="Pass the layer's input in one of these places, or leave this layer out.",
                )
            )
        return found

    def _parts(self, hidden: Tensor, args: Any, kwargs: Any) -> tuple[list[Tensor], tuple[str, str] | None]:
        """The plain tensors that are to move: the input's, and those of arguments that are marked."""
        found: list[Tensor] = []
        for tensor in [hidden, *_marked_arguments(hidden, args, kwargs)]:
            parts = _plain_parts(tensor)
            why_not = "it is no tensor with bytes of its own" if not parts else None
            for part in parts:
                why_not = why_not or why_not_valid(part)
            if why_not is None:
                found.extend(parts)
            elif tensor is hidden:
                return [], (f"the input does not move: {why_not}", "Nothing to do if that is meant.")
        return found, None

    def _plain(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        hidden: Tensor,
        why: tuple[str, str],
        *,
        held: bool = False,
    ) -> Any:
        """Call the layer as it is, and count why its input stays."""
        nbytes = sum(part.untyped_storage().nbytes() for part in _plain_parts(hidden))
        row = self._region.row
        row.start_call()
        row.refuse(why[0], nbytes, why[1])
        if held:
            row.held_elsewhere_bytes += nbytes
        return forward(*args, **kwargs)

    def _check_room(self, hidden: Tensor) -> None:
        nbytes = hidden.untyped_storage().nbytes()
        group = self.group
        if self.layer_idx == 0 and nbytes > group.checked_bytes:
            check_room(hidden.device, len(group), nbytes, group.micro_batches, self._region.name)
            group.checked_bytes = nbytes

    def _mark(self, tape: Tape, layer: Any, tensors: list[Tensor]) -> None:
        """Inside of a region that records, the input is a leaf: answer for it, and give the region our place."""
        leaves = [value for value in map(tape.value_of, tensors) if value.node == LEAF and value.foreign]
        for value in leaves:
            if value.answer is None or not is_must(value.answer):
                value.answer = CheckpointPolicy.PREFER_SWAP
        if leaves:
            self._calls.append(weakref.ref(leaves[0]))
        else:
            self._region.row.start_call()
            self._region.row.note(_NOT_A_LEAF)
        router = SwapManager()
        if tape.visit is None and leaves and not router.units:
            tape.visit = router.begin_visit()
        if tape.visit is not None:
            # The last layer of a region says whether another one follows.
            tape.visit.layer = weakref.ref(layer)

    def _as_unit(self, tape: Tape | None, layer: Any, tensors: list[Tensor], call: Callable[[], Any]) -> Any:
        """Call the layer as a region of its own and as one link of the chain."""
        router = SwapManager()
        unit = router.begin_visit()
        unit.layer = weakref.ref(layer)
        router.units.append(unit)
        keys = frozenset(_torch.storage_key(tensor) for tensor in tensors)
        _local.open.append((keys, None if tape is None else tape.answers.swap))
        try:
            out = call()
            stow_open_tapes()
        finally:
            _local.open.pop()
            router.units.pop()
        moving = router.moving(tensors[0])
        if moving is not None:
            self._calls.append(weakref.ref(moving))
        elif not self._region.row.refused:
            self._region.row.note(_NOTHING_MOVED)
        router.end_visit(unit)
        if unit.storages:
            notify_on_backward(out, unit.reached)
        return out


def _swap_tensor(owner: Value | SwapTensor | None) -> SwapTensor | None:
    """The swap tensor that a tape's value has by now, or that was kept itself; None once nobody needs it."""
    moving = owner.swap if isinstance(owner, Value) else owner
    return moving if moving is not None and moving.owners > 0 else None


def _may_move(owner: Value | SwapTensor | None) -> bool:
    """Whether there is anything to wait for: a value whose region is still open has no swap tensor yet."""
    return _swap_tensor(owner) is not None or (isinstance(owner, Value) and owner.record is not None)


def _others_keep(tape: Tape | None) -> bool:
    """Whether saved tensors go to somebody else's hooks, or somebody else runs this forward again in backward."""
    if _torch.current_backward() != _torch.NO_BACKWARD:
        return True
    pack = _torch.current_saved_tensor_hooks()
    return pack is not None and (tape is None or pack != tape.pack)


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, or the parts of a subclass such as DTensor."""
    if type(tensor) in PLAIN_TYPES:
        return [tensor]
    if not _torch.is_traceable_subclass(tensor):
        return []
    flat: Any = tensor
    names, _ = flat.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]


def _marked_arguments(hidden: Tensor, args: Any, kwargs: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor is not hidden and marked(tensor)]


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(
            explain(
                f"{what} is no count",
                expected="a whole number, at least 1",
                got=repr(value),
                where="layer inputs",
                remedy="Leave it out for the default.",
            )
        )
