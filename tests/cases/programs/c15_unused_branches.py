"""C15. Kind: part of what was saved is never asked for in backward.
Source: pytorch/pytorch issue 82482 (packed but never unpacked).
Model: each layer returns (state, side); side outputs of odd layers never reach the loss; the
last layer's output is ignored altogether, so its backward never runs.
Action: three steps in a row. In step 2 the roles change (other sides are used); in step 3 only
the first layer's side output is used.
Right: every step equals the unwrapped twin (None grads stay None); nothing carries over.
"""

# ruff: noqa: B023

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.main(x))
        return h, self.side(h.sin()).exp()


class Net(Chain):
    def forward(self, x):
        outs = []
        for layer in self.layers:
            x, side = layer(x)
            outs.append((x, side))
        return outs


def run(wrap, link=None):
    plain, other = twin(lambda: Net(*[Layer() for _ in range(5)]), wrap, link)
    x = torch.randn(4, 6, device=DEV)
    losses = [
        lambda o: o[3][0].sum() + o[0][1].sum() + o[2][1].sum(),
        lambda o: o[4][0].sum() + o[1][1].mean() + o[3][1].mean(),
        lambda o: o[0][1].sum(),
    ]
    for pick in losses + losses[::-1]:

        def action(m):
            loss = pick(m(x))
            loss.backward()
            return loss.detach()

        same_result(plain, other, action)
