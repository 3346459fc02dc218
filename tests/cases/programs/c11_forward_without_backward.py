"""C11. Kind: forward passes that never get a backward leak memory or poison the next step.
Source: meta-pytorch/torchtune issue 2709; huggingface/trl issue 4280 and PR 4236.
Model: 4 layers; each remembers a weak handle on the storage of one of its saved activations.
Action: three forwards with grad enabled whose result is dropped (metrics only), one forward
whose result is kept alive but never used, then two normal steps.
Right: the dropped activations are gone after garbage collection (device and host side), no
"not cleared" error is raised, and the normal steps equal the unwrapped twin.
"""

import gc
import time

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"
SEEN = []


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x).sigmoid()
        SEEN.append(StorageWeakRef(h.untyped_storage()))
        return h.exp() + x


def run(wrap, link=None, host_bytes=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(4)]), wrap, link)
    x = torch.randn(4, 8, device=DEV)

    def action(m):
        SEEN.clear()
        for _ in range(3):
            float(m(x).sum().detach())
        gc.collect()
        # A copy that is on its way when its graph is dropped holds its source until it has arrived.
        end = time.monotonic() + 10
        while time.monotonic() < end and not all(ref.expired() for ref in SEEN):
            time.sleep(0.01)
        assert all(ref.expired() for ref in SEEN), "activations of dropped graphs are still alive"
        if host_bytes is not None and m is other:
            assert host_bytes() == 0, "host copies of dropped graphs are still alive"
        kept = m(x)
        losses = []
        for k in (1.0, 2.0):
            loss = m(x * k).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, kept.detach()]

    same_result(plain, other, action)
