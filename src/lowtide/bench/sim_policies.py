"""The policies that the simulated bench compares, and which operators one of them may move for nothing.

Law: a policy changes a model in place and only through public names; taking it
off leaves the model as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import lowtide
from lowtide import CheckpointPolicy, MemoryConfig, SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.bench.modes import Kept
from lowtide.bench.sim_formula import Layers, Link
from lowtide.bench.sim_models import Shape
from lowtide.sim.describe import Description

__all__ = ["HIDEABLE", "POLICIES", "Policy", "Product", "best_fit", "hideable", "moving", "products", "worn"]

HIDEABLE = "swap-hideable"
_HALF = 2  # bytes of an element


@dataclass(frozen=True)
class Product:
    """A matrix product or attention of a layer: bytes of its result, and seconds to compute it again."""

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Policy:
    """What is done to each layer, and whether something moves, in the order that is learned.

    ``config`` is given to ``lowtide.apply`` in place of both; ``reads`` names the part of a layer whose backward is the
    first to read what moved.
    """

    name: str
    wrap: Callable[[nn.Module], object] | None = None
    moves: bool = False
    config: MemoryConfig | None = None
    reads: str | None = None


def products(shape: Shape, tokens: int, batch: int, device: Description) -> list[Product]:
    """List the products of a layer that a recompute would run again.

    The last one, ``down``, is not among them: nobody needs its result.
    """
    rows = batch * tokens
    narrow = shape.kv_heads * shape.head
    widths = {"q": shape.width, "k": narrow, "v": narrow, "o": shape.width, "gate": shape.hidden, "up": shape.hidden}
    found = []
    for name, width in widths.items():
        nbytes = rows * width * _HALF
        touched = nbytes + (rows + width) * shape.width * _HALF
        found.append(Product(name, nbytes, device.kernel_seconds(2 * rows * width * shape.width, touched)))
    attention = device.kernel_seconds(4 * rows * tokens * shape.width, 2 * rows * (shape.width + narrow) * _HALF)
    statistics = rows * shape.heads * 4
    return [*found, Product("sdpa", rows * shape.width * _HALF + statistics, attention)]


def best_fit(candidates: Iterable[Product], seconds: float, rate: float, latency: float) -> tuple[Product, ...]:
    """Choose the products whose recompute costs most among those that a link can move in so many seconds."""
    known = list(candidates)
    fitting: list[tuple[Product, ...]] = [
        chosen
        for size in range(len(known) + 1)
        for chosen in itertools.combinations(known, size)
        if sum(p.nbytes / rate + latency for p in chosen) <= seconds
    ]
    # Of equal gains the fewest bytes; then the order of the list, so that the choice is the same every time.
    return max(fitting, key=lambda chosen: (sum(p.seconds for p in chosen), -sum(p.nbytes for p in chosen)), default=())


def hideable(
    layers: Layers, link: Link, candidates: Iterable[Product], input_bytes: int, latency: float
) -> tuple[Product, ...]:
    """Choose what a layer moves within its own time, after its input, which moves in any case.

    ``latency`` is that of one copy; each product is one.
    """
    rate, seconds = min(link.out, link.inward), min(layers.forward, layers.again)
    return best_fit(candidates, seconds - input_bytes / rate - latency, rate, latency)


def moving(chosen: Iterable[Product], counts: dict[Any, int]) -> Policy:
    """Move a layer's input and the results of the chosen products, recompute the rest."""
    names = tuple(product.name for product in chosen)

    def wrap(layer: nn.Module) -> object:
        kept = Kept(names, counts, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.PREFER_RECOMPUTE)
        return checkpoint_wrapper(layer, kept, swap_inputs=True)

    return Policy(HIDEABLE, wrap, moves=True)


_CHUNKS = MemoryConfig(recompute_method="uniform", full_recompute_num_layers=4)


def _fitting(config: MemoryConfig, layers: int) -> MemoryConfig:
    """Fit a configuration to fewer layers than it is meant for."""
    if config.chunk_layers > layers:
        config = replace(config, full_recompute_num_layers=layers)
    # One layer is no chain; it stays under either schedule.
    return replace(config, swap_schedule="auto") if config.swaps and layers == 1 else config


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("plain"),
        Policy("recompute", checkpoint_wrapper),
        Policy("recompute+swap-inputs", lambda layer: checkpoint_wrapper(layer, swap_inputs=True), moves=True),
        Policy("recompute+chunks", config=_CHUNKS),
        Policy("save", lambda layer: checkpoint_wrapper(layer, lowtide.save_matmuls_and_attention())),
        Policy(
            "swap",
            lambda layer: checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True),
            moves=True,
        ),
        # What it moves depends on the times of the plain layers: made when they are known.
        Policy(HIDEABLE, moves=True),
        Policy("swap-attention", moves=True, config=MemoryConfig(swap_attention=True), reads="self_attn"),
        Policy("swap-all", swap_wrapper, moves=True),
    )
}


class worn:  # noqa: N801 - reads as a verb: with worn(policy, model)
    """Put a policy on every layer of ``model.blocks`` for the length of a block of code."""

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self.model = model
        self.order: lowtide.Auto | lowtide.Applied | None = None

    def __enter__(self) -> None:
        SwapManager().reset()
        blocks: Any = self.model.blocks
        config = self.policy.config
        if config is not None:
            self.order = lowtide.apply(self.model, _fitting(config, len(blocks)))
            return
        if self.policy.wrap is not None:
            for layer in blocks:
                self.policy.wrap(layer)
        if self.policy.moves:
            self.order = lowtide.auto(self.model)

    def __exit__(self, *failure: object) -> None:
        if self.order is not None:
            self.order.undo()
        blocks: Any = self.model.blocks
        for layer in blocks:
            lowtide.unwrap(layer)
        SwapManager().reset()
