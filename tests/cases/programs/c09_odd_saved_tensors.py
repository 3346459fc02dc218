"""C09. Kind: saved tensors that are not plain float activations.
Source: meta-pytorch/torchtune issue 2456 (host tensor comes back on the device);
deepspeedai/DeepSpeed issue 598 (None) and PR 1376 (integer tensors shift the index).
Model: a custom op saves, in this order: a bool mask, an int64 index, None, an empty tensor, a
0-dim float64, a tensor that lives on the host, and the float input; each layer also takes the
mask and a None as positional arguments.
Action: forward, backward.
Right: backward sees each one in its slot with the same device, dtype, shape and value.
"""

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, idx):
        empty = x.new_empty(0, 3)
        scale = torch.tensor(1.5, dtype=torch.float64, device=x.device)
        host = torch.arange(4.0)
        ctx.save_for_backward(mask, idx, None, empty, scale, host, x)
        ctx.dev = x.device
        return torch.where(mask, x, x[idx]) * scale.float()

    @staticmethod
    def backward(ctx, g):
        mask, idx, nothing, empty, scale, host, x = ctx.saved_tensors
        assert nothing is None and empty.shape == (0, 3)
        assert mask.dtype == torch.bool and idx.dtype == torch.int64
        assert scale.dtype == torch.float64 and scale.shape == () and float(scale) == 1.5
        assert host.device.type == "cpu" and host.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert all(t.device == ctx.dev for t in (mask, idx, empty, scale, x))
        gx = torch.where(mask, g, torch.zeros_like(g)) * scale.float()
        rest = torch.where(mask, torch.zeros_like(g), g) * scale.float()
        return gx.index_add(0, idx, rest), None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, mask, bias, idx):
        y = Odd.apply(self.lin(x), mask, idx)
        return y if bias is None else y + bias


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)
    x, mask = torch.randn(6, 4, device=DEV), torch.rand(6, 4, device=DEV) > 0.5
    idx = torch.randperm(6, device=DEV)
    same_result(plain, other, lambda m: m(x, mask, None, idx).sum().backward())
