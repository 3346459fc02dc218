"""C41. Kind: saved tensors of a tensor subclass (DTensor, quantized) lose their class or halves.
Source: pytorch/ao PR 881; NVIDIA/TransformerEngine PR 1738; meta-pytorch/torchtune issue 2683 (TP + offload).
Model: smooth layers fed with torch's own TwoTensor test class (two inner tensors); then the same
with DTensor on a one-process gloo mesh (skipped if distributed is not available).
Action: forward, backward.
Right: gradient has the subclass type and both inner values equal the plain-tensor result.
"""

# ruff: noqa: FBT002, S306

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from .kit import Chain, check, settle, wrap_list

ENTRY = "wrap"


class Layer(nn.Module):
    def forward(self, x):
        return x.sin() * x.sigmoid() + x


def grad_of(m, x):
    x = x.detach().requires_grad_()
    m(x).square().sum().backward()
    return x.grad


def run(wrap, link=None, dtensor=True):
    torch.manual_seed(0)
    plain, other = Chain(Layer(), Layer(), Layer()), Chain(Layer(), Layer(), Layer())
    wrap_list(other.layers, wrap, link)
    settle(other, wrap)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    got = grad_of(other, TwoTensor(a, b))
    assert isinstance(got, TwoTensor), type(got)
    check([grad_of(plain, a), grad_of(plain, b)], [got.a, got.b])
    if not (dtensor and dist.is_available()):
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        expected = grad_of(plain, distribute_tensor(a, mesh, [Shard(0)]))
        got = grad_of(other, distribute_tensor(a, mesh, [Shard(0)]))
        assert isinstance(got, DTensor) and got.placements == expected.placements
        check(grad_of(plain, a), got.to_local())
    finally:
        if mine:
            dist.destroy_process_group()
