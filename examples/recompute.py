"""A plain training loop with each layer recomputed, against the same loop unwrapped.

Run: python examples/recompute.py
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide

LAYERS, WIDTH, HEADS, TOKENS, BATCH, STEPS = 3, 64, 4, 32, 4, 3


class Block(nn.Module):
    """Attention and an MLP with dropout, as in a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) in and out."""
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def train(*, wrapped: bool) -> list[torch.Tensor]:
    """Losses of every step and the weights after the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    if wrapped:
        for layer in model:
            lowtide.checkpoint_wrapper(layer, lowtide.save_matmuls_and_attention())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if wrapped:
        print(lowtide.report(model))
    return [*losses, *(p.detach() for p in model.parameters())]


def main() -> None:
    """Train twice and compare bit by bit."""
    torch.set_num_threads(1)
    plain, recomputed = train(wrapped=False), train(wrapped=True)
    equal = all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    print(f"losses and weights bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
