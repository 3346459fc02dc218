"""C25. Kind: a layer takes another path on its second call, and the replay is that second call.
Source: NVIDIA-NeMo/Automodel PR 3247; pytorch/torchtitan PR 1593 and PR 3146 (routing replay).
Model: a small MoE: top-2 of 4 experts, tokens gathered per expert; the load counter is None at
first, is created by call 1 and added to in place by later calls.
Action: 3 steps under the policies recompute-all, save mm + topk, swap mm, save-all.
Right: routing of the replay equals the forward's and gradients equal the unwrapped twin; where a kept
op is missing on the other path, a clear error (plain torch: "not found in storage") is accepted
unless strict=True, which also wants the load counter equal.
"""

# ruff: noqa: B023, FBT002, PT017

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "wrap_policy"


class Moe(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.load = None

    def forward(self, x):
        score = self.gate(x).softmax(-1)
        w, pick = score.topk(2, dim=-1)
        count = torch.bincount(pick.flatten(), minlength=len(self.experts)).float()
        if self.load is None:
            self.load = count
        else:
            self.load += count
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, slot = (pick == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(x[row]) * w[row, slot, None])
        return x + torch.tanh(out)


def run(wrap, link=None, strict=False):
    mm = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    kept = [("recompute", set()), ("save", mm | {torch.ops.aten.topk.default}), ("swap", mm), ("save", None)]
    xs, notes = [torch.randn(12, 6, device=DEV) for _ in range(3)], []
    for word, ops in kept:

        def policy(is_recompute, op):
            return word if ops is None or op in ops else "recompute"

        box = []
        plain, other = twin(
            lambda: Chain(*[Moe() for _ in range(2)]), lambda m: box.append(m) or wrap(m, policy), link, whole=wrap
        )
        try:
            same_result(plain, other, lambda m: [m(x).square().mean().backward() for x in xs])
        except RuntimeError as e:
            assert not strict, e
            notes.append((word, "error: " + str(e)[:60]))
            continue
        even = all(torch.equal(a.load, b.load) for a, b in zip(plain.layers, box, strict=True))
        assert even or not strict
        notes.append((word, "load equal" if even else "load counted by the replay"))
    return notes
