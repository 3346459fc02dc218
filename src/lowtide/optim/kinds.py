"""What an optimizer's class computes with: whether its tensors may be cut, and what state it keeps.

Law: a class is cut only where it is known, or declared, to treat every element
by itself, and it is stepped tensor by tensor only where that gives the bits of
one step over all. What is not known is tried on a few small tensors when the
optimizer is wrapped, never guessed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.errors import UnsupportedError, explain
from lowtide.optim.worker import Share, Worker

__all__ = ["Kind", "StateSpec", "kind_of", "spec_from_state", "spec_of"]

Tensor = torch.Tensor


class Kind(enum.Enum):
    """How an optimizer may be taken apart."""

    ELEMENTWISE = "elementwise"
    WHOLE_TENSOR = "whole tensors"


_CUT_ANYWHERE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
_WHOLE = frozenset({torch.optim.Adafactor, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])})
_REFUSED: dict[type, str] = {
    torch.optim.LBFGS: "it calls its closure many times a step and keeps one history over all parameters",
    torch.optim.SparseAdam: "its gradients are sparse",
}


@dataclass(frozen=True)
class StateSpec:
    """The state of one parameter: arrays that may move, by name.

    ``arrays`` gives the type of an element and, where it is not the parameter's own, the shape. What is not an array
    (a step count, a number) stays with the optimizer.
    """

    arrays: Mapping[str, tuple[torch.dtype, torch.Size | None]] = field(default_factory=dict)


def kind_of(optimizer: torch.optim.Optimizer, *, elementwise: bool | None, where: str) -> tuple[Kind, str | None]:
    """How to take ``optimizer`` apart, and what a user should know of that.

    Raises:
        UnsupportedError: it cannot be: a closure that is called often, sparse gradients, a step that is differentiated,
            parameters that depend on each other, or ``elementwise=True`` for a class that is not.
    """
    cls = type(optimizer)
    for base, why in _REFUSED.items():
        if isinstance(optimizer, base):
            raise _refused(cls, why, where)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise _refused(cls, "differentiable=True keeps every step in the graph", where)
    if cls in _CUT_ANYWHERE and elementwise is not False:
        return Kind.ELEMENTWISE, None
    if cls in _WHOLE and not elementwise:
        return Kind.WHOLE_TENSOR, None
    if elementwise:
        if not _same_bits(optimizer, _cut):
            raise _refused(cls, "elementwise=True, but a tensor that is cut comes out with other bits", where)
        return Kind.ELEMENTWISE, None
    if not _same_bits(optimizer, _apart):
        raise _refused(cls, "its parameters depend on each other: one by one they come out with other bits", where)
    return Kind.WHOLE_TENSOR, (
        f"{cls.__module__}.{cls.__qualname__} is not known: each tensor is stepped whole, so the largest one decides "
        "the peak. If it treats every element by itself, say elementwise=True."
    )


def _refused(cls: type, why: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{cls.__name__} cannot be taken apart",
            expected="an optimizer that updates each element, or each tensor, by itself",
            got=why,
            where=where,
            remedy="Leave this optimizer as it is; swap activations instead.",
        )
    )


# ---- trying it out -------------------------------------------------------------------------------


def _same_bits(optimizer: torch.optim.Optimizer, way: Callable[[Tensor], list[tuple[slice, ...]]]) -> bool:
    """Whether three steps over two small matrices, each taken apart in some ``way``, equal three over both whole."""
    parameter = next(p for group in optimizer.param_groups for p in group["params"])
    where, dtype = parameter.device, parameter.dtype
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(12, 8, generator=draw).to(where, dtype) for _ in range(2)]
    grads = [[torch.randn(12, 8, generator=draw).to(where, dtype) for _ in range(2)] for _ in range(3)]
    together = [Share(0, v.clone(), g) for v, g in zip(values, grads[0], strict=True)]
    apart = [(v.clone(), way(v)) for v in values]
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for step in grads:
        worker = Worker(optimizer)
        for share, grad in zip(together, step, strict=True):
            share.grad = grad.clone()
        worker.update(together)
        for number, (value, cuts) in enumerate(apart):
            for piece, cut in enumerate(cuts):
                share = Share(0, value[cut].clone(), step[number][cut].clone(), states.get((number, piece), {}))
                Worker(optimizer).update([share])
                states[number, piece] = share.state
                value[cut] = share.target
    return all(torch.equal(share.target, value) for share, (value, _) in zip(together, apart, strict=True))


def _cut(tensor: Tensor) -> list[tuple[slice, ...]]:
    return [(slice(0, 5),), (slice(5, None),)]


def _apart(tensor: Tensor) -> list[tuple[slice, ...]]:
    return [(slice(None),)]


def spec_from_state(state: Mapping[str, Any], shape: torch.Size, kind: Kind) -> StateSpec:
    """Which entries of a parameter's state are arrays; the others are numbers and stay."""
    arrays: dict[str, tuple[torch.dtype, torch.Size | None]] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dim() == 0:
            continue
        if value.shape == shape:
            arrays[name] = (value.dtype, None)
        elif kind is Kind.WHOLE_TENSOR:
            arrays[name] = (value.dtype, value.shape)
    return StateSpec(arrays)


def spec_of(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: torch.Size,
    *,
    dtype: torch.dtype,
    where: torch.device,
    kind: Kind,
) -> StateSpec:
    """What state one step makes for a parameter, found by a step over zeros.

    Elementwise classes are tried on two elements, others on a tensor of the shape itself.
    """
    tried = torch.Size((2,)) if kind is Kind.ELEMENTWISE else shape
    share = Share(group, torch.zeros(tried, dtype=dtype, device=where), torch.zeros(tried, dtype=dtype, device=where))
    Worker(optimizer).update([share])
    return spec_from_state(share.state, tried, kind)
