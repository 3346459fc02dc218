"""What the tests of the tape share: counting operators, comparing bits, counting what is alive.

Law: a comparison is of bits (``torch.equal``); a count is of calls that really
happened, seen by a dispatch mode below everything that lowtide installs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide import checkpoint_wrapper
from lowtide.activations.links import Missed, Offer
from lowtide.activations.tape import Tape
from lowtide.activations.values import FunctionNode, Handle, Node, StorageRecord, Value
from lowtide.report.counters import RegionRow

__all__ = ["Operators", "alive", "backward_operators", "no_collector", "recompute", "results", "row_of", "unseen"]


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts every operator that runs under it, by name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[-1]] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> int:
        return sum(self.counts[name] for name in names)


def recompute(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``fn`` as a region that recomputes everything, and never changes its mode by itself."""
    return checkpoint_wrapper(fn, recompute="replay", **options)


def results(fn: Callable[..., Any], *inputs: Tensor, seed: int = 3) -> list[Tensor | None]:
    """Outputs, gradients of fresh copies of the inputs, and the generator's state of one step."""
    torch.manual_seed(seed)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in inputs]
    out = fn(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((o.abs() if o.is_complex() else o * o.detach().cos()).sum() for o in outs)
    loss.backward()
    return [*(o.detach().clone() for o in outs), *(leaf.grad for leaf in leaves), torch.get_rng_state()]


def same(want: list[Tensor | None], got: list[Tensor | None]) -> bool:
    """Whether two lists of results agree in every bit."""
    return len(want) == len(got) and all(
        w is g if w is None or g is None else w.dtype is g.dtype and torch.equal(w, g)
        for w, g in zip(want, got, strict=True)
    )


def backward_operators(fn: Callable[..., Any], *inputs: Tensor) -> Counter[str]:
    """The operators that one backward through ``fn`` runs, replays included."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = fn(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((o * o.detach().cos()).sum() for o in outs)
    with Operators() as operators:
        loss.backward()
    return operators.counts


def row_of(wrapped: Any) -> RegionRow:
    """The counters of a wrapped function or module."""
    region = getattr(wrapped, "_lowtide_region", None) or wrapped.forward.region
    return region.row


@contextmanager
def unseen() -> Iterator[None]:
    """Operators in the body run below every dispatch mode: writes are real, and nobody sees them."""
    with torch._C._DisableTorchDispatch():
        yield


@contextmanager
def no_collector() -> Iterator[None]:
    """Only reference counting frees anything in the body."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_OURS = (Tape, Value, Handle, Node, FunctionNode, StorageRecord, Offer, Missed)


def alive(*kinds: type) -> int:
    """How many tapes, values, handles, nodes and records (or of ``kinds``) exist now. Collects nothing."""
    # type(), not isinstance(): that would ask lazy proxies for their class, which imports what they stand for.
    wanted = set(kinds or _OURS)
    return sum(type(thing) in wanted for thing in gc.get_objects())
