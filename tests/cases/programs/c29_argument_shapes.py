"""C29. Kind: inputs come by keyword, nested, as None, as flags, or in another order.
Source: deepspeedai/DeepSpeed issue 598; huggingface/transformers PR 23367 (argument order);
unslothai/unsloth-zoo PR 1218 (an option eats the first activation); pytorch/pytorch issue 124725.
Model: forward(x, mask=None, *, extra, flag=True, scale=1.0) where extra is a dict holding a
tensor, a list of tensors, a tuple with None, and a dataclass with a tensor field. All need grad.
Action: calls with x positional, x by keyword, mask positional, flag False; kwargs named like
common wrapper options (use_cache, preserve_rng_state, function).
Right: outputs and the gradients of every nested tensor equal the unwrapped twin.
"""

import dataclasses

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap"


@dataclasses.dataclass
class Box:
    t: torch.Tensor
    name: str = "box"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x, mask=None, *, extra, flag=True, scale=1.0, **named):
        y = torch.tanh(self.lin(x)) * extra["gain"] + extra["many"][0] * extra["many"][1]
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        y = y * extra["pair"][0] if extra["pair"][1] is None else y
        y = y + extra["box"].t if flag else y - extra["box"].t
        assert named in ({}, {"use_cache": False, "preserve_rng_state": 3, "function": "f"})
        return y * scale


def run(wrap, link=None):
    plain, other = twin(lambda: Chain(*[Layer() for _ in range(2)]), wrap, link)
    mask = torch.rand(4, 5, device=DEV) > 0.7

    def action(m):
        leaf = [torch.randn(4, 5, device=DEV, requires_grad=True) for _ in range(6)]
        extra = {"gain": leaf[1], "many": leaf[2:4], "pair": (leaf[4], None), "box": Box(leaf[5])}
        odd = {"use_cache": False, "preserve_rng_state": 3, "function": "f"}
        first, second = m.layers
        y = first(leaf[0], mask, extra=extra)
        y = second(x=y, extra=extra, flag=False, scale=0.5)
        y = first(y, extra=extra, mask=None, **odd)
        y.square().sum().backward()
        return [y.detach(), [t.grad for t in leaf]]

    same_result(plain, other, action)
