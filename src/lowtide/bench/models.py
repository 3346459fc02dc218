"""The models that the bench runs: GPT, Llama, and Llama blocks written in fused ``autograd.Function`` classes.

Law: each block's arithmetic is written out, so that what autograd saves and
what a recompute costs can be counted by hand. Knows nothing about wrapping.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

__all__ = ["Classes", "Gpt", "GptBlock", "LigerBlock", "LlamaBlock", "MegatronBlock", "Stack", "fused_classes"]

Classes: TypeAlias = tuple[Any, Any, Any]  # norm, gate and linear, as autograd.Function classes


class GptBlock(nn.Module):
    """A GPT-2 block: LayerNorm, fused qkv, attention, GELU MLP; no dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Stack(nn.Module):
    """Blocks one after the other; the wrapped units of every mode are ``blocks``."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks in order."""
        for block in self.blocks:
            x = block(x)
        return x


class Gpt(Stack):
    """A byte-level GPT around GPT blocks."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__(*[GptBlock(width, heads) for _ in range(layers)])
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) of ids to logits."""
        logits: Tensor = self.head(self.norm(super().forward(self.embed(tokens))))
        return logits


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + 1e-6))


def _rope_tables(tokens: int, head: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * rates
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaBlock(nn.Module):
    """A Llama block in plain operators: RMSNorm, rotary positions, attention, SiLU-gated MLP, no biases."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 256, heads: int = 4, hidden: int = 688, tokens: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = self._norm(width), self._norm(width)
        self.q, self.k, self.v, self.o = (self._linear(width, width) for _ in range(4))
        self.gate, self.up = self._linear(width, hidden), self._linear(width, hidden)
        self.down = self._linear(hidden, width)
        cos, sin = _rope_tables(tokens, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _norm(self, width: int) -> nn.Module:
        return _RmsNorm(width)

    def _linear(self, into: int, out: int) -> nn.Module:
        return nn.Linear(into, out, bias=False)

    def _activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        y = self.norm1(x)
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part(y).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _rotate(q, self.cos, self.sin), _rotate(k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(mixed)
        y = self.norm2(x)
        result: Tensor = x + self.down(self._activation(self.gate(y), self.up(y)))
        return result


class _FusedNorm(Function):
    """RMSNorm as fused kernels write it: keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rate = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, rate)
        return weight * (x * rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, rate = ctx.saved_tensors
        (g,) = grads
        scaled = g * weight
        inner = (scaled * x).mean(-1, keepdim=True)
        return rate * (scaled - x * rate * rate * inner), (g * x * rate).flatten(0, -2).sum(0)


class _FusedGate(Function):
    """SiLU gate as fused kernels write it: keeps its two inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (g,) = grads
        s = torch.sigmoid(gate)
        return g * up * s * (1 + gate * (1 - s)), g * gate * s


class _FusedLinear(Function):
    """A linear layer whose weight gradient is computed by hand, as tensor-parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (g,) = grads
        return g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2)


class _Norm(_RmsNorm):
    fused: Any = _FusedNorm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fused.apply(x, self.weight)
        return result


class _Linear(nn.Linear):
    fused: Any = _FusedLinear

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fused.apply(x, self.weight)
        return result


def fused_classes() -> Classes:
    """Return norm, gate and linear as new ``autograd.Function`` classes that nobody has declared pure yet."""
    return tuple(type(base.__name__, (base,), {}) for base in (_FusedNorm, _FusedGate, _FusedLinear))  # type: ignore[return-value]


class LigerBlock(LlamaBlock):
    """A Llama block whose norms and activation are Functions; ``fused`` chooses whose classes."""

    def __init__(self, fused: Classes, **shape: int) -> None:
        super().__init__(**shape)
        self.fused = fused
        for norm in (self.norm1, self.norm2):
            assert isinstance(norm, _Norm)
            norm.fused = fused[0]

    def _norm(self, width: int) -> nn.Module:
        return _Norm(width)

    def _activation(self, gate: Tensor, up: Tensor) -> Tensor:
        result: Tensor = self.fused[1].apply(gate, up)
        return result


class MegatronBlock(LigerBlock):
    """A Liger-like block whose linear layers are Functions too."""

    def __init__(self, fused: Classes, **shape: int) -> None:
        super().__init__(fused, **shape)
        for part in self.children():
            if isinstance(part, _Linear):
                part.fused = fused[2]

    def _linear(self, into: int, out: int) -> nn.Module:
        return _Linear(into, out, bias=False)
