"""C01. Kind: a tensor and its transpose share memory but not layout.
Source: modelscope/ms-swift PR 10157.
Model: 3 layers on a square n x n state. Each layer makes h = x @ A, then uses the elementwise
product of h with h.t() (both get saved, same address, other strides) and sin of the first two
rows of h (same address, smaller shape).
Action: one forward, one backward.
Right: loss and every gradient equal the unwrapped twin. No reshape error on the small slice.
"""

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, n) / n**0.5)

    def forward(self, x):
        h = x @ self.a
        both = h * h.t()
        top = h[:2].sin().sum(0, keepdim=True)
        return torch.tanh(both + top)


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer(6) for _ in range(3)]), wrap, link)
    x = torch.randn(6, 6, device=DEV)

    def action(m):
        loss = (m(x) * torch.arange(36.0, device=DEV).view(6, 6)).sum()
        loss.backward()
        return loss.detach()

    same_result(plain, other, action)
