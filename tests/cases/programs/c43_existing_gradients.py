"""C43. Kind: a replay writes into .grad and the engine adds the same gradient again.
Source: unslothai/unsloth-zoo PR 892; fairscale issue 777 (gradient accumulation).
Model: 3 layers whose second weight is shared with the head. .grad holds values beforehand.
Action: 3 micro-batches without zeroing; a tensor hook on a weight counts and doubles its
gradient; x itself needs grad and holds an old .grad too.
Right: .grad is old + sum of the micro-batches, hook called once per micro-batch, as on the twin.
"""

import torch
from torch import nn

from .kit import DEV, Chain, check, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(6, 6), shared

    def forward(self, x):
        return x + torch.tanh(self.own(x)) @ self.shared.weight


class Net(Chain):
    def __init__(self):
        shared = nn.Linear(6, 6, bias=False)
        super().__init__(*[Layer(shared) for _ in range(3)])
        self.head = shared

    def forward(self, x):
        return self.head(super().forward(x))


def run(wrap, link=None):
    plain, other = twin(Net, wrap, link)
    got = []
    for m in (plain, other):
        torch.manual_seed(3)
        calls = []
        m.head.weight.register_hook(lambda g, c=calls: c.append(1) or g * 2)
        for p in m.parameters():
            p.grad = torch.randn(p.shape, device=DEV)
        x = torch.randn(4, 6, device=DEV, requires_grad=True)
        x.grad = torch.ones_like(x)
        for k in range(3):
            m(x + k).square().mean().backward()
        got.append([[p.grad for p in m.parameters()], x.grad, len(calls)])
    check(got[0], got[1])
