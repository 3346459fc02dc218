"""The forward of a region: a dispatch mode that records operators as nodes over values.

Law: whatever is recorded can be replayed bit for bit from what is recorded;
what cannot is opaque and its results are leaves (R1-R6). Views are not recorded
at all: storage and layout reproduce any view. This is the hot path of the
library: every line here runs once per operator of the user's forward.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import _torch, device
from lowtide.activations.links import note_write
from lowtide.activations.operators import Kind, Operator, known_operators, operator_of
from lowtide.activations.tape import Tape
from lowtide.activations.values import LEAF, Node, StorageRecord, Value, Write
from lowtide.policy import CheckpointPolicy, Fate, fate_of, stronger
from lowtide.storage import PLAIN_TYPES, Layout, layout_of

__all__ = ["Recorder", "tensors_in"]

Tensor = torch.Tensor
_DISCRETE = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})
_new_layout = tuple.__new__
_NO_STORAGE = "an argument has no storage to follow (a sparse tensor)"
PASS, PURE = Kind.PASS, Kind.PURE
grad_enabled = torch.is_grad_enabled


class Recorder(_torch.DispatchMode):
    """Hands every operator that runs inside a region to its tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call and run it."""
        for kind in types:
            if kind not in PLAIN_TYPES:
                if issubclass(kind, _torch.TRACING_TYPES):
                    # Shape propagation (DTensor, compilers) computes nothing: there is nothing to record.
                    return func(*args, **kwargs) if kwargs else func(*args)
                # The subclass takes itself apart; its plain parts come back here.
                for tensor in tensors_in(args):
                    self.tape.note_parameter(tensor)
                return NotImplemented
        operator = known_operators.get(id(func)) or operator_of(func)
        tape = self.tape
        kind = operator.kind
        if tape.body is None:
            if kind is PASS or tape.muted:
                return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
            if kind is PURE and grad_enabled():
                return _record(tape, operator, args, kwargs)
        elif tape.muted:
            return operator.call(*args, **(kwargs or {}))
        return _record_rare(tape, operator, args, kwargs or {})


def _record_rare(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> Any:
    """Everything but a pure operator called with gradients on."""
    if tape.body is not None:
        return _run_in_body(tape, tape.body, operator, args, kwargs)
    if operator.kind in {Kind.OPAQUE, Kind.POISON}:
        if operator.func.namespace == "aten" or operator.communicates:
            tape.moves_state = str(operator.func)
        return run_opaque(tape, operator, args, kwargs, opaque_reason(operator))
    if not grad_enabled():  # R2
        return run_opaque(tape, operator, args, kwargs, "it was computed with gradients off")
    if operator.kind is Kind.EMPTY:
        return _run_empty(tape, operator.func, args, kwargs)
    return _record_write(tape, operator, args, kwargs)


def _run_in_body(tape: Tape, body: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
    """An operator inside of an ``autograd.Function``'s forward is never a node of its own."""
    body.saw_operator(operator, args, kwargs)
    if operator.communicates:  # R5: a rank that ran it again by itself would wait for the others for ever
        tape.moves_state = str(operator.func)
        body.reason = f"{operator.func} in {body.function} communicates, so it must not run twice"
    if operator.kind is PASS:
        return operator.func(*args, **kwargs)
    return run_opaque(tape, operator, args, kwargs, body.reason)


def opaque_reason(operator: Operator) -> str:
    """Why the results of an operator are never replayed."""
    namespace = operator.func.namespace
    if namespace in {"aten", "prims"}:
        return f"{operator.func} moves a state or a storage, so it must not run twice"
    if operator.communicates:
        return f"{operator.func} communicates, so it must not run twice"  # R5
    return f"opaque operator {operator.func}"


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments, one level of lists and tuples deep."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def refer(tape: Tape, tensor: Tensor, inputs: list[Value]) -> Any:
    """The reference of an argument; holds it if it cannot be replayed."""
    record = tape.storages.get(tensor.untyped_storage()._cdata)
    if record is not None and (record.version is None or tensor._version == record.version):
        value = record.value
    else:
        value = tape.value_of(tensor)
    held = value.held
    if value.node == LEAF and held is None and value.swap is None and value.poison is None:
        tape.hold_leaf(value, tensor)
        held = tensor
    inputs.append(value)
    if held is tensor:
        return value
    size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
    bits = None
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        bits = (tensor.is_conj(), tensor.is_neg())
    layout = (size, stride, offset, dtype, bits)
    # Most arguments look as the value's base does: then no layout of their own is kept.
    return value if value.base_layout == layout else (value, _new_layout(Layout, layout))


def refer_all(tape: Tape, operator: Operator, node: Node, kwargs: Any) -> None:
    """Turn the arguments of a call into references."""
    inputs = node.inputs
    converted = node.args
    count = len(converted)
    node.positions = operator.tensor_positions
    for position in operator.tensor_positions:
        if position >= count:
            break
        value = converted[position]
        if isinstance(value, Tensor):
            converted[position] = refer(tape, value, inputs)
    if operator.list_positions:
        node.lists = operator.list_positions
        for position in operator.list_positions:
            if position < count and converted[position] is not None:
                items = converted[position]
                converted[position] = [refer(tape, i, inputs) if isinstance(i, Tensor) else i for i in items]
    if kwargs:
        node.kwargs = {
            name: refer(tape, value, inputs) if isinstance(value, Tensor) else value for name, value in kwargs.items()
        }


def take_generator(args: Any, kwargs: Any) -> tuple[torch.Generator, Tensor]:
    """The generator a random operator draws from, and its state before the draw (R9)."""
    generator = kwargs.get("generator")
    if generator is None:
        where = next((a.device for a in tensors_in(args)), None) or torch.device(kwargs.get("device") or "cpu")
        generator = device.default_generator(where)
    return generator, generator.get_state()


def _answer(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> CheckpointPolicy | None:
    frame = tape.answers.checkpoint
    if frame is None or frame.policy is None:
        return None
    return frame.for_operator(operator, args, kwargs)


def _can_refer(tape: Tape, operator: Operator, node: Node, args: Any, kwargs: Any) -> bool:
    """Turn the arguments into references; False if one of them, being sparse, has no storage to follow (R14)."""
    try:
        refer_all(tape, operator, node, kwargs)
    except NotImplementedError:
        if all(_is_plain(t) for t in tensors_in([*args, *(kwargs or {}).values()])):
            raise  # a policy's own
        return False
    return True


def _record(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> Any:
    """A pure call: new storages come out, nothing is written."""
    node = Node(operator, list(args))
    if not _can_refer(tape, operator, node, args, kwargs):
        return run_opaque(tape, operator, args, kwargs or {}, _NO_STORAGE)
    if operator.random and operator.draws(args, kwargs or {}):
        node.random = take_generator(args, kwargs or {})
    out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
    frame = tape.answers.checkpoint
    answer = None
    if frame is not None and frame.policy is not None:
        known = frame.known
        answer = known[operator] if operator in known else frame.for_operator(operator, args, kwargs or {})
    nodes, storages = tape.nodes, tape.storages
    index = len(nodes)
    for position, tensor in enumerate((out,) if isinstance(out, Tensor) else out):
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            record = storages.get(storage._cdata)
            if record is None:
                value = Value(index)
                value.record = record = StorageRecord(value, tensor._version)
                storages[_torch.take_weak_storage(storage)] = record
                value.base_layout = layout_of(tensor)
                node.outputs.append((position, value))
                if answer is not None or tensor.dtype in _DISCRETE or operator.atomic:
                    value.answer = answer
                    _settle(tape, operator, value, tensor, args)
            elif record.value.node != index:
                # An undeclared alias (_unsafe_view, unsafe_split) has a version counter of its own.
                record.version = None
    if node.outputs:
        nodes.append(node)
    return out


def _settle(tape: Tape, operator: Operator, value: Value, tensor: Tensor, args: Any) -> None:
    """Hold a fresh result if its answer is not RECOMPUTE, or if it must not be computed twice."""
    if operator.atomic and tensor.device.type != "cpu":
        value.opaque = f"{operator.name} may give other bits when it runs again on an accelerator"
    elif tensor.dtype in _DISCRETE and any(a.dtype.is_floating_point for a in tensors_in(args)):
        # R10: discrete results of floating-point inputs are small, and a flipped one changes the routing.
        value.opaque = f"{operator.name} gives discrete results"
    if value.opaque is not None and (value.answer is None or fate_of(value.answer) is Fate.RECOMPUTE):
        value.answer = CheckpointPolicy.PREFER_SAVE
    if value.answer is not None and fate_of(value.answer) is not Fate.RECOMPUTE:
        tape.hold_base(value, tensor)


def _run_empty(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Uninitialised memory: a leaf until it is visibly overwritten as a whole (R3)."""
    out = func(*args, **kwargs)
    value = Value(LEAF)
    value.opaque = "its memory was handed out uninitialised and filled by something the tape could not see"
    tape.add_record(out.untyped_storage(), out._version, value)
    return out


def _covers(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _record_write(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> Any:
    """An in-place or out= call: its targets get new values, their old ones stay readable for replay."""
    targets = operator.written(args, kwargs)
    if not all(_is_plain(t) for t in targets):
        return run_opaque(tape, operator, args, kwargs, _NO_STORAGE)
    full = operator.full_write and all(_covers(t) for t in targets)
    before = [(tensor, tape.value_of(tensor)) for tensor in targets]
    for _, value in before:
        if value.node == LEAF and (value.foreign or not full):
            return _write_to_leaf(tape, operator, args, kwargs, value)
    node = Node(operator, [])
    for tensor, old in before:
        assert old.record is not None
        tape.before_write(old.record, tensor)
    _refer_write(tape, node, args, kwargs, {id(t) for t in targets})
    full = full and all(old not in node.inputs for _, old in before)
    if operator.random and operator.draws(args, kwargs):
        node.random = take_generator(args, kwargs)
    out = operator.func(*args, **kwargs)
    answer = _answer(tape, operator, args, kwargs)
    node.writes = []
    for tensor, old in before:
        new = _overwrite(tape, tensor, old, answer, full=full)
        node.writes.append(Write(layout_of(tensor), old, new, tensor.device, full=full))
        if not full:
            node.inputs.append(old)
    tape.nodes.append(node)
    return out


def _write_to_leaf(tape: Tape, operator: Operator, args: Any, kwargs: Any, value: Value) -> Any:
    """R6: state that existed before the region; R3: a partial write to uninitialised memory."""
    if not value.foreign:
        return run_opaque(tape, operator, args, kwargs, value.opaque or f"{operator.name} wrote to it")
    tape.moves_state = f"{operator.func} on a tensor from outside of the region"
    return run_opaque(tape, operator, args, kwargs, "a tensor from outside of the region was written")


def _overwrite(tape: Tape, tensor: Tensor, old: Value, answer: CheckpointPolicy | None, *, full: bool) -> Value:
    """The value that a written tensor shows from now on."""
    record = old.record
    assert record is not None
    new = Value(len(tape.nodes))
    new.record = record
    new.base_layout = layout_of(tensor)
    record.value = new
    # ADInplaceOrView bumps the counter after this handler has returned.
    record.version = None if record.version is None else tensor._version + 1
    wanted = answer if full or old.answer is None else stronger(old.answer, answer or old.answer)
    if wanted is not None:
        new.answer = wanted
        if fate_of(wanted) is not Fate.RECOMPUTE:  # R18
            tape.hold(new, tensor)
            new.version += 1
    return new


def _refer_write(tape: Tape, node: Node, args: Any, kwargs: Any, ids: set[int]) -> None:
    """Like :func:`refer_all`, but a written argument (one of ``ids``) is neither held nor counted as read."""
    operator = node.operator

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in ids:
            return (tape.value_of(value), layout_of(value))
        return refer(tape, value, node.inputs)

    node.positions = operator.tensor_positions
    node.lists = operator.list_positions
    node.args = [[one(i) for i in a] if p in operator.list_positions and a else one(a) for p, a in enumerate(args)]
    node.kwargs = {name: one(value) for name, value in kwargs.items()} or None


def run_opaque(tape: Tape, operator: Operator, args: Any, kwargs: Any, reason: str) -> Any:
    """Run a call that is never replayed: results are leaves, writes make fresh leaves (R1-R6)."""
    declared = operator.written(args, kwargs) if operator.writes else []
    targets = declared if operator.trust_writes else tensors_in([*args, *kwargs.values()])
    before = []
    # The others that are not trusted (batch norm) hide a write to a state, which is no layer's output.
    for tensor in targets if operator.communicates or operator.kind is Kind.POISON else declared:
        if _is_plain(tensor):
            note_write(tensor)
    for tensor in targets:
        record = tape.storages.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None
        if record is not None:
            old = tape.value_of(tensor)
            tape.before_write(record, tensor)
            before.append((tensor, record, old))
    out = operator.func(*args, **kwargs)
    bumped = {id(t) for t in declared}
    for tensor, record, old in before:
        new = Value(LEAF)
        new.foreign, new.record, new.opaque = old.foreign, record, reason
        record.value = new
        if record.version is not None:
            record.version = tensor._version + (1 if id(tensor) in bumped else 0)
    for tensor in tensors_in([out]):
        if _is_plain(tensor) and tensor.untyped_storage()._cdata not in tape.storages:
            value = Value(LEAF)
            value.opaque = reason
            value.answer = _opaque_answer(tape, operator, args, kwargs)
            tape.add_record(tensor.untyped_storage(), tensor._version, value)
    return out


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided


def _opaque_answer(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> CheckpointPolicy | None:
    """A policy may still choose between keeping and swapping an opaque result."""
    if operator.kind is not Kind.OPAQUE or tape.body is not None or not torch.is_grad_enabled():
        return None
    return _answer(tape, operator, args, kwargs)
