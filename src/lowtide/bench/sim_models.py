"""Llama layers in plain operators, as the roofline's figures assume them, in the sizes that the simulator runs.

Law: written as in Hugging Face's Llama (norms in single precision, rotary
positions, grouped queries, gated MLP, no biases), so that what a layer saves can
be counted by hand. Knows nothing about wrapping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.bench.models import Stack

__all__ = ["MODELS", "Llama", "LlamaLayer", "Shape"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama.

    Args:
        kv_heads: heads of keys and values; fewer than ``heads`` where queries share them.
        hidden: width of the MLP.
        vocabulary: ids, where embedding and head are built.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 32000

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    def with_layers(self, layers: int) -> Shape:
        """Return the same model with another number of layers."""
        return replace(self, layers=layers)


MODELS: dict[str, Shape] = {
    "llama-7b": Shape(32, 4096, 32, 32, 11008),
    "llama-8b-gqa": Shape(32, 4096, 32, 8, 14336, 128256),
    "llama-70b": Shape(80, 8192, 64, 8, 28672),
    "tiny-llama": Shape(4, 64, 4, 2, 172, 256),
}


class RmsNorm(nn.Module):
    """Scales to unit mean square, in single precision whatever the input's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rope_tables(tokens: int, head: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position's angles."""
    rates = 10000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * rates
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions, its four projections included."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        narrow = shape.kv_heads * shape.head
        self.q, self.k = nn.Linear(shape.width, shape.width, bias=False), nn.Linear(shape.width, narrow, bias=False)
        self.v, self.o = nn.Linear(shape.width, narrow, bias=False), nn.Linear(shape.width, shape.width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head).transpose(1, 2)

    def forward(self, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self._heads(self.q(y)), self._heads(self.k(y)), self._heads(self.v(y))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        shared = self.shape.heads != self.shape.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(y.shape))
        return result


class LlamaLayer(nn.Module):
    """One decoder layer; the rotary tables come with every call, since all layers share them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(shape.width), RmsNorm(shape.width)
        self.self_attn = LlamaAttention(shape)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.self_attn(self.norm1(x), cos, sin)
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(Stack):
    """Layers, and with ``ends`` also embedding, last norm and head, so that it maps ids to logits.

    Without ``ends`` it maps (batch, tokens, width) to the same shape. Parameters
    are left as they were allocated: the simulator looks at sizes only.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, tokens: int, *, ends: bool = False) -> None:
        super().__init__(*[LlamaLayer(shape) for _ in range(shape.layers)])
        self.embed = nn.Embedding(shape.vocabulary, shape.width) if ends else None
        self.norm = RmsNorm(shape.width) if ends else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if ends else None
        for name, table in zip(("cos", "sin"), rope_tables(tokens, shape.head), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run everything that was built, in order."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.blocks:
            x = layer(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
