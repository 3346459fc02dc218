"""A small GPT over bytes, written to be read in one sitting.

Holds the model that the demonstration trains, and nothing of lowtide: memory
modes are applied from outside, to a model that knows nothing of them. Must
never import from lowtide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model. The defaults give 10.0 million parameters."""

    layers: int = 8
    heads: int = 5
    width: int = 320
    context: int = 256
    vocabulary: int = 256
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast("Tensor", self.out(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """One layer: attention, then a feed-forward part four times as wide, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + cast("Tensor", self.dropout(self.mlp(self.norm2(x))))


class GPT(nn.Module):
    """A decoder that predicts the next byte at every position.

    >>> import torch
    >>> model = GPT(Shape(layers=1, heads=2, width=16, context=8))
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Start near a uniform guess: loss about log(256) = 5.55.

        The token's own embedding outweighs what positions and layers add, so that
        the first steps learn which byte follows which, not byte frequencies alone.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes (batch, time) to logits (batch, time, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(self.norm(x)))
