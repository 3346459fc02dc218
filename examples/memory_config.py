"""One configuration for a whole model: activation functions and norms recompute, attention moves; compare the bits.

The same fields can come from a YAML file (MemoryConfig.from_yaml) or from command-line options (add_arguments).
Run: python examples/memory_config.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.measure import memory_curve

LAYERS, WIDTH, HEADS, TOKENS = 6, 128, 4, 512


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        q, k, v = self.qkv(x).view(1, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(TOKENS, WIDTH))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attention = nn.LayerNorm(WIDTH), Attention()
        self.post_attention_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) in and out."""
        x = x + self.self_attention(self.input_norm(x))
        return x + self.mlp(self.post_attention_norm(x))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def main() -> None:
    """One step as it is and one under each configuration."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer() for _ in range(LAYERS))), torch.randn(TOKENS, WIDTH)
    want = [t.clone() for t in step(model, x)]
    print(f"plain: {memory_curve(lambda: step(model, x), warmup=1).peak_bytes / 2**20:.2f} MiB")
    for given in (
        {"recompute_activation_function": True, "recompute_norm": True},
        {"recompute_method": "block", "full_recompute_num_layers": 3, "recompute_activation_function": True},
        {"swap_attention": True, "swap_attention_recompute_num_layers": 3},
    ):
        applied = lowtide.apply(model, lowtide.MemoryConfig.from_dict(given))
        print(applied)
        equal = all(torch.equal(a, b) for a, b in zip(want, step(model, x), strict=True))
        print(f"{memory_curve(lambda: step(model, x), warmup=1).peak_bytes / 2**20:.2f} MiB, bit-equal: {equal}")
        applied.undo()
        if not equal:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
