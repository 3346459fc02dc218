"""Swap the activations of every layer in the learned order; compare bits and peak with the unwrapped model.

Without an accelerator a file in the temporary directory is the lower tier.
Run: python examples/swap_auto.py
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.measure import memory_curve

LAYERS, WIDTH, TOKENS = 6, 128, 512


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        return x + self.mlp(x)


def build(device: torch.device, *, swapped: bool) -> nn.Module:
    """The same model, with its layers wrapped or not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    if swapped:
        for layer in model:
            lowtide.swap_wrapper(layer)
        lowtide.auto(model)
    return model


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Loss of one step; leaves the gradients."""
    model.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def main() -> None:
    """One step each, bit by bit; then the peak of a further step."""
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    plain, swapped = build(device, swapped=False), build(device, swapped=True)
    x = torch.randn(TOKENS, WIDTH, device=device)
    equal = torch.equal(step(plain, x), step(swapped, x)) and all(
        torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), swapped.parameters(), strict=True)
    )
    print(lowtide.report(swapped))
    print(lowtide.SwapManager().traffic)
    for name, model in (("plain", plain), ("swapped", swapped)):
        peak = memory_curve(lambda model=model: step(model, x), warmup=1).peak_bytes
        print(f"peak of a step, {name}: {peak / 2**20:.2f} MiB")
    print(f"loss and gradients bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
