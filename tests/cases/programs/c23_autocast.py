"""C23. Kind: forward ran under autocast, backward (and so the replay) does not.
Source: pytorch/pytorch issue 141896 (weight-cast cache + non-reentrant checkpoint).
Model: a layer that uses one Linear twice (the cast of its weight is cached), then a part under
autocast(enabled=False) in float32, then a LayerNorm.
Action: forward + loss under bf16 autocast; backward outside. Then the same with cache_enabled
off, and with backward inside the autocast region.
Right: loss and gradients equal the unwrapped twin (same dtype at every op), no metadata error.
"""

# ruff: noqa: B023

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"
KIND = torch.device(DEV).type


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        y = self.lin(torch.tanh(self.lin(x)))
        with torch.autocast(KIND, enabled=False):
            y = y.float() + nn.functional.linear(x.float(), self.lin.weight)
        return self.norm(y)


def run(wrap, link=None):
    x = torch.randn(8, 16, device=DEV)
    for cache, inside in ((True, False), (False, False), (True, True)):
        plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)

        def action(m):
            with torch.autocast(KIND, dtype=torch.bfloat16, cache_enabled=cache):
                out = m(x)
                loss = out.float().square().mean()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            return [out.detach(), loss.detach()]

        same_result(plain, other, action)
