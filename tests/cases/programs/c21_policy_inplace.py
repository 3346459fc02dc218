"""C21. Kind: op-level policy keeps an op's output, then an in-place op changes that output.
Source: pytorch/pytorch issue 119590 and issue 113737.
Model: y = x @ A with the matmul under "save" (then under "swap"), followed by an in-place
activation on y, then another matmul. ENTRY "wrap_policy": wrap(module, policy) where
policy(is_recompute, op) returns "save", "recompute" or "swap".
Action: forward, backward, for the policies save-mm, swap-mm, save-all, recompute-all.
Right: gradients equal the unwrapped twin, or an error that says a kept tensor was changed in
place (accepted unless strict=True). Using the changed tensor as if it were the matmul's output is the fault.
"""

# ruff: noqa: B023, FBT002, PLW0108, PT017

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap_policy"


class Layer(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(6, 6) / 2) for _ in range(2))
        self.act = act

    def forward(self, x):
        y = torch.mm(x, self.a)
        self.act(y)
        return torch.mm(y, self.b)


ACTS = [lambda y: torch.selu_(y), lambda y: y.mul_(2.0), lambda y: y.view(-1).sigmoid_()]


def run(wrap, link=None, strict=False):
    x, notes = torch.randn(4, 6, device=DEV), {}
    for i, act in enumerate(ACTS):
        for name in ("save-mm", "swap-mm", "save-all", "recompute-all"):
            word, what = name.split("-")

            def policy(is_recompute, op, word=word, what=what):
                hit = what == "all" or op == torch.ops.aten.mm.default
                return word if hit else "recompute"

            plain, other = twin(
                lambda: Chain(*[Layer(act) for _ in range(2)]), lambda m: wrap(m, policy), link, whole=wrap
            )
            try:
                same_result(plain, other, lambda m: m(x).sum().backward())
                notes[name, i] = "equal"
            except AssertionError:
                raise
            except RuntimeError as e:
                assert not strict, e
                notes[name, i] = "error: " + str(e)[:60]
    return notes
