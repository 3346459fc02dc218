"""C33. Kind: prefetch assumes a fixed layer order; layers get skipped, reordered or run alone.
Source: NVIDIA/Megatron-LM issue 7398 (backward reaches a group before its prefetch); ByteDance-Seed/VeOmni PR 965
(prefetch key of the real previous layer); axolotl-ai-cloud/axolotl PR 3512.
Model: 6 layers linked 0-1-2-3-4-5; every third layer may be left unwrapped by the test.
Action: 6 steps; each runs another list of layers: all, a subset, only the last, only the first,
reversed, with a repeat. Between two steps the loss of the first is still un-backwarded once.
Right: loss and gradients equal the unwrapped twin at every step.
"""

# ruff: noqa: B023

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"
RUNS = [[0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [5], [0], [5, 4, 3, 2, 1, 0], [0, 1, 1, 4, 2]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        h = self.lin(x)
        return x + h.tanh() * h.sigmoid()


class Net(Chain):
    def forward(self, x, plan):
        for i in plan:
            x = self.layers[i](x)
        return x


def run(wrap, link=None):
    plain, other = twin(lambda: Net(*[Layer() for _ in range(6)]), wrap, link)
    x = torch.randn(4, 6, device=DEV)
    for plan in RUNS + RUNS[::-1]:

        def action(m):
            loss = m(x, plan).square().sum()
            loss.backward()
            return loss.detach()

        same_result(plain, other, action)

    def overlap(m):
        first = m(x, RUNS[0]).sum()
        second = m(x * 2, RUNS[1]).sum()
        first.backward()
        second.backward()
        return [first.detach(), second.detach()]

    same_result(plain, other, overlap)
