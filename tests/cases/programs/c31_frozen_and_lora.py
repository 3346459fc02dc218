"""C31. Kind: inputs without grad, frozen layers, adapters (no backward at all in front layers).
Source: huggingface/transformers issue 23170 and issue 26221; locuslab/open-unlearning issue 178;
axolotl-ai-cloud/axolotl PR 2927; a swap-attention document that says "not compatible with LoRA".
Model: 6 layers; 0-1 fully frozen with a no-grad input (no graph), 2 frozen base + trainable
low-rank adapter, 3 fully frozen in the middle, 4 adapter, 5 norm-only trainable.
Action: 3 SGD steps, linked in order.
Right: exactly the same parameters have a grad, all equal; weights after 3 steps equal; scheduling
does not wait for a backward that never comes.
"""

import torch
from torch import nn

from .kit import DEV, Chain, check, same_result, twin

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.base, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.lora = mode == "lora"
        for p in self.base.parameters():
            p.requires_grad_(False)
        for p in self.norm.parameters():
            p.requires_grad_(mode == "norm")
        if self.lora:
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        h = self.norm(x)
        y = self.base(h)
        if self.lora:
            y = y + self.up(self.down(h))
        return x + torch.tanh(y)


MODES = ["frozen", "frozen", "lora", "frozen", "lora", "norm"]


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer(k) for k in MODES]), wrap, link)
    x = torch.randn(5, 8, device=DEV)

    def action(m):
        live = [p for p in m.parameters() if p.requires_grad]
        opt = torch.optim.SGD(live, lr=0.1)
        for k in range(3):
            opt.zero_grad()
            m(x + k).square().mean().backward()
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in live)
            opt.step()

    same_result(plain, other, action)
    check(list(plain.parameters()), list(other.parameters()))
