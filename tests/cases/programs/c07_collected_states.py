"""C07. Kind: a layer's input/output is still wanted by the caller after the layer is done.
Source: huggingface/accelerate PR 4175 (layer-input offload by freeing storage); facebookresearch/fairscale issue 947.
Model: 5 layers; layer 2 returns its input object unchanged, layer 3 returns a view of its input.
The model collects every hidden state (input included).
Action: after forward the caller reads all states, builds an auxiliary loss from them, runs
backward, and reads the states once more.
Right: states equal the unwrapped twin before and after backward; gradients equal.
"""

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Same(nn.Module):
    def forward(self, x):
        return x


class Look(nn.Module):
    def forward(self, x):
        return x.view(-1, 8)


class Net(Chain):
    def forward(self, x):
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states


def run(wrap, link=None):
    plain, other = twin(lambda: Net(Dense(), Dense(), Same(), Look(), Dense()), wrap, link)
    x = torch.randn(6, 8, device=DEV)

    def action(m):
        states = m(x.clone())
        first = [s.detach().clone() for s in states]
        loss = states[-1].sum() + sum(s.square().mean() for s in states[1:])
        loss.backward()
        return [loss.detach(), first, [s.detach().clone() for s in states]]

    same_result(plain, other, action)
