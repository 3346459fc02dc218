"""Every way in which a case program can be wrapped.

Holds one object per way; a program calls it for each layer, the kit calls its
``whole`` for the finished model. Law: a way changes only where activations
live and what is computed again, so every program must give the same bits under
each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.policy import save_matmuls_and_attention, swap_matmuls_and_attention

Link = Callable[[nn.Module, nn.Module], None]
Word = Callable[[bool, object], str]


class Around(nn.Module):
    """A block around one layer, so that an outer wrap can go around an inner one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


class ByFunction(nn.Module):
    """A block that runs its layer through a wrapped function instead of a wrapped module."""

    def __init__(self, layer: nn.Module, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = wrap(lambda *args, **kwargs: layer(*args, **kwargs))  # noqa: PLW0108 - a function, not the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def chain(first: nn.Module, second: nn.Module) -> None:
    SwapManager().set_forward_prefetch_layer(first, second)


@dataclass
class Way:
    """One way to wrap a layer, and how the order of the layers is told.

    Args:
        wrap: what is done to each layer.
        order: "none", "chain" (declared), "auto" (learned) or "tight" (learned, one byte may be in flight).
        python: the way runs a layer's Python a second time, as ``torch.utils.checkpoint`` does.
        around: layers are hidden behind a block.
    """

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    order: str = "none"
    python: bool = False
    around: bool = False
    handles: list[Any] = field(default_factory=list)

    def __call__(self, layer: nn.Module) -> nn.Module:
        return self.wrap(layer)

    @property
    def link(self) -> Link | None:
        return chain if self.order == "chain" else None

    def whole(self, model: nn.Module) -> None:
        if self.order == "tight":
            SwapManager().configure(in_flight_bytes=1)
        if self.order in {"auto", "tight"}:
            self.handles.append(lowtide.auto(model))

    def undo(self) -> None:
        for handle in self.handles:
            handle.undo()
        self.handles.clear()


def _recompute(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer)


def _inputs(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, swap_inputs=True)


def _save(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, save_matmuls_and_attention())


def _swap_ops(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, swap_matmuls_and_attention(), swap_inputs=True)


def _swap(layer: nn.Module) -> nn.Module:
    return swap_wrapper(layer)


def _call(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, recompute="call")


def _call_swap(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, swap_matmuls_and_attention(), swap_inputs=True, recompute="call")


def ways() -> list[Way]:
    """Every way, made anew (a way remembers what it has attached)."""
    return [
        Way("recompute", _recompute),
        Way("recompute-certified", lambda m: checkpoint_wrapper(m, certify=1000)),
        Way("recompute-inputs-chain", _inputs, "chain"),
        Way("recompute-inputs-auto", _inputs, "auto"),
        Way("save", _save),
        Way("swap-ops-unscheduled", _swap_ops),
        Way("swap-ops-chain", _swap_ops, "chain"),
        Way("swap-ops-auto", _swap_ops, "auto"),
        Way("swap-unscheduled", _swap),
        Way("swap-chain", _swap, "chain"),
        Way("swap-auto", _swap, "auto"),
        Way("swap-tight", _swap, "tight"),
        Way("swap-certified-auto", lambda m: swap_wrapper(m, certify=1000), "auto"),
        Way("checkpoint-in-swap-chain", lambda m: swap_wrapper(Around(checkpoint_wrapper(m))), "chain", around=True),
        Way("checkpoint-in-swap-auto", lambda m: swap_wrapper(Around(_swap_ops(m))), "auto", around=True),
        Way("swap-in-checkpoint-chain", lambda m: checkpoint_wrapper(Around(_swap(m))), "chain", around=True),
        Way("swap-in-checkpoint-auto", lambda m: checkpoint_wrapper(Around(_swap(m))), "auto", around=True),
        Way("function-recompute", lambda m: ByFunction(m, checkpoint_wrapper), around=True),
        Way("function-swap-auto", lambda m: ByFunction(m, swap_wrapper), "auto", around=True),
        Way("call", _call, python=True),
        Way("call-swap-auto", _call_swap, "auto", python=True),
    ]


WORDS = {
    "must": {
        "save": CheckpointPolicy.MUST_SAVE,
        "swap": CheckpointPolicy.MUST_SWAP,
        "recompute": CheckpointPolicy.MUST_RECOMPUTE,
    },
    "prefer": {
        "save": CheckpointPolicy.PREFER_SAVE,
        "swap": CheckpointPolicy.PREFER_SWAP,
        "recompute": CheckpointPolicy.PREFER_RECOMPUTE,
    },
}


@dataclass
class PolicyWay(Way):
    """A way for programs that bring their own policy, given in the words save, swap and recompute."""

    strength: str = "must"
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, layer: nn.Module, policy: Word | None = None) -> nn.Module:
        assert policy is not None
        word_of = policy

        def answer(ctx: Any, op: object, *_: Any, **__: Any) -> CheckpointPolicy:
            return WORDS[self.strength][word_of(ctx.is_recompute, op)]

        return checkpoint_wrapper(layer, answer, **self.options)


def policy_ways() -> list[PolicyWay]:
    """Every way for a program that brings its own policy."""
    return [
        PolicyWay("must", _recompute),
        PolicyWay("must-chain", _recompute, "chain"),
        PolicyWay("must-auto", _recompute, "auto"),
        PolicyWay("must-inputs-auto", _recompute, "auto", options={"swap_inputs": True}),
        PolicyWay("prefer", _recompute, strength="prefer"),
        PolicyWay("prefer-tight", _recompute, "tight", strength="prefer"),
        PolicyWay("must-certified-auto", _recompute, "auto", options={"certify": 1000}),
        PolicyWay("must-call", _recompute, python=True, options={"recompute": "call"}),
        PolicyWay("must-call-auto", _recompute, "auto", python=True, options={"recompute": "call"}),
    ]
