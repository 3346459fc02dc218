"""C45. Kind: a policy that is not constant per op: counts calls, mixes the three answers.
Source: pytorch/torchtitan PR 2357 (save every second mm); pytorch/pytorch PR 125795 and PR 180874 (offload answer).
Model: layers with 4 matmuls of equal shape each, dropout, layer norm.
Action: ENTRY "wrap_policy". Policies: (a) save every second mm, counted anew in each phase
(forward, recompute); (b) answer by op name hash among save / recompute / swap; (c) swap everything
that is a view op or a random op as well; (d) a policy that answers differently in recompute.
Two steps each.
Right: (a) gradients equal the unwrapped twin. (b)-(d) equal, or, unless strict=True, a clear
error (plain torch refuses to keep an output that a random in-place op fills later); never silently
other gradients.
"""

# ruff: noqa: B023, E731, FBT002, PT017

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap_policy"
MM = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x):
        h = self.norm(x)
        att = (self.q(h) @ self.k(h).t()).softmax(-1)
        return x + self.o(self.drop(att) @ self.v(h))


def alternating():
    now = [None, 0]  # phase, matmuls seen in this phase

    def policy(is_recompute, op):
        if op not in MM:
            return "recompute"
        now[:] = [is_recompute, now[1] + 1 if now[0] == is_recompute else 1]
        return "save" if now[1] % 2 else "recompute"

    return policy


def hashed():
    return lambda is_recompute, op: ("save", "recompute", "swap")[sum(map(ord, str(op))) % 3]


def run(wrap, link=None, strict=False):
    x, notes = torch.randn(5, 8, device=DEV), {}
    liar = lambda: lambda is_recompute, op: "recompute" if is_recompute else "save"
    for name, make in (
        ("alternating", alternating),
        ("hashed", hashed),
        ("swap-all", lambda: lambda r, op: "swap"),
        ("two-faced", liar),
    ):
        plain, other = twin(lambda: Chain(*[Layer() for _ in range(2)]), lambda m: wrap(m, make()), link, whole=wrap)
        try:
            same_result(plain, other, lambda m: [m(x).square().sum().backward() for _ in range(2)] and None)
            notes[name] = "equal"
        except (RuntimeError, AssertionError) as e:
            assert not strict and name != "alternating" and not isinstance(e, AssertionError), e
            notes[name] = "error: " + str(e)[:60]
    return notes
