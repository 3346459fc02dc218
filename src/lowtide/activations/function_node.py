"""An ``autograd.Function`` call as one node of the tape (R17).

The operators inside a Function's forward run with gradients off, so the tape
would have to keep their results. A class that is *declared pure* is instead
replayed by calling its forward again on the recorded inputs with a stub
context. Pure means: same inputs and generator state give the same bits, no
hidden state is read or moved. Law: only declared classes are replayed, and a
call that visibly breaks the declaration is refused and kept by reference;
nothing of the user's ever runs twice in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from lowtide import _torch, device
from lowtide.activations.operators import Kind, Operator, declare_pure, pure_overloads
from lowtide.activations.recorder import refer, tensors_in
from lowtide.activations.values import LEAF, FunctionNode, Value
from lowtide.errors import WrapError, explain
from lowtide.policy import CheckpointPolicy
from lowtide.storage import PLAIN_TYPES, layout_of

if TYPE_CHECKING:
    from lowtide.activations.tape import Tape

__all__ = ["Body", "FunctionArgument", "call_forward", "install", "is_pure", "pure"]

Tensor = torch.Tensor
T = TypeVar("T")

# Read and found pure, by qualified name: no hidden state, no write to an argument that backward reads.
_KNOWN_PURE: Final = frozenset(
    {
        "liger_kernel.ops.geglu.LigerGELUMulFunction",
        "liger_kernel.ops.layer_norm.LigerLayerNormFunction",
        "liger_kernel.ops.rms_norm.LigerRMSNormFunction",
        "liger_kernel.ops.rope.LigerRopeFunction",
        "liger_kernel.ops.swiglu.LigerSiLUMulFunction",
        "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction",
        "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction",
        "megatron.core.fusions.fused_bias_gelu.GeLUFunction",
        "megatron.core.fusions.fused_bias_swiglu.BiasSwiGLUFunction",
        "megatron.core.fusions.fused_bias_swiglu.SwiGLUFunction",
    }
)
_declared: set[type] = set()
_GENERATED: Final = "GeneratedBackwardFor_"


def pure(function: T) -> T:
    """Declare an ``autograd.Function`` class or a custom operator pure, so that it can be replayed instead of kept.

    Effect: in a recompute region only its inputs are kept. Hazard: if it reads
    or moves state that nothing shows (a Python counter, a random number from
    Python or NumPy, a hidden write), gradients are wrong; run the first steps
    with ``certify`` on. Usable as a decorator on Function classes. Operators are
    given as ``torch.ops.<namespace>.<name>``.

    >>> import torch
    >>> @pure
    ... class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return grad * 2
    """
    if isinstance(function, torch._ops.OpOverloadPacket):
        names: list[str] = function.overloads()  # type: ignore[no-untyped-call]
        declare_pure(getattr(function, name) for name in names)
        return function
    if isinstance(function, torch._ops.OpOverload):
        declare_pure([function])
        return function
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise WrapError(
            explain(
                "only an autograd.Function or an operator can be declared pure",
                expected="a subclass of torch.autograd.Function, or torch.ops.<namespace>.<name>",
                got=repr(function),
                where="lowtide.pure",
                remedy="Pass the class itself, not an instance or its apply.",
            )
        )
    _declared.add(function)
    return function


def is_pure(function: type) -> bool:
    """Whether a Function class may be replayed."""
    if function in _declared or f"{function.__module__}.{function.__qualname__}" in _KNOWN_PURE:
        return True
    # torch.library makes a class like this for the autograd formula of a custom operator.
    made_for = function.__name__.removeprefix(_GENERATED)
    return made_for != function.__name__ and any(made_for == generated_name(op) for op in pure_overloads)


def generated_name(overload: Any) -> str:
    """How ``torch.library`` calls an operator in the name of the class it generates for it."""
    namespace, _, name = overload._schema.name.partition("::")
    return f"{namespace}_{name}_{overload._overloadname}"


class FunctionArgument:
    """A tensor argument of a Function: how to give it to the replay."""

    __slots__ = ("parameter", "reference", "requires_grad")

    def __init__(self, reference: Any, parameter: Tensor | None, *, requires_grad: bool) -> None:
        self.reference = reference
        self.parameter = parameter  # the very object: a forward may look at its attributes
        self.requires_grad = requires_grad


class Body:
    """One running ``Function.forward``: watches for what would make a replay wrong."""

    __slots__ = ("arguments", "function", "generators", "node", "reason", "refused", "saved", "tape")

    def __init__(self, tape: Tape, function: type, tensors: list[Tensor]) -> None:
        self.tape = tape
        self.function = f"autograd.Function {function.__qualname__}"
        self.reason = f"{self.function} is not declared pure"
        self.refused: str | None = None
        self.node: FunctionNode | None = None
        self.saved: list[Tensor] = []
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self.arguments = {
            t.untyped_storage()._cdata for t in tensors if type(t) in PLAIN_TYPES and t.layout is torch.strided
        }

    def refuse(self, why: str) -> None:
        """Remember the first reason why this call is kept by reference."""
        self.refused = self.refused or why

    def saw_pack(self, tensor: Tensor) -> None:
        """Autograd saves a tensor for this Function."""
        if self.node is not None:
            self.saved.append(tensor)
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
                self.refuse("it saves a tensor that is not plain")

    def saw_operator(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """An operator runs inside the forward."""
        if self.node is None:
            return
        if torch.is_grad_enabled():
            self.refuse("it enables gradients inside its forward")
        if operator.kind is Kind.POISON or operator.communicates:
            self.refuse("a collective or a storage resize runs inside its forward")
        tensors = tensors_in([*args, *kwargs.values()])
        if operator.name != "lift_fresh":
            self._check_reads(tensors)
        if operator.writes:
            self._check_writes(operator.written(args, kwargs))
        if operator.draws(args, kwargs):
            self._take_generator(tensors, kwargs)
        if operator.atomic and any(t.device.type != "cpu" for t in tensors):
            self.refuse("an operator inside it may give other bits when it runs again")

    def _owned(self, tensor: Tensor) -> bool:
        record = self.tape.storages.get(tensor.untyped_storage()._cdata)
        return record is not None and record.body is self

    def _check_reads(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
                self.refuse("a tensor subclass runs inside its forward")
            elif tensor.untyped_storage()._cdata not in self.arguments and not self._owned(tensor):
                self.refuse("it reads a tensor that is not an argument")

    def _check_writes(self, targets: list[Tensor]) -> None:
        if any(not self._owned(t) for t in targets):
            self.refuse("it writes to an argument")

    def _take_generator(self, tensors: list[Tensor], kwargs: Any) -> None:
        where = next((t.device for t in tensors), None) or torch.device(kwargs.get("device") or "cpu")
        generator = kwargs.get("generator") or device.default_generator(where)
        if all(generator is not known for known, _ in self.generators):
            # Before its first draw: the state at the start of forward.
            self.generators.append((generator, generator.get_state()))


class _StubContext:
    """What ``forward`` or ``setup_context`` may touch during a replay; thrown away after it."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.to_save = tensors

    def save_for_forward(self, *_tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *_tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:  # noqa: FBT001 - torch's own signature
        pass


def call_forward(node: FunctionNode, args: list[Any], where: str) -> tuple[list[Any], list[Tensor]]:
    """Run a Function's forward once more: its outputs, and the tensors it saved."""
    function, context = node.function, _StubContext(node.needs_grad)
    current = [(g, g.get_state()) for g, _ in node.generators]
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d, _, _ in node.autocast]
    cache = torch.is_autocast_cache_enabled()
    try:
        for generator, state in node.generators:
            generator.set_state(state)
        for kind, enabled, dtype in node.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(False)
        with torch.no_grad(), device.with_default_device(node.default_device):
            if function.setup_context is not _torch.SingleLevelFunction.setup_context:  # type: ignore[attr-defined]
                out = function.forward(*args)
                function.setup_context(context, tuple(args), out)
            else:
                out = function.forward(context, *args)
    finally:
        for generator, state in current:
            generator.set_state(state)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
    saved = [t for t in context.to_save if t is not None]
    if context.dirty or (node.saved_count and node.saved_count != len(saved)):
        raise WrapError(
            explain(
                f"the replay of autograd.Function {function.__qualname__} did something else than its forward",
                expected=f"no input marked dirty and {node.saved_count} saved tensors",
                got=f"{len(context.dirty)} dirty inputs and {len(saved)} saved tensors",
                where=where,
                remedy="It is not pure: do not declare it with lowtide.pure.",
            )
        )
    return list(out) if type(out) is tuple else [out], saved


def _refer_arguments(tape: Tape, args: Any, inputs: list[Value]) -> list[Any]:
    converted: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            parameter = value if isinstance(value, torch.nn.Parameter) else None
            reference = refer(tape, value, inputs)
            converted.append(FunctionArgument(reference, parameter, requires_grad=value.requires_grad))
        elif type(value) in (list, tuple) and tensors_in([value]):
            converted.append(type(value)(_refer_arguments(tape, value, inputs)))
        else:
            converted.append(_torch.without_modes(value))
    return converted


def _start_node(tape: Tape, body: Body, function: type, args: Any, kwargs: Any) -> FunctionNode | None:
    tensors = tensors_in(args)
    plain = all(type(t) in PLAIN_TYPES and t.layout is torch.strided for t in tensors)
    if kwargs or not tensors or not plain:
        body.reason = f"autograd.Function {function.__qualname__} has keyword, no or no plain tensor arguments"
        return None
    node = FunctionNode()
    node.function = function
    node.args = _refer_arguments(tape, args, node.inputs)
    node.needs_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    node.autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu"} | {t.device.type for t in tensors})
        if torch.amp.is_autocast_available(kind)
    ]
    return node


def _record_call(tape: Tape, function: type, call: Any, args: Any, kwargs: Any) -> Any:
    tensors = tensors_in(args)
    body = Body(tape, function, tensors)
    first_held = len(tape.holding)
    node = _start_node(tape, body, function, args, kwargs) if is_pure(function) else None
    body.node = node
    versions = [t._version for t in tensors]
    tape.body = body
    # A cast taken from autocast's cache would be a hidden input of the replay.
    cache = node is not None and torch.is_autocast_cache_enabled()
    if cache:
        torch.set_autocast_cache_enabled(False)
    try:
        out = call(*args, **kwargs)
    finally:
        tape.body = None
        if cache:
            torch.set_autocast_cache_enabled(True)
    if node is None:
        return out
    saved, body.saved = body.saved, []  # held any longer they would be a cycle through the Function's own node
    if any(t._version != v for t, v in zip(tensors, versions, strict=True)):
        body.refuse("it writes to an argument")
    if body.refused is not None:
        _refuse(tape, body, function, first_held)
        return out
    _promote(tape, body, node, out, saved)
    return out


def _refuse(tape: Tape, body: Body, function: type, first_held: int) -> None:
    reason = f"autograd.Function {function.__qualname__} is declared pure, but {body.refused}"
    for record in tape.storages.values():
        if record.body is body:
            record.value.opaque = reason
    # Arguments held only for the node that will not be: pack holds what backward really needs.
    for value in tape.holding[first_held:]:
        if value.pending == 0 and value.node == LEAF and value.record is not None and value.record.body is not body:
            value.held = None


def _promote(tape: Tape, body: Body, node: FunctionNode, out: Any, saved: list[Tensor]) -> None:
    """Outputs and saved tensors on storages of this call become results of one node."""
    outs = out if type(out) is tuple else (out,)
    wanted: list[tuple[int, Value, Tensor]] = []
    seen: set[int] = set()
    candidates = [(k, t) for k, t in enumerate(outs) if isinstance(t, Tensor)]
    candidates += [(-1 - k, t) for k, t in enumerate(saved)]
    for k, tensor in candidates:
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            continue
        record = tape.storages.get(tensor.untyped_storage()._cdata)
        if record is not None and record.body is body and id(record.value) not in seen:
            seen.add(id(record.value))
            wanted.append((k, record.value, tensor))
    if not wanted:
        return
    node.saved_count = len(saved)
    node.generators = body.generators
    index = len(tape.nodes)
    for k, value, tensor in wanted:
        value.node = index
        value.foreign = False
        value.opaque = None
        value.base_layout = layout_of(tensor)
        discrete = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)
        if not discrete:
            value.answer = value.held = None
        elif value.held is None:  # R10
            value.answer = CheckpointPolicy.PREFER_SAVE
            tape.hold(value, tensor)
        node.outputs.append((k, value))
    tape.nodes.append(node)


def _is_ours(tape: Tape) -> bool:
    """Whether a Function called now is an outermost one whose saved tensors this tape packs."""
    if not tape.recording or tape.muted or tape.body is not None or not torch.is_grad_enabled():
        return False
    hook = _torch.current_saved_tensor_hooks()
    return getattr(hook, "__self__", None) is tape and not _torch.any_functorch_transform()


def install(find_tape: Callable[[], Tape | None]) -> None:
    """Route ``Function.apply`` inside regions through the tape. Outside of regions it costs about a microsecond."""
    base: Any = _torch.FUNCTION_WITH_APPLY

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = super(base, cls).apply
        tape = find_tape()
        if tape is not None and _is_ours(tape):
            return _record_call(tape, cls, call, args, kwargs)
        return call(*args, **kwargs)

    hook: Any = classmethod(apply)
    base.apply = hook
