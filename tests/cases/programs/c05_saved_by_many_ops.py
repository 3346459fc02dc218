"""C05. Kind: one activation saved by many ops (and by the next layers) is moved many times.
Source: NVIDIA/TransformerEngine PR 1762 (duplicate offload); mindspore-ai/hyper-parallel issue 273.
Model: layer i computes h once and feeds it to five ops that all save it, plus three views of h
(row half, column half, transpose). Layer i+1 saves the same h again as its input.
Action: forward, backward. If host_bytes() is passed it is read between the two.
Right: gradients equal the unwrapped twin. With host_bytes: bytes on the host stay below 1.5 x the
bytes of the distinct storages that plain autograd keeps (a copy per save needs 1.8 x here).
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"
N, D, L = 16, 16, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        h = self.lin(x)
        five = h.sin() + h.cos() + h.exp() * 0.1 + h.square() + h.sigmoid()
        half = h[:8].sin().sum(0) + h[8:].cos().sum(0)
        cols = (h[:, ::2] * h[:, 1::2]).sum()
        return (five + half + h.t().tanh() + cols * 0.01) * 0.2


def run(wrap, link=None, host_bytes=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(L)]), wrap, link)
    x, seen, own = torch.randn(N, D, device=DEV), {}, {}
    skip = {p.untyped_storage().data_ptr() for p in plain.parameters()}

    def note(t):
        s = t.untyped_storage()
        if s.data_ptr() not in skip:
            own[s.data_ptr()] = s.nbytes()
        return t

    def action(m):
        with saved_tensors_hooks(note, lambda t: t):
            loss = m(x).square().sum() if m is plain else None
        loss = m(x).square().sum() if loss is None else loss
        if host_bytes is not None and m is other:
            seen["host"] = host_bytes()
        loss.backward()
        return loss.detach()

    same_result(plain, other, action)
    seen["distinct"] = sum(own.values())
    assert seen.get("host", 0) <= 1.5 * seen["distinct"], seen
    return seen
