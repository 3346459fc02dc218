"""C50. Kind: the wrapped optimizer is no longer usable by schedulers, hooks, closures.
Source: pytorch/ao issues 959 and 1209; pytorch/ao PR 1649; huggingface/peft PR 3382 (closure).
ENTRY "optimizer": run(wrap_opt); wrap_opt(optimizer) -> optimizer (may be the same object).
Action: build LambdaLR + CosineAnnealingLR-like chains on the wrapped optimizer, change lr by
param_groups, use step(closure), step pre/post hooks, zero_grad both ways, repr(), add_param_group.
Right: isinstance Optimizer; lr changes take effect; closure is run once and its loss returned;
hooks fire once per step; weights after 8 steps equal the plain optimizer's, bit for bit on CPU.
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from .kit import DEV, check

ENTRY = "optimizer"


def train(wrap_opt):
    torch.manual_seed(0)
    m, late = nn.Linear(6, 6).to(DEV), nn.Linear(6, 6).to(DEV)
    opt = wrap_opt(torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.05))
    assert isinstance(opt, torch.optim.Optimizer) and "lr" in opt.defaults and repr(opt)
    sched = SequentialLR(
        opt, [LambdaLR(opt, lambda k: 0.1 * (k + 1)), LambdaLR(opt, lambda k: 1.0 / (k + 1))], milestones=[3]
    )
    count = [0, 0]
    opt.register_step_pre_hook(lambda *a: count.__setitem__(0, count[0] + 1))
    opt.register_step_post_hook(lambda *a: count.__setitem__(1, count[1] + 1))
    lrs, runs = [], [0]
    for k in range(8):
        x = torch.randn(4, 6, device=DEV)

        def closure(k=k, x=x):
            runs[0] += 1
            opt.zero_grad(set_to_none=k % 2 == 0)
            loss = late(torch.tanh(m(x))).square().sum()
            loss.backward()
            return loss

        if k == 4:
            opt.add_param_group({"params": list(late.parameters()), "lr": 0.01})
        if k % 2:
            got = opt.step(closure)
            assert isinstance(got, torch.Tensor) and got.requires_grad
        else:
            closure()
            opt.step()
        if k < 4:
            sched.step()
        else:
            opt.param_groups[0]["lr"] *= 0.5
        lrs.append([g["lr"] for g in opt.param_groups])
    assert count == [8, 8] and runs == [8], (count, runs)
    return [p.detach().clone() for p in [*m.parameters(), *late.parameters()]], lrs


def run(wrap_opt):
    want, got = train(lambda o: o), train(wrap_opt)
    check(want, got)
