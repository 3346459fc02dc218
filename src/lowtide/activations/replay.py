"""Backward: a handle is unpacked, and the minimal closure of recorded operators runs again.

Law: only nodes that the asked value really needs run, each at most once per
backward, in the order in which they were recorded; Python of the user's is
never run (but for Functions declared pure). A value dies after its last use.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lowtide import _torch, device
from lowtide.activations.certify import verify
from lowtide.activations.function_node import FunctionArgument, call_forward
from lowtide.activations.recorder import tensors_in
from lowtide.activations.tape import Packed, Tape
from lowtide.activations.values import LEAF, FunctionNode, Handle, Node, Value, Write
from lowtide.errors import ModifiedError, ReplayError, explain
from lowtide.storage import Emptied, layout_of, over, rebuild, refill_if_emptied, same_layout, whole

__all__ = ["give_back", "unpack"]

Tensor = torch.Tensor


def unpack(packed: Any) -> Any:
    """Called by autograd when backward needs a saved tensor."""
    if type(packed) is Handle:
        tape = packed.tape
        with tape.lock:
            return _unpack(tape, packed)
    if type(packed) is Packed:
        parts = {name: unpack(part) for name, part in packed.parts.items()}
        return packed.subclass.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)
    return packed


def _enter(tape: Tape) -> bool:
    """A handle on a tape is read: whether a backward reads it. Opens the tape's epoch if it is a new one."""
    task = _torch.current_backward()
    in_backward = task != _torch.NO_BACKWARD
    if task != tape.backward or not in_backward:
        _open_epoch(tape, task)
    if tape.on_backward is not None:
        visit, tape.on_backward = tape.on_backward, None
        visit.reached()
    return in_backward


def _unpack(tape: Tape, handle: Handle) -> Tensor:
    value = handle.value
    in_backward = _enter(tape)
    _note_reader(tape, value)
    kept = value.held is not None
    base = _bytes_of(tape, value)
    # Autograd may edit what it gets: never the tensor that we keep.
    if in_backward and tape.closed and not tape.drops and _torch.backward_leaves_out_a_neighbour():
        tape.read_again.append((value, base))
    out = base if handle.layout is value.base_layout else rebuild(base, handle.layout)
    if out is base:
        out = base.detach()
    if value.cache is not None:
        value.handed_out = True
    if handle.epoch != tape.epoch:
        handle.epoch = tape.epoch
        value.pending -= 1
    if tape.closed and tape.last_reader is None:
        tape.drop_if_done(value)
    if not in_backward:
        _close_epoch(tape)
    if handle.checksum is not None and not kept:
        # A value kept by reference is what plain autograd would see, whatever has happened to it.
        verify(handle.checksum, out, operator=producer(tape, value), where=tape.name)
    return out


def _bytes_of(tape: Tape, value: Value) -> Tensor:
    """The tensor behind a value, replayed or brought back if need be."""
    base = value.held
    if base is not None and base._version == value.version and value.cache is None and base.data_ptr():
        return base  # what resident would say, in short: most values of a keeping region are simply there
    base = resident(tape, value)
    if base is None:
        _replay(tape, value)
        base = resident(tape, value)
        assert base is not None
    return base


def _follow(tape: Tape, value: Value) -> Tensor:
    """The bytes of an input that an earlier tape of the chunk makes again; that tape keeps what its own backward reads.

    Its own input may come from the tape before it. In a backward these are made first, the farthest one first, so that
    a chunk of many layers is no deep recursion.
    """
    muted, tape.muted = tape.muted, True
    try:
        waiting = [(tape, value)]
        while waiting:
            later, asked = waiting[-1]
            if asked.cache is not None:  # several nodes have asked for it
                waiting.pop()
                continue
            assert asked.link is not None
            before = asked.link.tape
            with before.lock:
                # Outside of a backward every read stands for itself, so nothing can be prepared for the next.
                missing = _links_below(before, asked.link) if _torch.current_backward() != _torch.NO_BACKWARD else []
            if missing:
                waiting += missing
                continue
            with later.lock:
                _put(asked, _made_before(asked))
                asked.handed_out = True  # the tape before has it too
    finally:
        tape.muted = muted
    assert value.cache is not None
    return value.cache


def _links_below(tape: Tape, handle: Handle) -> list[tuple[Tape, Value]]:
    """The inputs of a tape that are needed for a value of it and that still earlier tapes make."""
    _enter(tape)
    if handle.value.cache is not None:
        return []
    return [(tape, value) for value in _closure(tape, handle.value)[1]]


def _made_before(value: Value) -> Tensor:
    """Have the earlier tape make what is linked, as it looks in the later one."""
    handle, layout = value.link, value.base_layout
    assert handle is not None
    assert layout is not None
    tape, made = handle.tape, handle.value
    with tape.lock:
        in_backward = _enter(tape)
        base = _bytes_of(tape, made)
        if made.cache is not None:
            made.handed_out = True
        if handle.epoch != tape.epoch:
            handle.epoch = tape.epoch
            made.pending -= 1
        tape.drop_if_done(made)
        if not in_backward:
            _close_epoch(tape)
    return base if same_layout(base, layout) else rebuild(base, layout)


def give_back(handle: Handle, emptied: Emptied) -> None:
    """Make a value again in the very storage that was emptied of it: everybody who looks at that sees it (F1)."""
    tape, value = handle.tape, handle.value
    with tape.lock:
        made = _unpack(tape, handle)
        if made.untyped_storage().nbytes() != emptied.nbytes:
            raise ReplayError(
                explain(
                    "a discarded output came back with another size",
                    expected=f"{emptied.nbytes} bytes",
                    got=f"{made.untyped_storage().nbytes()} bytes",
                    where=tape.name,
                    remedy="The function is not the same when it runs again: do not discard its output.",
                )
            )
        cache = value.cache
        filled = emptied.fill(made if cache is None else cache)
        if cache is not None:
            # Its own storage may be empty now. The region's own backward reads it from here.
            handed_out = value.handed_out
            _put(value, filled)
            value.handed_out = handed_out


def _note_reader(tape: Tape, value: Value) -> None:
    """A Python node may read its saved tensors again: what it has read lives until another node reads."""
    node = _torch.current_python_node()
    # Its identity only: a reference would be a cycle through the node's own saved tensors.
    reader = None if node is None else id(node)
    last = tape.last_reader
    if last is not None and last[0] != reader:
        tape.last_reader = None
        for done in last[1]:
            tape.drop_if_done(done)
        last = None
    if reader is not None:
        if last is None:
            tape.last_reader = last = (reader, [])
        last[1].append(value)


def producer(tape: Tape, value: Value) -> str:
    """Name of the operator that made a value, for messages."""
    if value.node == LEAF:
        return value.opaque or "an input of the region"
    node = tape.nodes[value.node] if value.node < len(tape.nodes) else None
    if node is None:
        return "a kept operator"
    return node.function.__qualname__ if isinstance(node, FunctionNode) else str(node.operator.func)


def resident(tape: Tape, value: Value) -> Tensor | None:
    """The tensor that holds a value's bytes on the device now, or None if it must be replayed."""
    if value.poison is not None:
        raise ModifiedError(
            explain(
                value.poison,
                expected="the value that was saved",
                got="a newer one",
                where=tape.name,
                remedy="Mark the writer's results as kept, or wrap with recompute='call'.",
            )
        )
    cache = value.cache
    if cache is not None:
        if cache._version != value.cache_version:  # R13
            raise ModifiedError(
                explain(
                    "a recomputed tensor was modified in place during backward",
                    expected=f"version {value.cache_version}",
                    got=f"version {cache._version}",
                    where=tape.name,
                    remedy="A backward must not write to its saved tensors: clone them first.",
                )
            )
        return cache
    if value.held is not None:
        refill_if_emptied(value.held)
        return tape.check_held(value)
    if value.swap is not None:
        base = value.swap.bring_back(tape.name)
        # A copy that several regions share looks as the first of them saw it.
        layout = value.base_layout
        return base if layout is None or same_layout(base, layout) else rebuild(base, layout)
    if value.link is not None and tape.closed:
        return _follow(tape, value)
    return None


# ---- the backward that is running --------------------------------------------------------------


def _open_epoch(tape: Tape, task: int) -> None:
    """A backward reaches this tape, or somebody reads a saved tensor outside of one."""
    if tape.backward != _torch.NO_BACKWARD:
        # An earlier backward raised, so its end was never reported, or this one runs inside of it.
        _close_epoch(tape)
    if tape.closed and not tape.plan_is_new:
        tape.plan()
    tape.plan_is_new = False
    tape.backward = task
    if task == _torch.NO_BACKWARD:
        return
    tape.drops = tape.closed and not _torch.autograd_keeps_graph()
    if tape.drops:
        tape.offers = []  # what the outputs are made from may go now
    reference = weakref.ref(tape)

    def ended() -> None:
        # The engine holds this callback until the whole backward ends: it must not hold the tape (R16).
        alive = reference()
        if alive is not None:
            with alive.lock:
                if alive.backward == task:
                    _hold_for_later(alive)
                    _close_epoch(alive)

    _torch.queue_after_backward(ended)


def _hold_for_later(tape: Tape) -> None:
    """Half a backward is over: hold what it made, as far as its other half reads it again.

    The first half of a backward that is split into inputs' and weights' gradients is such a one. Nothing then runs a
    second time, and what is held meanwhile plain autograd would hold as well. A whole backward that keeps its graph
    ends the loan.
    """
    if not tape.read_again and not tape.drops:
        for value in tape.lent:
            value.held = None
        tape.lent = []
    for value, base in tape.read_again:
        if value.held is None and value.swap is None and value.live > 0:
            value.held, value.version = base, base._version
            tape.lent.append(value)


def _close_epoch(tape: Tape) -> None:
    """Backward ended: forget what it cached. A later one plans for itself."""
    tape.backward = _torch.NO_BACKWARD
    for value in tape.linked:
        if tape.drops and value.cache is not None and value.held is None and (value.pending > 0 or value.uses > 0):
            # The earlier tape has been read for good: what is still needed of it stays here.
            value.held, value.version, value.link = value.cache, value.cache_version, None
        value.cache = None
    tape.drops = False
    tape.last_reader = None
    tape.read_again = []
    dropped, tape.dropped = tape.dropped, False
    if dropped:
        tape.lent = []  # what these are made from may be gone
    for node in tape.nodes:
        if node is None:
            continue
        for value in _values_of(node):
            if dropped and value.cache is not None and value.held is None and (value.pending > 0 or value.uses > 0):
                # What it is made from may be gone: it becomes a leaf.
                value.held, value.version = value.cache, value.cache_version
            value.cache = None
    tape.forget_plan()
    if not tape.closed:
        tape.epoch += 1


def _values_of(node: Node | FunctionNode) -> list[Value]:
    values = [*node.inputs, *(value for _, value in node.outputs)]
    if isinstance(node, Node) and node.writes is not None:
        values.extend(write.new for write in node.writes)
    return values


# ---- the closure -------------------------------------------------------------------------------


def _closure(tape: Tape, target: Value) -> tuple[set[int], list[Value]]:
    """The nodes that ``target`` needs and that have not run, and the inputs among their leaves that others make."""
    nodes = tape.nodes
    todo: set[int] = set()
    links: list[Value] = []
    stack = [target]
    while stack:
        value = stack.pop()
        index = value.node
        if index in todo or value.cache is not None or value.held is not None or value.swap is not None:
            continue
        if value.link is not None:
            links.append(value)
            continue
        if index == LEAF or value.poison is not None or nodes[index] is None:
            raise _lost(tape, value)
        todo.add(index)
        stack.extend(nodes[index].inputs)  # type: ignore[union-attr]
    return todo, links


def _replay(tape: Tape, target: Value) -> None:
    """Run the nodes that ``target`` needs and that have not run in this backward."""
    nodes = tape.nodes
    todo, _ = _closure(tape, target)
    for index in todo - tape.planned:
        # Outside of the plan (a second backward, an open tape): count its reads for this run.
        for value in nodes[index].inputs:  # type: ignore[union-attr]
            value.uses += 1
    tape.planned -= todo
    target.uses += 1
    muted, tape.muted = tape.muted, True
    try:
        if torch.is_grad_enabled() or device.numeric_flags() != tape.flags:
            assert tape.flags is not None
            with torch.no_grad(), device.with_numeric_flags(tape.flags):
                _run_all(tape, todo)
        else:
            _run_all(tape, todo)
    finally:
        tape.muted = muted
        target.uses -= 1


def _run_all(tape: Tape, indices: set[int]) -> None:
    with _torch.no_autocast():
        for index in sorted(indices):
            node = tape.nodes[index]
            if type(node) is Node:
                _run(tape, node)
            else:
                assert isinstance(node, FunctionNode)
                _run_function(tape, node)


def _lost(tape: Tape, value: Value) -> ReplayError:
    return ReplayError(
        explain(
            value.poison or "a saved value is neither resident nor can it be made again",
            expected="a value of a graph that is still alive",
            got=f"one of {producer(tape, value)} that was released",
            where=tape.name,
            remedy="Pass retain_graph=True to the earlier backward if you run it a second time.",
        )
    )


def _materialise(tape: Tape, reference: Any, instead: dict[int, Tensor] | None) -> Any:
    kind = type(reference)
    if kind is Value:
        if instead is not None and id(reference) in instead:
            return instead[id(reference)]
        base = reference.cache
        return base if base is not None and base._version == reference.cache_version else _base(tape, reference)
    if kind is tuple and reference and type(reference[0]) is Value:
        value, layout = reference
        base = instead.get(id(value)) if instead is not None else None
        if base is None:
            base = value.cache
            if base is None or base._version != value.cache_version:
                base = _base(tape, value)
        return rebuild(base, layout)
    return reference


def _base(tape: Tape, value: Value) -> Tensor:
    base = resident(tape, value)
    if base is None:
        raise _lost(tape, value)
    layout = value.base_layout
    if layout is not None and not same_layout(base, layout):
        return rebuild(base, layout)
    return base


def _put(value: Value, tensor: Tensor) -> None:
    value.cache = tensor
    value.cache_version = tensor._version
    value.handed_out = False


def _run(tape: Tape, node: Node) -> None:
    """Run one recorded operator on what is there now."""
    operator = node.operator
    instead = _prepare_writes(tape, node.writes) if node.writes is not None else None
    args = _arguments(tape, node, instead)
    kwargs = node.kwargs
    if kwargs is not None:
        kwargs = {name: _materialise(tape, item, instead) for name, item in kwargs.items()}
    if node.random is not None:
        out = _call_with_state(operator.call, args, kwargs, node.random)
    else:
        out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
    if node.writes is not None:
        assert instead is not None
        for write in node.writes:
            _put(write.new, instead[id(write.old)])
            tape.drop_if_done(write.new)
    for position, value in node.outputs:
        _accept(tape, operator.func, value, out if isinstance(out, Tensor) else out[position])
    # Arguments must not keep what their last reader is done with.
    del args, kwargs, instead, out
    _finish(tape, node)


def _arguments(tape: Tape, node: Node, instead: dict[int, Tensor] | None) -> list[Any]:
    """The positional arguments of a recorded call, as tensors that are there now."""
    args = node.args.copy()
    count = len(args)
    for position in node.positions:
        if position >= count:
            break
        reference = args[position]
        if type(reference) is Value and instead is None:
            # The common case of _materialise, spelled out: it runs for most arguments of most nodes.
            base = reference.cache
            if base is None or base._version != reference.cache_version:
                base = _base(tape, reference)
            args[position] = base
        elif reference is not None:
            args[position] = _materialise(tape, reference, instead)
    for position in node.lists:
        if position < count and args[position] is not None:
            args[position] = [_materialise(tape, item, instead) for item in args[position]]
    return args


def _call_with_state(func: Any, args: list[Any], kwargs: dict[str, Any] | None, random: Any) -> Any:
    generator, state = random  # R9
    current = generator.get_state()
    generator.set_state(state)
    try:
        return func(*args, **(kwargs or {}))
    finally:
        generator.set_state(current)


def _accept(tape: Tape, func: Any, value: Value, tensor: Tensor) -> None:
    if value.held is not None or value.cache is not None or value.swap is not None:
        return
    if value.uses <= 0 and value.pending <= 0:
        return
    layout = value.base_layout
    assert layout is not None
    if not same_layout(tensor, layout):
        raise ReplayError(
            explain(
                f"the replay of {func} gave a tensor that looks different",
                expected=f"{tuple(layout.size)} {layout.dtype} with strides {layout.stride}",
                got=f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}",
                where=tape.name,
                remedy="Keep that operator's output with save_ops, and please report it.",
            )
        )
    _put(value, tensor)


def _finish(tape: Tape, node: Node | FunctionNode) -> None:
    for value in node.inputs:
        value.uses = uses = value.uses - 1
        if uses <= 0 and value.pending <= 0:
            tape.drop_if_done(value)


def _prepare_writes(tape: Tape, writes: list[Write]) -> dict[int, Tensor]:
    """Buffers for what the operator overwrites: the old value's own if this is its last read, else a copy."""
    instead: dict[int, Tensor] = {}
    for write in writes:
        layout, old = write.layout, write.old
        if write.full:
            # Dense, and it is the whole storage: the old contents do not matter.
            instead[id(old)] = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=write.device)
            continue
        base = _base(tape, old)
        if old.cache is not None and old.uses == 1 and old.pending == 0 and not old.handed_out:
            old.cache = None
        else:
            base = over(whole(base).clone().untyped_storage(), layout_of(base))
        instead[id(old)] = base if same_layout(base, layout) else over(base.untyped_storage(), layout)
    return instead


def _run_function(tape: Tape, node: FunctionNode) -> None:
    args = _function_arguments(tape, node.args)
    versions = [(t, t._version) for t in tensors_in(args)]
    outs, saved = call_forward(node, args, tape.name)
    if any(t._version != version for t, version in versions):
        raise ReplayError(
            explain(
                f"the replay of autograd.Function {node.function.__qualname__} wrote to an argument",
                expected="a pure forward",
                got="a changed argument",
                where=tape.name,
                remedy="Do not declare it with lowtide.pure.",
            )
        )
    for k, value in node.outputs:
        _accept(tape, node.function.__qualname__, value, (outs[k] if k >= 0 else saved[-1 - k]).detach())
    del args, versions, outs, saved
    _finish(tape, node)


def _function_arguments(tape: Tape, args: Any) -> list[Any]:
    made: list[Any] = []
    for argument in args:
        if type(argument) is FunctionArgument:
            tensor = _materialise(tape, argument.reference, None)  # checks versions
            if argument.parameter is not None:
                tensor = argument.parameter
            else:
                tensor = tensor.detach()
                if argument.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
                    tensor.requires_grad_()
            made.append(tensor)
        elif type(argument) in (list, tuple):
            made.append(type(argument)(_function_arguments(tape, argument)))
        else:
            made.append(argument)
    return made
