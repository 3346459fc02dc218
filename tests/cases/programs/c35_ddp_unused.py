"""C35. Kind: wrapped layers under DistributedDataParallel.
Source: pytorch/pytorch issue 24005; huggingface/peft issue 313; huggingface/accelerate issue 2017.
Model: 4 layers (one shared twice in the stack) + an unused head, in a one-process gloo group.
Action: DDP(model, find_unused_parameters=True) and DDP(model, static_graph=True): 3 steps each, with a
no_sync micro-batch before each synced one.
Right: no "marked ready twice" error; gradients equal the unwrapped, un-DDP'd twin; unused head's
grad stays None. Host only (gloo).
"""

# ruff: noqa: N817, S306

import gc
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .kit import Chain, check, grads_of, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


class Net(Chain):
    def __init__(self):
        super().__init__(*[Layer() for _ in range(3)])
        self.unused = nn.Linear(6, 2)

    def forward(self, x):
        return super().forward(super().forward(x))


def _train(wrap, link):
    for opts in ({"find_unused_parameters": True}, {"static_graph": True}):
        plain, other = twin(Net, wrap, link)
        ddp = DDP(other.cpu(), **opts)
        plain.cpu()
        for _ in range(3):
            x = torch.randn(4, 6)
            for m in (plain, ddp):
                m.zero_grad(set_to_none=True)
            plain(x).sum().backward(), plain(x * 2).sum().backward()
            if "static_graph" in opts:
                ddp(x).sum().backward()
            else:
                with ddp.no_sync():
                    ddp(x).sum().backward()
            ddp(x * 2).sum().backward()
            check(grads_of(plain), grads_of(other))


def run(wrap, link=None):
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
    try:
        _train(wrap, link)
        # What DDP holds of the group goes first: the last reference to a gloo group, dropped with the interpreter's
        # lock held, may wait for ever for a thread of the group's that wants that lock.
        gc.collect()
    finally:
        if mine:
            dist.destroy_process_group()
