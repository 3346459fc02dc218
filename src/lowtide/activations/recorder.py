"""The forward of a region: a dispatch mode that records operators as nodes over values.

Law: whatever is recorded can be replayed bit for bit from what is recorded;
what cannot is opaque and its results are leaves (R1-R6). Views are not recorded
at all: storage and layout reproduce any view. This is the hot path of the
library: every line here runs once per operator of the user's forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _torch, device
from lowtide.activations.operators import Kind, Operator, operator_of
from lowtide.activations.tape import Tape
from lowtide.activations.values import LEAF, Node, StorageRecord, Value, Write
from lowtide.policy import CheckpointPolicy, Fate, fate_of, stronger
from lowtide.storage import PLAIN_TYPES, Layout, layout_of

__all__ = ["Recorder", "tensors_in"]

Tensor = torch.Tensor
_DISCRETE = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})
_new_layout = tuple.__new__


class Recorder(TorchDispatchMode):
    """Hands every operator that runs inside a region to its tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch otherwise puts around the handler costs 0.8 us an operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call and run it."""
        for kind in types:
            if kind not in PLAIN_TYPES:
                # The subclass takes itself apart; its plain parts come back here.
                return NotImplemented
        operator = operator_of(func)
        tape = self.tape
        if tape.muted or (operator.kind is Kind.PASS and tape.body is None):
            return func(*args, **kwargs) if kwargs else func(*args)
        if tape.body is not None:
            tape.body.saw_operator(operator, args, kwargs or {})
            if operator.kind is Kind.PASS:
                return func(*args, **kwargs) if kwargs else func(*args)
            return run_opaque(tape, operator, args, kwargs or {}, tape.body.reason)
        if operator.kind is not Kind.NORMAL:
            return run_opaque(tape, operator, args, kwargs or {}, f"operator {func} is opaque")
        if not torch.is_grad_enabled():  # R2
            return run_opaque(tape, operator, args, kwargs or {}, "it was computed with gradients off")
        if operator.empty:
            return _run_empty(tape, func, args, kwargs or {})
        if operator.writes:
            return _record_write(tape, operator, args, kwargs or {})
        return _record(tape, operator, args, kwargs)


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
    if value.node == LEAF and value.held is None and value.swap is None and value.poison is None:
        tape.hold_leaf(value, tensor)
    inputs.append(value)
    base = value.base_layout
    if value.held is tensor:
        return value
    size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
    bits = None
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        bits = (tensor.is_conj(), tensor.is_neg())
    if (
        base is not None
        and base[1] == stride
        and base[0] == size
        and base[2] == offset
        and base[3] is dtype
        and base[4] == bits
    ):
        return value
    return (value, _new_layout(Layout, (size, stride, offset, dtype, bits)))


def refer_all(tape: Tape, operator: Operator, node: Node, args: Any, kwargs: Any) -> None:
    """Turn the arguments of a call into references."""
    inputs = node.inputs
    node.args = converted = list(args)
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


def _record(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> Any:
    """A pure call: new storages come out, nothing is written."""
    node = Node()
    refer_all(tape, operator, node, args, kwargs)
    if operator.random and operator.draws(args, kwargs or {}):
        node.random = take_generator(args, kwargs or {})
    func = operator.func
    out = func(*args, **kwargs) if kwargs else func(*args)
    index = len(tape.nodes)
    answer = _answer(tape, operator, args, kwargs or {})
    outputs = node.outputs
    storages = tape.storages
    for position, tensor in enumerate(out) if type(out) in (tuple, list) else ((0, out),):
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        record = storages.get(storage._cdata)
        if record is not None:
            # An undeclared alias (_unsafe_view, unsafe_split) has a version counter of its own.
            if record.value.node != index:
                record.version = None
            continue
        value = Value(index)
        value.record = record = StorageRecord(value, tensor._version, None)
        storages[storage._weak_ref()] = record
        value.base_layout = layout_of(tensor)
        outputs.append((position, value))
        _settle(tape, operator, value, tensor, answer, args)
    if outputs:
        node.operator = operator
        tape.nodes.append(node)
    return out


def _settle(
    tape: Tape, operator: Operator, value: Value, tensor: Tensor, answer: CheckpointPolicy | None, args: Any
) -> None:
    """Give a fresh result its answer, and hold it if the answer is not RECOMPUTE."""
    if operator.atomic and tensor.device.type != "cpu":
        answer = stronger(answer or CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_SAVE)
        value.opaque = f"{operator.name} may give other bits when it runs again on an accelerator"
    elif tensor.dtype in _DISCRETE and any(a.dtype.is_floating_point for a in tensors_in(args)):
        # R10: discrete results of floating-point inputs are small, and a flipped one changes the routing.
        value.opaque = f"{operator.name} gives discrete results"
    if answer is not None:
        value.answer = answer
    if value.opaque is not None and (answer is None or fate_of(answer) is Fate.RECOMPUTE):
        value.answer = CheckpointPolicy.PREFER_SAVE
    if value.answer is not None and fate_of(value.answer) is not Fate.RECOMPUTE:
        tape.hold(value, tensor)


def _run_empty(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Uninitialised memory: a leaf until it is visibly overwritten as a whole (R3)."""
    out = func(*args, **kwargs)
    value = Value(LEAF)
    value.uninitialised = True
    value.opaque = "its memory was handed out uninitialised and filled by something the tape could not see"
    tape.add_record(out.untyped_storage(), out._version, value)
    return out


def _covers(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _record_write(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> Any:
    """An in-place or out= call: its targets get new values, their old ones stay readable for replay."""
    targets = operator.written(args, kwargs)
    full = operator.full_write and all(_covers(t) for t in targets)
    before = []
    for tensor in targets:
        value = tape.value_of(tensor)
        record = value.record
        assert record is not None
        before.append((tensor, value, record))
    for _, value, _ in before:
        if value.node == LEAF and (value.foreign or not full):
            # R6: state that existed before the region; R3: a partial write to uninitialised memory.
            reason = "a tensor from outside of the region was written" if value.foreign else value.opaque
            return run_opaque(tape, operator, args, kwargs, reason or f"{operator.name} wrote to it")
    node = Node()
    for tensor, _, record in before:
        tape.before_write(record, tensor)
    _refer_write(tape, node, args, kwargs, operator, {id(t) for t in targets})
    full = full and all(old not in node.inputs for _, old, _ in before)
    if operator.random and operator.draws(args, kwargs):
        node.random = take_generator(args, kwargs)
    out = operator.func(*args, **kwargs)
    index = len(tape.nodes)
    answer = _answer(tape, operator, args, kwargs)
    node.operator = operator
    node.writes = []
    for tensor, old, record in before:
        new = Value(index)
        new.record = record
        new.base_layout = layout = layout_of(tensor)
        node.writes.append(Write(layout, old, new, tensor.device, full=full))
        if not full:
            node.inputs.append(old)
        record.value = new
        # ADInplaceOrView bumps the counter after this handler has returned.
        record.version = None if record.version is None else tensor._version + 1
        wanted = answer if full or old.answer is None else stronger(old.answer, answer or old.answer)
        if wanted is not None:
            new.answer = wanted
            if fate_of(wanted) is not Fate.RECOMPUTE:  # R18
                tape.hold(new, tensor)
                new.version += 1
    tape.nodes.append(node)
    return out


def _refer_write(tape: Tape, node: Node, args: Any, kwargs: Any, operator: Operator, ids: set[int]) -> None:
    """Like :func:`refer_all`, but a written argument (one of ``ids``) is neither held nor counted as read."""

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
    if operator.trust_writes:
        targets = operator.written(args, kwargs)
    else:
        targets = tensors_in([*args, *kwargs.values()])
    declared = {id(t) for t in operator.written(args, kwargs)} if operator.writes else set()
    before = []
    for tensor in targets:
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            continue
        record = tape.storages.get(tensor.untyped_storage()._cdata)
        if record is not None:
            old = tape.value_of(tensor)
            tape.before_write(record, tensor)
            before.append((tensor, record, old))
    out = operator.func(*args, **kwargs)
    for tensor, record, old in before:
        new = Value(LEAF)
        new.foreign, new.record, new.opaque = old.foreign, record, reason
        record.value = new
        if record.version is not None:
            record.version = tensor._version + (1 if id(tensor) in declared else 0)
    for tensor in out if type(out) in (tuple, list) else (out,):
        if isinstance(tensor, Tensor) and type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in tape.storages:
                value = Value(LEAF)
                value.opaque = reason
                answer = _opaque_answer(tape, operator, args, kwargs)
                if answer is not None:
                    value.answer = answer
                tape.add_record(storage, tensor._version, value)
    return out


def _opaque_answer(tape: Tape, operator: Operator, args: Any, kwargs: Any) -> CheckpointPolicy | None:
    """A policy may still choose between keeping and swapping an opaque result."""
    if operator.kind is not Kind.OPAQUE or tape.body is not None or not torch.is_grad_enabled():
        return None
    return _answer(tape, operator, args, kwargs)


