"""C27. Kind: parameters change during backward (optimizer step fused into the grad hook).
Source: pytorch/torchtitan PR 705; pytorch/ao PR 584; value drift of a replay: Comfy-Org/ComfyUI issue 15846.
Model: 4 layers, each parameter has a post-accumulate hook that does p -= lr * grad and drops grad.
Action: 4 steps.
Right: final parameters equal the unwrapped twin: a layer's replay runs before its own update and
never sees another layer's half-done state.
"""

import torch
from torch import nn

from .kit import DEV, Chain, check, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(4)]), wrap, link)
    xs = [torch.randn(5, 6, device=DEV) for _ in range(4)]

    def fuse(p):
        with torch.no_grad():
            p -= 0.05 * p.grad
        p.grad = None

    for m in (plain, other):
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(fuse)
        for x in xs:
            m(x).square().sum().backward()
    check(list(plain.parameters()), list(other.parameters()))
