"""C17. Kind: second-order gradients through wrapped layers.
Source: pytorch/pytorch issues 102223 and 33999.
Model: 3 smooth layers. Action: g = grad(out.sum(), x, create_graph=True); loss = out.mean() +
g.square().sum(); loss.backward(). Also a layer that calls autograd.grad inside its own forward
(an energy model: force = -dE/dpos with create_graph).
Right: all gradients equal the unwrapped twin; a mode that cannot support this raises a clear
error, it never returns first-order gradients only.
"""

# ruff: noqa: B023

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        h = self.lin(x)
        return h.tanh() * (1 + h.sin())


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, pos):
        with torch.enable_grad():
            p = pos if pos.requires_grad else pos.detach().requires_grad_()
            energy = self.lin(p).tanh().square().sum()
            return pos - torch.autograd.grad(energy, p, create_graph=True)[0]


def run(wrap, link=None):
    x0 = torch.randn(5, 4, device=DEV)
    for make in (Smooth, Force):
        plain, other = twin(lambda: Chain(*[make() for _ in range(3)]), wrap, link)

        def action(m):
            x = x0.clone().requires_grad_()
            out = m(x)
            loss = out.mean()
            if make is Smooth:
                (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + g.square().sum()
            loss.backward()
            return [loss.detach(), x.grad]

        same_result(plain, other, action)
