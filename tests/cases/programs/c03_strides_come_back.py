"""C03. Kind: reload gives a dense copy, the original strides are lost.
Source: pytorch/pytorch PR 186396; deepspeedai/DeepSpeed PR 8388 (overlapping views).
Model: a custom autograd op saves x.t() (non-contiguous) and its backward calls
saved.t().view(-1), which only works when the strides are the saved ones. A second op saves an
expanded row (stride 0); its backward needs equal values, and the loaded tensor must not
need more real memory than rows * cols elements.
Action: forward, backward. Right: view() works, gradients equal the unwrapped twin, shapes as saved.
"""

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class NeedsLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.t())
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (xt,) = ctx.saved_tensors
        return 2 * xt.t().view(-1).view_as(g) * g


class NeedsRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row):
        wide = row.expand(x.shape[0], -1)
        ctx.save_for_backward(x, wide)
        return x * wide

    @staticmethod
    def backward(ctx, g):
        x, wide = ctx.saved_tensors
        assert wide.shape == x.shape and wide.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size()
        return g * wide, (g * x).sum(0, keepdim=True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.row = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 4))

    def forward(self, x):
        return NeedsRow.apply(NeedsLayout.apply(self.lin(x)), self.row)


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)
    x = torch.randn(8, 4, device=DEV)

    def action(m):
        loss = m(x).sum()
        loss.backward()
        return loss.detach()

    same_result(plain, other, action)
