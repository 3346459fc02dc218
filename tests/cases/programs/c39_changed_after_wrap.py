"""C39. Kind: the module is changed after it was wrapped.
Source: facebookresearch/fairscale issue 660 (sub-module swapped after wrapping); a cached bound
forward goes stale in the same way.
Model: 3 layers with an "act" child.
Action, after wrapping: replace every act child through the parent's module tree; replace a weight
by a new Parameter; register a forward hook on the inner layer that doubles the output; monkeypatch
the inner layer's forward; load new weights in place. A step after each change.
Right: each change is seen in forward and in the replay; equal to the unwrapped twin changed alike.
"""

import types

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.act = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x):
        return x + self.act(self.lin(x))


def inner(m):
    return [k for k in m.modules() if isinstance(k, Layer)]


def new_act(m):
    for k in inner(m):
        k.act = nn.Sigmoid()


def new_weight(m):
    k = inner(m)[1]
    k.lin.weight = nn.Parameter(k.lin.weight.detach() * -1)


def add_hook(m):
    inner(m)[0].register_forward_hook(lambda mod, args, out: out * 2)


def patch(m):
    k = inner(m)[2]
    k.forward = types.MethodType(lambda self, x: self.act(self.lin(x)) * x, k)


def load(m):
    for k in inner(m):
        k.lin.load_state_dict({n: v * 0.5 for n, v in k.lin.state_dict().items()})


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)
    x = torch.randn(4, 6, device=DEV)
    for change in (new_act, new_weight, add_hook, patch, load):
        change(plain), change(other)
        same_result(plain, other, lambda m: m(x).square().sum().backward())
