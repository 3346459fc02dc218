"""Recompute every layer and let its input leave the device: compare bits and peak with recompute alone.

Without an accelerator a file in the temporary directory is the lower tier.
Run: python examples/layer_inputs.py
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.measure import memory_curve
from lowtide.recipes.layer_inputs import swap_layer_inputs

LAYERS, WIDTH, TOKENS = 16, 128, 1024


class Block(nn.Module):
    """A residual MLP; its norm saves the block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        return hidden_states + self.mlp(hidden_states)


def build(device: torch.device, *, recompute: bool, swap: bool) -> nn.Module:
    """The same model each time: an embedding and a stack of layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, WIDTH), *(Block() for _ in range(LAYERS))).to(device)
    layers = list(model)[1:]
    if recompute:
        for layer in layers:
            lowtide.checkpoint_wrapper(layer)
    if swap:
        swap_layer_inputs(layers)
    return model


def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Loss of one step; leaves the gradients."""
    model.zero_grad()
    loss: torch.Tensor = model(ids).square().mean()
    loss.backward()
    return loss.detach()


def main() -> None:
    """One step each, bit by bit; then the peak of a further step."""
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    ids = torch.arange(TOKENS, device=device) % 64
    plain = build(device, recompute=False, swap=False)
    want = [step(plain, ids), *(p.grad for p in plain.parameters())]
    equal = True
    for recompute, swap in ((True, False), (True, True)):
        model = build(device, recompute=recompute, swap=swap)
        got = [step(model, ids), *(p.grad for p in model.parameters())]
        equal &= all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        peak = memory_curve(lambda model=model: step(model, ids), warmup=1).peak_bytes
        name = "recompute and swapped inputs" if swap else "recompute alone"
        print(f"peak of a step, {name}: {peak / 2**20:.2f} MiB")
    print(f"one input is {TOKENS * WIDTH * 4 / 2**20:.2f} MiB, and {LAYERS - 1} of {LAYERS} leave")
    print(lowtide.SwapManager().traffic)
    print(f"loss and gradients bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
