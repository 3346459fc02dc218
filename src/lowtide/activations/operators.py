"""What the tape must know of an operator, found out once per overload from its schema.

Law: an operator is replayed only if its schema is known to tell the whole
truth (rules R1, R4, R5); everything else is opaque and its results are kept.
Performs no tensor work.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Final

import torch

from lowtide import _torch
from lowtide.policy import composite_of

__all__ = ["Kind", "Operator", "declare_pure", "known_operators", "operator_of", "pure_overloads"]


class Kind(enum.IntEnum):
    """How the tape treats a call."""

    PASS = 0  # views, metadata, host reads: values live at storage level, there is nothing to record
    PURE = 1  # recorded and replayed
    WRITE = 2  # likewise, and it overwrites arguments
    EMPTY = 3  # hands out uninitialised memory
    OPAQUE = 4  # run, never replayed: results are leaves
    POISON = 5  # changes the storage itself (set_, resize_)


_EMPTY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)  # R3
_FULL_WRITES: Final = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
    | {"log_normal_", "cauchy_", "geometric_"}
)
# R4: schemas that hide a write or a state.
_LIARS: Final = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_fused_moving_avg_obs_fq_helper"}
    | {"_cudnn_init_dropout_state", "record_stream", "_native_batch_norm_legit_functional"}
)
_RESIZERS: Final = frozenset({"set_", "resize_", "resize_as_", "resize_output_"})
# R10: results that may change from run to run on an accelerator (atomics): never replayed there.
# torch 2.13 has the tag `nondeterministic_bitwise` but no aten operator carries it.
_ATOMIC: Final = frozenset(
    {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
    | {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "put", "put_", "bincount", "histc"}
    | {"embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", "embedding_dense_backward"}
    | {"grid_sampler_2d_backward", "grid_sampler_3d_backward", "cumsum", "kthvalue", "median", "_segment_reduce"}
    | {"upsample_bilinear2d_backward", "max_unpool2d", "ctc_loss", "_ctc_loss"}
)
_TRUSTED_NAMESPACES: Final = frozenset({"aten", "prims"})  # R1
pure_overloads: set[Any] = set()
_nondeterministic_bitwise = getattr(torch.Tag, "nondeterministic_bitwise", None)


class Operator:
    """Facts about one overload; see the attribute comments."""

    __slots__ = (
        "atomic",
        "call",
        "communicates",
        "composites",
        "dropout_p",
        "full_write",
        "func",
        "kind",
        "list_positions",
        "name",
        "random",
        "tensor_positions",
        "trust_writes",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.call = _torch.direct_call(func)
        self.name: str = schema.name.split("::")[-1]
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        # (position, name) of every argument the schema says is written
        self.writes = tuple((i, a.name) for i, a in enumerate(schema.arguments) if written[i])
        tensors, lists = _positions(schema)
        self.tensor_positions = tensors  # positional arguments that may be a tensor
        self.list_positions = lists  # positional arguments that may be a list of tensors
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.atomic = self.name in _ATOMIC or _nondeterministic_bitwise in func.tags
        # An out= overload, told by its schema: torch 2.10 has no tag for it, and later ones tag operators with it that
        # update other arguments besides (_fused_adamw.out).
        out = all(a.kwarg_only for a, w in zip(schema.arguments, written, strict=True) if w)
        self.full_write = bool(self.writes) and (self.name in _FULL_WRITES or out)
        # flash attention is tagged random whether or not it drops: look at dropout_p first (R9)
        self.dropout_p = next((i for i, a in enumerate(schema.arguments) if a.name == "dropout_p"), -1)
        self.communicates = func.namespace.startswith(("c10d", "_c10d", "fsdp"))  # with other ranks (R5)
        # whether the schema's write annotations are the contract (R4, R5)
        self.trust_writes = not (func.namespace.startswith("c10d") or self.name in _LIARS or self.name in _RESIZERS)
        self.composites = composite_of(func)
        self.kind = _kind_of(func, schema, self.name)

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call takes numbers from a generator."""
        if not self.random:
            return False
        if self.dropout_p < 0:
            return True
        p = args[self.dropout_p] if self.dropout_p < len(args) else kwargs.get("dropout_p", 0.0)
        return bool(p > 0.0)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors this call writes according to its schema."""
        found: list[torch.Tensor] = []
        for position, name in self.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif value is not None:
                found.extend(value)
        return found


def _positions(schema: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tensors: list[int] = []
    lists: list[int] = []
    for position, argument in enumerate(schema.arguments):
        kind = argument.type
        if isinstance(kind, torch.OptionalType):
            kind = kind.getElementType()
        if isinstance(kind, torch.TensorType):
            tensors.append(position)
        elif isinstance(kind, torch.ListType):
            element = kind.getElementType()
            if isinstance(element, torch.OptionalType):
                element = element.getElementType()
            if isinstance(element, torch.TensorType):
                lists.append(position)
        elif isinstance(kind, torch.AnyType):
            tensors.append(position)
    return tuple(tensors), tuple(lists)


def _kind_of(func: Any, schema: Any, name: str) -> Kind:
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliases = [r.alias_info is not None for r in schema.returns]
    trusted = func.namespace in _TRUSTED_NAMESPACES or func in pure_overloads
    is_view = torch.Tag.inplace_view in func.tags or (not writes and bool(aliases) and all(aliases))
    makes_tensors = any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in schema.returns)
    if name in _RESIZERS:
        kind = Kind.POISON
    elif func.namespace == "prim":
        kind = Kind.PASS
    elif not trusted or name in _LIARS or torch.Tag.maybe_aliasing_or_mutating in func.tags:
        kind = Kind.OPAQUE
    elif is_view or not (writes or makes_tensors):
        kind = Kind.PASS
    elif name in _EMPTY:
        kind = Kind.EMPTY
    else:
        kind = Kind.WRITE if writes else Kind.PURE
    return kind


# Every overload seen so far, by identity: an overload's own hash is a Python call, and we keep it alive.
known_operators: dict[int, Operator] = {}


def operator_of(func: Any) -> Operator:
    """The facts about an overload, found out at its first call."""
    found = known_operators.get(id(func))
    if found is None:
        found = known_operators[id(func)] = Operator(func)
    return found


def declare_pure(overloads: Iterable[Any]) -> None:
    """Trust overloads of a custom namespace to be pure: same inputs, same bits, no hidden write."""
    for overload in overloads:
        pure_overloads.add(overload)
        known_operators.pop(id(overload), None)
