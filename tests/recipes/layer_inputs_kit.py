"""What the tests of layer inputs share: a stack of blocks, its bits, and the bytes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import SwapManager, checkpoint_wrapper
from lowtide.recipes.layer_inputs import LayerInputs, SwapLayerInputManager, swap_layer_inputs

WIDTH, TOKENS = 128, 256
INPUT_BYTES = WIDTH * TOKENS * 4


class Block(nn.Module):
    """A residual MLP whose norm saves the block's input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(hidden_states))))
        return hidden_states + mixed


class Stack(nn.Module):
    """Blocks behind an embedding-like layer, so that no input of a block is the caller's own."""

    def __init__(self, count: int, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(count: int = 4, make: Callable[[], nn.Module] = Block, *, recompute: bool = True) -> Stack:
    torch.manual_seed(5)
    model = Stack(count, make)
    if recompute:
        for layer in model.layers:
            checkpoint_wrapper(layer, recompute="replay")
    return model


def swapped(
    count: int = 4, make: Callable[[], nn.Module] = Block, *, recompute: bool = True
) -> tuple[Stack, LayerInputs]:
    model = build(count, make, recompute=recompute)
    return model, swap_layer_inputs(list(model.layers))


def batch(seed: int = 0) -> Tensor:
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def steps(model: nn.Module, count: int = 2) -> list[Tensor]:
    """Losses and gradients of some steps."""
    found: list[Tensor] = []
    for seed in range(count):
        model.zero_grad()
        loss = model(batch(seed)).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *gradients(model)]
    return found


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def inputs_away() -> float:
    """How many inputs lie on the lower tier now."""
    return SwapManager().lower_bytes() / INPUT_BYTES


def alive(managers: Any) -> list[int]:
    """How many micro-batches of each layer are alive."""
    return [len(manager.batch_stack) for manager in managers]


def stats(managers: Any) -> list[list[str]]:
    return [[one.stat for one in manager.batch_stack] for manager in managers]


def no_managers() -> bool:
    """Whether nothing is registered any more, but for tags that were set up and have no layers."""
    return not any(len(group) for group in SwapLayerInputManager.manager_map.values())
