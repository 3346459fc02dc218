"""C19. Kind: a custom op reads ctx.saved_tensors two times in one backward.
Source: pytorch/pytorch PR 78752 / PR 90105 (second access of a recomputed tensor fails).
Model: 3 layers around a custom op that fetches its saved tensors twice and compares them.
Action: forward, backward.
Right: swap modes: equal values both times, gradients equal the unwrapped twin. Recompute modes:
the same, or a clear error that names the cause (error_ok=True); never None or stale values.
"""

# ruff: noqa: FBT002, PT017

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0]
        again_x, y = ctx.saved_tensors
        assert torch.equal(x, again_x)
        return g * (y + x * y * (1 - y))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return Twice.apply(self.lin(x))


def run(wrap, link=None, error_ok=True):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)
    x = torch.randn(4, 6, device=DEV)

    def action(m):
        loss = m(x).sum()
        loss.backward()
        return loss.detach()

    try:
        same_result(plain, other, action)
    except AssertionError:
        raise
    except RuntimeError as e:
        assert error_ok and len(str(e)) > 20, e
        return {"error": str(e)[:80]}
