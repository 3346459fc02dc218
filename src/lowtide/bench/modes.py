"""Every way in which the bench runs a model: plainly, by its peers, and by lowtide.

Holds named kept sets (which operator results of a block survive forward) and
named modes. Law: a mode changes a model in place and only through public
names; peers and lowtide get the very same kept set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper

__all__ = ["KEPT_SETS", "MODES", "PEERS", "UNDECLARED", "Kept", "Mode", "operator_counts"]

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
# Operator results of a Llama block by name: the operator, and which of its calls in the block it is.
_MM, _ADD = aten.mm.default, aten.add.Tensor
NAMED: dict[str, tuple[tuple[Any, int], ...]] = {
    "q": ((_MM, 0),),
    "k": ((_MM, 1),),
    "v": ((_MM, 2),),
    "rope q": ((_ADD, 1),),
    "rope k": ((_ADD, 2),),
    "sdpa": tuple((op, 0) for op in ATTENTION),
    "o": ((_MM, 3),),
    "mid residual": ((_ADD, 3),),
    "gate": ((_MM, 4),),
    "up": ((_MM, 5),),
    "down": ((_MM, 6),),
}
KEPT_SETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "sdpa": ("sdpa",),
    "sdpa, gate, up": ("sdpa", "gate", "up"),
    "mid residual": ("mid residual",),
    "mid residual, sdpa": ("mid residual", "sdpa"),
    "rope q, rope k, v, sdpa, gate, up": ("rope q", "rope k", "v", "sdpa", "gate", "up"),
    "rope q, rope k, v, sdpa, gate, up, o": ("rope q", "rope k", "v", "sdpa", "gate", "up", "o"),
    "all mm, sdpa": ("q", "k", "v", "sdpa", "o", "gate", "up", "down"),
}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def operator_counts(block: nn.Module, x: Tensor) -> dict[Any, int]:
    """Run a block once and count its operators; costs one forward."""
    counter = _Counter()
    with counter:
        block(x)
    return counter.counts


@dataclass
class Kept:
    """A policy that answers ``yes`` for chosen calls of chosen operators of a block, and ``no`` for the rest.

    Counts calls by operator and starts anew after each block's worth of them,
    so it must see every operator of every block exactly once.
    """

    names: tuple[str, ...]
    counts: dict[Any, int]
    yes: Any
    no: Any
    seen: dict[Any, int] = field(default_factory=dict)
    wanted: set[tuple[Any, int]] = field(init=False)

    def __post_init__(self) -> None:
        """Look the names up."""
        self.wanted = {call for name in self.names for call in NAMED[name]}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer for the next call of an operator."""
        number = self.seen.get(op, 0)
        self.seen[op] = (number + 1) % self.counts.get(op, 1)
        return self.yes if (op, number) in self.wanted else self.no


class Checkpointed(nn.Module):
    """A block that runs under ``torch.utils.checkpoint``, with a selective policy or without."""

    def __init__(self, block: nn.Module, policy: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.block = block
        self.options: dict[str, Any] = {"use_reentrant": False}
        if policy is not None:
            self.options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy())

    def forward(self, x: Tensor) -> Tensor:
        """Run the block, to be run again in backward."""
        result: Tensor = checkpoint(self.block, x, **self.options)
        return result


Context = Callable[[], contextlib.AbstractContextManager[Any]]
Wrap = Callable[[nn.Module, "Kept | None"], nn.Module]


@dataclass(frozen=True)
class Mode:
    """A way to run a model.

    Args:
        wrap: what is done to each block; gets the kept set where the mode takes one.
        selective: the mode takes a kept set; without one it keeps matmuls and attention.
        answers: what the kept set's policy answers for yes and no.
        around: a context in which the whole forward runs.
        order: the mode moves values, so the order of the blocks is to be learned.
    """

    name: str
    wrap: Wrap
    selective: bool = False
    answers: tuple[Any, Any] = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
    around: Context = contextlib.nullcontext
    order: bool = False

    def prepare(self, model: nn.Module, kept: Callable[[Any, Any], Kept] | None = None) -> None:
        """Wrap every block of ``model.blocks`` in place; ``kept`` builds the policy from (yes, no)."""
        blocks: Any = model.blocks
        for i, block in enumerate(blocks):
            policy = kept(*self.answers) if self.selective and kept is not None else None
            blocks[i] = self.wrap(block, policy)
        if self.order:
            lowtide.auto(model)


def _matmuls(yes: Any, no: Any) -> Any:
    """Answer yes for mm, addmm and attention, by a set lookup: the cheapest policy there is."""
    chosen = {aten.mm.default, aten.addmm.default, aten.bmm.default, *ATTENTION}
    return lambda ctx, op, *args, **kwargs: yes if op in chosen else no


def _sac(block: nn.Module, kept: Kept | None) -> nn.Module:
    answers = (TorchPolicy.MUST_SAVE, TorchPolicy.PREFER_RECOMPUTE)
    if kept is None:
        return Checkpointed(block, partial(_matmuls, *answers))
    return Checkpointed(block, lambda: Kept(kept.names, kept.counts, *answers))


def _ours(answer: CheckpointPolicy, *, inputs: bool = False) -> Wrap:
    def wrap(block: nn.Module, kept: Kept | None) -> nn.Module:
        policy = kept if kept is not None else _matmuls(answer, CheckpointPolicy.MUST_RECOMPUTE)
        return checkpoint_wrapper(block, policy, swap_inputs=inputs)

    return wrap


@contextlib.contextmanager
def _save_on_cpu() -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu():
        yield


PEERS: tuple[Mode, ...] = (
    Mode("plain", lambda block, kept: block),
    Mode("checkpoint", lambda block, kept: Checkpointed(block)),
    Mode("sac", _sac, selective=True),
    Mode("save_on_cpu", lambda block, kept: block, around=_save_on_cpu),
)
OURS: tuple[Mode, ...] = (
    Mode("recompute", lambda block, kept: checkpoint_wrapper(block)),
    Mode("keep", _ours(CheckpointPolicy.MUST_SAVE), selective=True),
    Mode(
        "swap",
        _ours(CheckpointPolicy.MUST_SWAP),
        selective=True,
        answers=(CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE),
        order=True,
    ),
    Mode("swap all", lambda block, kept: swap_wrapper(block), order=True),
)
# For blocks of Functions that nobody declared: "auto" would run their Python again from the second step on.
UNDECLARED = Mode("recompute undeclared", lambda block, kept: checkpoint_wrapper(block, recompute="replay"))
MODES: dict[str, Mode] = {mode.name: mode for mode in (*PEERS, *OURS)}


def reset() -> None:
    """Forget every order and setting of the swap manager, so that cases do not see each other."""
    SwapManager().reset()
