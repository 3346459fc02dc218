"""C13. Kind: the same graph is run backward more than once.
Source: pytorch/pytorch issues 82156 and 82482; unslothai/unsloth issue 3592.
Model: 3 layers. Action: backward with retain_graph=True twice, then a last backward without; and,
on a new graph, two losses that share the trunk, each with its own backward.
Right: gradients are the sum, as in the unwrapped twin; a further backward on the spent graph
raises the usual RuntimeError (no silent garbage, no KeyError from our own bookkeeping).
"""

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        h = self.lin(x)
        return x + h.sigmoid() * h.cos()


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)
    x = torch.randn(5, 6, device=DEV)

    def action(m):
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        try:
            loss.backward()
            raise AssertionError("a spent graph ran backward again")
        except RuntimeError:
            pass
        trunk = m(x)
        one, two = trunk.sin().sum(), trunk.exp().mean()
        one.backward(retain_graph=True)
        two.backward()
        return [loss.detach(), one.detach(), two.detach()]

    same_result(plain, other, action)
