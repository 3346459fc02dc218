"""A small model to train on two devices, and an independent count of the bytes that its tensors hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from weakref import finalize

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, HEADS, VOCABULARY = 32, 4, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))


def train(
    origin: nn.Module, where: str, optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """Train three steps; the losses and then the parameters, on the CPU."""
    model = copy.deepcopy(origin).to(where, dtype)
    tokens = ids().to(where)
    steps = optimizer(model.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]
    seen = []
    for _ in range(3):
        steps.zero_grad()
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        seen.append(loss.detach().cpu())
    return seen + [p.detach().cpu() for p in model.parameters()]


class StorageTracker(TorchDispatchMode):
    """Bytes of every storage that an operator has returned, for as long as it lives; knows nothing of the simulator."""

    def __init__(self, round_to: int, present: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.round_to, self.now, self.peak = round_to, 0, 0
        self.known: set[int] = {t.untyped_storage()._cdata for t in present}

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "sim" or key in self.known or storage.nbytes() == 0:
            return
        size = -(-storage.nbytes() // self.round_to) * self.round_to
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._gone, key, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        return result
