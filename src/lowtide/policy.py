"""WHAT happens to a saved tensor: the answers, how they combine, and ready-made policies.

Law: an answer that is not understood raises; nothing is guessed. Answers are
ordered (KEEP over SWAP over RECOMPUTE, any ``MUST`` over any ``PREFER``), so
that two policies that speak of the same bytes combine without a special case.
Runs no tensor code and knows no device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from lowtide.errors import PolicyError, explain

__all__ = [
    "CheckpointPolicy",
    "Fate",
    "OperatorPolicy",
    "PolicyFn",
    "SelectiveCheckpointContext",
    "TensorPolicyFn",
    "as_policy",
    "composite_of",
    "fate_of",
    "is_must",
    "save_matmuls_and_attention",
    "save_ops",
    "stronger",
    "swap_matmuls_and_attention",
    "swap_ops",
]


class CheckpointPolicy(enum.IntEnum):
    """The answer of a policy for one operator output or one saved tensor (U1).

    ``MUST_SWAP`` raises where the lower tier has no room; ``PREFER_SWAP`` stays
    on the device and is counted. Both apply to what may move at all: not to
    parameters, nor below ``min_bytes``, nor without a schedule (U7); the report
    counts those. ``MUST_RECOMPUTE`` keeps what must not run twice, and counts it. ``MUST_SWAP`` and ``PREFER_SWAP``
    equal torch's ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` in name order
    and value; torch's own members are accepted wherever these are.

    >>> CheckpointPolicy.MUST_SWAP.value
    4
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4
    PREFER_SWAP = 5


class Fate(enum.IntEnum):
    """What becomes of a value's bytes once its region has ended; larger wins."""

    RECOMPUTE = 0
    SWAP = 1
    KEEP = 2


class SelectiveCheckpointContext:
    """First argument of a ``policy_fn``.

    ``is_recompute`` tells forward from recompute. On the tape a policy is asked
    once, in forward, so it is False there; only the contexts of
    :func:`lowtide.create_selective_checkpoint_contexts` exist in both phases.

    >>> SelectiveCheckpointContext(is_recompute=False).is_recompute
    False
    """

    __slots__ = ("is_recompute",)

    def __init__(self, *, is_recompute: bool) -> None:
        self.is_recompute = is_recompute


PolicyFn = Callable[..., Any]
TensorPolicyFn = Callable[[torch.Tensor], Any]

_FATES: Final = {
    CheckpointPolicy.MUST_SAVE: Fate.KEEP,
    CheckpointPolicy.PREFER_SAVE: Fate.KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.MUST_SWAP: Fate.SWAP,
    CheckpointPolicy.PREFER_SWAP: Fate.SWAP,
}
_MUST: Final = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SWAP})
_STRENGTH: Final = {answer: fate + (3 if answer in _MUST else 0) for answer, fate in _FATES.items()}

# torch 2.10 has four members, 2.12.1 and newer six; values were never renumbered.
_FROM_TORCH: Final = {member: CheckpointPolicy(member.value) for member in TorchPolicy}


def as_policy(answer: object, where: str) -> CheckpointPolicy:
    """Turn what a policy returned into a :class:`CheckpointPolicy`, or raise :class:`PolicyError`."""
    if type(answer) is CheckpointPolicy:
        return answer
    if type(answer) is TorchPolicy:
        return _FROM_TORCH[answer]
    raise PolicyError(
        explain(
            "a policy gave no answer that lowtide knows",
            expected="a member of lowtide.CheckpointPolicy",
            got=repr(answer),
            where=where,
            remedy="Return CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE, MUST_SWAP or one of the PREFER_ members.",
        )
    )


def fate_of(answer: CheckpointPolicy) -> Fate:
    """The fate an answer asks for, forgetting how strongly.

    >>> fate_of(CheckpointPolicy.PREFER_SWAP)
    <Fate.SWAP: 1>
    """
    return _FATES[answer]


def is_must(answer: CheckpointPolicy) -> bool:
    """Whether an answer must be honoured.

    >>> is_must(CheckpointPolicy.PREFER_SAVE)
    False
    """
    return answer in _MUST


def stronger(first: CheckpointPolicy, second: CheckpointPolicy) -> CheckpointPolicy:
    """The one of two answers about the same bytes that wins.

    >>> stronger(CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SWAP).name
    'MUST_SWAP'
    """
    return first if _STRENGTH[first] >= _STRENGTH[second] else second


# What a dispatch mode sees when one of these is called: a policy that lists the
# composite means its parts (U3). Parts that one torch lacks are skipped.
_COMPOSITES: Final[dict[str, tuple[str, ...]]] = {
    "aten::matmul": ("mm", "bmm", "mv", "dot"),
    "aten::linear": ("mm", "addmm", "bmm"),
    "aten::einsum": ("bmm", "mm"),
    "aten::scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "aten::conv1d": ("convolution",),
    "aten::conv2d": ("convolution",),
    "aten::conv3d": ("convolution",),
    "aten::layer_norm": ("native_layer_norm",),
    "aten::group_norm": ("native_group_norm",),
    "aten::rms_norm": ("_fused_rms_norm",),
    "aten::dropout": ("native_dropout", "bernoulli_"),
}


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _parts(schema_name: str) -> list[Any]:
    found: list[Any] = []
    for part in _COMPOSITES.get(schema_name, ()):
        packet = getattr(torch.ops.aten, part, None)
        if packet is not None:
            found.extend(_overloads(packet))
    return found


def _composite_table() -> dict[Any, tuple[Any, ...]]:
    table: dict[Any, tuple[Any, ...]] = {}
    for name in ("aten::matmul", "aten::linear", "aten::scaled_dot_product_attention"):
        composite = getattr(torch.ops.aten, name.split("::")[1]).default
        for part in _parts(name):
            table[part] = (*table.get(part, ()), composite)
    return table


_COMPOSITE_OF: Final = _composite_table()


def composite_of(op: Any) -> tuple[Any, ...]:
    """The composite operators that may stand behind ``op``: a policy may know it only by their name (U3)."""
    return _COMPOSITE_OF.get(op, ())


def _resolve(op: Any) -> list[Any]:
    """Every overload that an entry of a ready-made set means."""
    if isinstance(op, str):
        name = op.replace("::", ".")
        namespace, _, rest = name.partition(".") if "." in name else ("aten", "", name)
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name, None)
        found = None if packet is None else (getattr(packet, overload, None) if overload else packet)
        if found is None:
            raise PolicyError(
                explain(
                    "an operator of this name does not exist",
                    expected="the name of a registered operator, such as 'aten.mm' or 'aten.addmm.default'",
                    got=repr(op),
                    where="policy",
                    remedy="Look it up in torch.ops, and import the library that registers it first.",
                )
            )
        op = found
    if isinstance(op, torch._ops.OpOverloadPacket):
        return _overloads(op) + _parts(op._qualified_op_name)
    if isinstance(op, torch._ops.OpOverload):
        return [op, *_parts(op._schema.name)]
    raise PolicyError(
        explain(
            "a ready-made policy was given something that is no operator",
            expected="operators such as torch.ops.aten.mm, or their names",
            got=repr(op),
            where="policy",
            remedy="Pass torch.ops.aten.<name> or the string 'aten.<name>'.",
        )
    )


@dataclass(unsafe_hash=True)
class OperatorPolicy:
    """A policy that gives one answer for a set of operators and another for the rest.

    ``occurred`` collects which of them really ran, so that the report can name a
    listed operator that never did (a typo there would be a silent no-op).

    >>> policy = save_ops(torch.ops.aten.mm)
    >>> policy(None, torch.ops.aten.mm.default).name
    'MUST_SAVE'
    """

    asked: tuple[Any, ...]
    answer: CheckpointPolicy
    otherwise: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE
    report_unused: bool = True
    members: frozenset[Any] = field(init=False, repr=False)
    occurred: set[Any] = field(init=False, repr=False, compare=False, default_factory=set)
    # What was answered for which operator of the tape; kept here because frames are made anew in every call.
    answers: dict[Any, CheckpointPolicy | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.members = frozenset(one for op in self.asked for one in _resolve(op))

    def __call__(self, _ctx: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        """The answer for one operator, whatever its arguments."""
        if op in self.members:
            self.occurred.add(op)
            return self.answer
        return self.otherwise

    def __getstate__(self) -> dict[str, Any]:
        names = tuple(op if isinstance(op, str) else str(op) for op in self.asked)
        return {
            "asked": names,
            "answer": self.answer,
            "otherwise": self.otherwise,
            "report_unused": self.report_unused,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def never_occurred(self) -> list[str]:
        """Names of the listed operators of which no overload and no part has run so far.

        Of a ready-made list only the case that none of them ran is worth a word.
        """
        if not self.report_unused and self.occurred:
            return []
        return [str(op) for op in self.asked if self.occurred.isdisjoint(_resolve(op))]


def _flatten(ops: Iterable[Any]) -> tuple[Any, ...]:
    flat: list[Any] = []
    for op in ops:
        if isinstance(op, (list, tuple, set, frozenset)):
            flat.extend(op)
        else:
            flat.append(op)
    return tuple(flat)


def save_ops(*ops: Any) -> OperatorPolicy:
    """Keep the outputs of ``ops`` on the device, recompute the rest.

    ``ops`` are overloads, packets or names; composites (``aten.matmul``) mean
    what they decompose to. Costs the bytes of those outputs that backward needs:
    an output nobody needs is dropped.

    >>> save_ops("aten.mm", torch.ops.aten.addmm).answer.name
    'MUST_SAVE'
    """
    return OperatorPolicy(_flatten(ops), CheckpointPolicy.MUST_SAVE)


def swap_ops(*ops: Any) -> OperatorPolicy:
    """Move the outputs of ``ops`` to the lower tier, recompute the rest.

    Needs a schedule (a chain, a group call or :func:`lowtide.auto`): without
    one nothing moves and the outputs are kept (U7).

    >>> swap_ops("aten.mm").answer.name
    'MUST_SWAP'
    """
    return OperatorPolicy(_flatten(ops), CheckpointPolicy.MUST_SWAP)


_HEAVY: Final = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.scaled_dot_product_attention")


def save_matmuls_and_attention() -> OperatorPolicy:
    """Keep the results of matrix products and of fused attention, recompute the rest.

    >>> save_matmuls_and_attention()(None, torch.ops.aten.addmm.default).name
    'MUST_SAVE'
    """
    return OperatorPolicy(_HEAVY, CheckpointPolicy.MUST_SAVE, report_unused=False)


def swap_matmuls_and_attention() -> OperatorPolicy:
    """Move the results of matrix products and of fused attention to the lower tier, recompute the rest.

    >>> swap_matmuls_and_attention()(None, torch.ops.aten.addmm.default).name
    'MUST_SWAP'
    """
    return OperatorPolicy(_HEAVY, CheckpointPolicy.MUST_SWAP, report_unused=False)
